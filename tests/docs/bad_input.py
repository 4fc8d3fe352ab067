"""What a person may get wrong on the command line: what was typed, in which situation, and what must come of it."""

import contextlib
import errno
import io
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from kvtier.main import main
from tests.plugins.distributions import TIER_SOURCE, Site

SECRET = "hunter2-very-secret"

RUN = "kvtier run --model model --prompts prompts.jsonl --config kvtier.toml"
CHECK = "kvtier config --config kvtier.toml --check"
DOCTOR = "kvtier doctor --config kvtier.toml"
POOL = '[pool]\ncapacity = "4MiB"\n'
DISK = '[tiers.disk]\ntype = "disk"\nroot = "cache"\n'
COLD = f'[tiers.cold]\ntype = "fake"\nroot = "/"\npassword = "{SECRET}"\n'
PROMPT = '{"prompt": "The quick brown fox jumps over the lazy dog.", "max_tokens": 1}\n'

T5 = '{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}'
HOOKS = """
from kvtier_core.tier import TierInfo, TierSettings, hookimpl

class Tier:
    Settings = TierSettings
    info = TierInfo(medium="fake", bounded_by="tier")

    def __init__(self, settings, context): ...
    @hookimpl
    def {lookup}(self, job): ...
    @hookimpl
    def submit_store(self, {store}): ...
    @hookimpl
    def submit_load(self, job): ...
    @hookimpl
    def get_finished_jobs(self): return []
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mistake. ``says`` are parts of the message: what, where, and what to do."""

    title: str
    command: str
    status: int
    says: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """Beside a good ``kvtier.toml``, ``prompts.jsonl`` and ``model``, or in place of them."""
    environ: Mapping[str, str] = field(default_factory=dict)
    plugins: Callable[[Site], None] | None = None
    storage: Callable[[pytest.MonkeyPatch], None] | None = None
    """Makes the storage misbehave."""
    needs_s3: bool = False
    checks_keys: bool = False
    """Whether the S3 server knows no key and says so."""


def _offer(source: str, *, name: str = "fake", distributions: tuple[str, ...] = ("kvtier-fake",), group="v1"):
    def install(site: Site) -> None:
        for distribution in distributions:
            module = distribution.replace("-", "_") + "_module"
            site.install(distribution, {f"kvtier.tiers.{group}": {name: f"{module}:Tier"}}, {module: source})

    return install


def _full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)


def _refusing(code: int, *, directories: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """No new files below the root, and no new directories either, or only these (they are there already)."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        if not directories:
            with contextlib.redirect_stdout(io.StringIO()):
                assert main(shlex.split(RUN)[1:]) == 0
        real_open, real_mkdir, root = os.open, os.mkdir, os.path.abspath("cache")

        def is_below_root(path, dir_fd=None, **_):
            where = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            return os.path.join(where, path).startswith(root)

        def open_file(path, flags, *args, **kwargs):
            if flags & os.O_CREAT and is_below_root(path, **kwargs):
                raise OSError(code, os.strerror(code))
            return real_open(path, flags, *args, **kwargs)

        def mkdir(path, *args, **kwargs):
            if directories and is_below_root(path, **kwargs):
                raise OSError(code, os.strerror(code))
            real_mkdir(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", open_file)
        monkeypatch.setattr(os, "mkdir", mkdir)

    return patch


def _s3(bucket: str, key: str = "right-key") -> str:
    return (
        f'[tiers.s3]\ntype = "fsspec"\nurl = "s3://{bucket}/kv"\n'
        f'storage_options = {{key = "{key}", secret = "{SECRET}", endpoint_url = "ENDPOINT"}}\n'
    )


def _valkey(url: str) -> str:
    return f'[tiers.far]\ntype = "valkey"\nurl = "{url}"\n'


COMMAND_LINE = [
    Case(
        title="unknown command",
        command="kvtier lst",
        status=2,
        says=("unknown command 'lst'", "did you mean 'list'?"),
    ),
    Case(
        title="a required argument is missing",
        command="kvtier run --model model",
        status=2,
        says=("kvtier run: error:", "required: --prompts"),
    ),
    Case(
        title="a value that is no number",
        command=f"{RUN} --max-tokens none",
        status=2,
        says=("--max-tokens", "'none' is not a number of at least 1"),
    ),
    Case(
        title="a time that is no time",
        command=f"{DOCTOR} --timeout soon",
        status=2,
        says=("--timeout", 'such as "30s"'),
    ),
    Case(
        title="no settings file given",
        command="kvtier doctor",
        status=2,
        says=(
            "no settings file was given",
            "name one with --config",
            "./kvtier.toml is there and was not read",
        ),
    ),
    Case(
        title="an engine that nobody offers",
        command="kvtier certify --engine vlm --model model",
        status=2,
        says=(
            "unknown engine 'vlm'",
            "did you mean 'vllm'?",
            "there are llama.cpp, sglang, transformers, vllm",
        ),
    ),
    Case(
        title="an engine that runs no prompts",
        command=f"{RUN} --engine vllm",
        status=2,
        says=("unknown engine 'vllm'", "there are llama.cpp, transformers"),
    ),
    Case(
        title="a port that is none",
        command="kvtier serve --model model --port 70000",
        status=2,
        says=("--port", "'70000' is not a port"),
    ),
    Case(
        title="a model to certify that is not there",
        command="kvtier certify --engine transformers --model absent",
        status=2,
        says=("absent: no such model", "give a directory"),
    ),
]
MODELS_AND_PROMPTS = [
    Case(
        title="no model at that path",
        command=RUN.replace("--model model", "--model absent"),
        status=2,
        says=("absent: no such model", "give a directory"),
    ),
    Case(
        title="a directory without a model",
        command=RUN.replace("--model model", "--model ."),
        status=2,
        says=("no config.json",),
    ),
    Case(
        title="a model that is no decoder",
        command=RUN.replace("--model model", "--model t5"),
        status=2,
        says=("it has cross-attention layers",),
        files={"t5/config.json": T5},
    ),
    Case(
        title="a file that is no GGUF",
        command=RUN.replace("--model model", "--model model.gguf"),
        status=2,
        says=("model.gguf", "not a GGUF file"),
        files={"model.gguf": "nothing"},
    ),
    Case(
        title="no prompts file",
        command=RUN.replace("prompts.jsonl", "absent.jsonl"),
        status=2,
        says=("absent.jsonl: cannot read the prompts",),
    ),
    Case(
        title="a prompts file with a broken line",
        command=RUN,
        status=2,
        says=("prompts.jsonl, line 2: not JSON",),
        files={"prompts.jsonl": PROMPT + '{"prompt": "b"\n'},
    ),
    Case(
        title="the same, going on as asked",
        command=f"{RUN} --keep-going",
        status=1,
        says=("prompts.jsonl, line 2: not JSON", "left out"),
        files={"prompts.jsonl": PROMPT + '{"prompt": "b"\n'},
    ),
    Case(
        title="a prompt longer than the model's context",
        command=RUN,
        status=2,
        says=("prompts.jsonl, line 2", "shorten the prompt"),
        files={"prompts.jsonl": PROMPT + '{"prompt": "' + "long " * 200 + '"}\n'},
    ),
]
PLUGINS = [
    Case(
        title="unknown tier type",
        command=CHECK,
        status=2,
        says=("tiers.disk.type: unknown tier type 'dsk'", "did you mean 'disk'?"),
        files={"kvtier.toml": DISK.replace('"disk"', '"dsk"')},
    ),
    Case(
        title="two packages with one tier name",
        command=CHECK,
        status=2,
        says=("'fake' is offered by first-fake 1.0", "and second-fake 1.0", "uninstall one"),
        files={"kvtier.toml": COLD},
        plugins=_offer(TIER_SOURCE, distributions=("first-fake", "second-fake")),
    ),
    Case(
        title="a plugin that fails to import",
        command=CHECK,
        status=2,
        says=("kvtier-fake 1.0", "ImportError: libfoo.so is missing", "update or uninstall"),
        files={"kvtier.toml": COLD},
        plugins=_offer("raise ImportError('libfoo.so is missing')"),
    ),
    Case(
        title="a plugin that misspells a hook",
        command=CHECK,
        status=2,
        says=("kvtier-fake 1.0", "lokup: no such hook", "did you mean 'lookup'?"),
        files={"kvtier.toml": COLD},
        plugins=_offer(HOOKS.format(lookup="lokup", store="job")),
    ),
    Case(
        title="a plugin whose hook lacks an argument",
        command=CHECK,
        status=2,
        says=("submit_store lacks the argument 'job'", "expected submit_store(self, job)"),
        files={"kvtier.toml": COLD},
        plugins=_offer(HOOKS.format(lookup="lookup", store="")),
    ),
    Case(
        title="a plugin made for another API",
        command=CHECK,
        status=2,
        says=("kvtier-fake 1.0 (group kvtier.tiers.v0)", "install a version"),
        files={"kvtier.toml": COLD},
        plugins=_offer(TIER_SOURCE, group="v0"),
    ),
    Case(
        title="a tier type of a blocked plugin",
        command=CHECK,
        status=2,
        says=("tier type 'disk' of kvtier-disk", "blocked by the setting blocked_plugins"),
        files={"kvtier.toml": 'blocked_plugins = ["kvtier-disk"]\n' + DISK},
    ),
    Case(
        title="a command of a blocked plugin",
        command="kvtier disk --config kvtier.toml",
        status=2,
        says=("command 'disk' of kvtier-disk", "blocked by the setting blocked_plugins"),
        files={"kvtier.toml": 'blocked_plugins = ["kvtier-disk"]\n'},
    ),
    Case(
        title="an engine of a blocked plugin",
        command=RUN,
        status=2,
        says=("engine 'transformers' of kvtier-transformers", "blocked by the setting blocked_plugins"),
        files={"kvtier.toml": 'blocked_plugins = ["kvtier-transformers"]\n'},
    ),
    Case(
        title="a tier type named where a plugin is blocked",
        command=CHECK,
        status=2,
        says=("blocked_plugins", "'disk' is no distribution", "block 'kvtier-disk'"),
        files={"kvtier.toml": 'blocked_plugins = ["disk"]\n'},
    ),
    Case(
        title="unknown eviction policy",
        command=CHECK,
        status=2,
        says=("pool.policy (file:kvtier.toml): unknown eviction policy 'lur'", "did you mean 'lru'?"),
        files={"kvtier.toml": '[pool]\npolicy = "lur"\n'},
    ),
]
SETTINGS = [
    Case(
        title="no such configuration",
        command=CHECK.replace("kvtier.toml", "absent.toml"),
        status=2,
        says=("absent.toml", "No such file"),
    ),
    Case(
        title="a syntax error in the file",
        command=CHECK,
        status=2,
        says=("kvtier.toml, line 2, column", "not valid TOML"),
        files={"kvtier.toml": '[pool]\ncapacity = "1GiB\n'},
    ),
    Case(
        title="an unknown key",
        command=CHECK,
        status=2,
        says=("pool.capcity (file:kvtier.toml)", "did you mean 'capacity'?"),
        files={"kvtier.toml": '[pool]\ncapcity = "1GiB"\n'},
    ),
    Case(
        title="an unknown key of a tier, beside a password",
        command=CHECK,
        status=2,
        says=("tiers.cold.rot", "did you mean 'root'?"),
        files={"kvtier.toml": COLD + 'rot = "/"\n'},
        plugins=_offer(TIER_SOURCE),
    ),
    Case(
        title="a value of the wrong type",
        command=CHECK,
        status=2,
        says=("pool.block_size (file:kvtier.toml)", "whole number"),
        files={"kvtier.toml": '[pool]\nblock_size = "many"\n'},
    ),
    Case(
        title="a required setting is missing",
        command=CHECK,
        status=2,
        says=("tiers.disk.root: is required", "KVTIER_TIERS__DISK__ROOT"),
        files={"kvtier.toml": '[tiers.disk]\ntype = "disk"\n'},
    ),
    Case(
        title="a misspelt variable",
        command=CHECK,
        status=2,
        says=("KVTIER_POL__CAPACITY", "did you mean 'KVTIER_POOL__CAPACITY'?"),
        environ={"KVTIER_POL__CAPACITY": "1GB"},
    ),
    Case(
        title="one underscore where two are needed",
        command=CHECK,
        status=2,
        says=("KVTIER_POOL_CAPACITY", "did you mean 'KVTIER_POOL__CAPACITY'?"),
        environ={"KVTIER_POOL_CAPACITY": "1GB"},
    ),
    Case(
        title="a log level that does not exist",
        command=CHECK,
        status=2,
        says=("KVTIER_LOG: must be one of debug, info",),
        environ={"KVTIER_LOG": "loud"},
    ),
    Case(
        title="a size in words",
        command=CHECK,
        status=2,
        says=("pool.capacity", 'such as "8GiB"'),
        files={"kvtier.toml": '[pool]\ncapacity = "half of it"\n'},
    ),
    Case(
        title="a negative size",
        command=CHECK,
        status=2,
        says=("pool.capacity", "at least 0"),
        files={"kvtier.toml": "[pool]\ncapacity = -1\n"},
    ),
    Case(
        title="a pool of nothing",
        command=CHECK,
        status=2,
        says=("pool.capacity", 'try "1GiB"'),
        files={"kvtier.toml": "[pool]\ncapacity = 0\n"},
    ),
    Case(
        title="a block beyond all measure",
        command=CHECK,
        status=2,
        says=("pool.block_size", "65536"),
        files={"kvtier.toml": "[pool]\nblock_size = 100_000_000_000\n"},
    ),
    Case(
        title="a time before now",
        command=CHECK,
        status=2,
        says=("tiers.disk.limits.load_timeout", "at least 0"),
        files={"kvtier.toml": DISK + 'limits = {load_timeout = "-3s"}\n'},
    ),
    Case(
        title="several mistakes at once",
        command=CHECK,
        status=2,
        says=("2 problems in the configuration", "pool.capcity", "tiers.disk.capacity"),
        files={"kvtier.toml": "[pool]\ncapcity = 1\n" + DISK + "capacity = 100\n"},
    ),
    Case(
        title="a pool smaller than one block",
        command=RUN,
        status=2,
        says=("pool.capacity = 4.0 KiB is smaller than one block", "set it to at least"),
        files={"kvtier.toml": '[pool]\ncapacity = "4KiB"\n' + DISK},
    ),
    Case(
        title="a tier smaller than one block",
        command=RUN,
        status=2,
        says=(
            "tiers.disk.capacity = 4.0 KiB is smaller than one block of this model (12.0 KiB)",
            "set it to several",
        ),
        files={"kvtier.toml": POOL + DISK + 'capacity = "4KiB"\n'},
    ),
    Case(
        title="a pool too small for one prompt (a warning: it costs hits)",
        command=RUN,
        status=0,
        says=("pool.capacity holds 16 tokens", "line 1", "set pool.capacity to at least"),
        files={"kvtier.toml": '[pool]\ncapacity = "16KiB"\n' + DISK},
    ),
    Case(
        title="a tier too small for one prompt (a warning: it costs hits)",
        command=RUN,
        status=0,
        says=("tiers.notes.capacity is 16.0 KiB", "line 1", "set tiers.notes.capacity to more"),
        files={"kvtier.toml": POOL + '[tiers.notes]\ntype = "memory"\ncapacity = "16KiB"\n'},
    ),
    Case(
        title="a pool larger than the machine",
        command=RUN,
        status=1,
        says=("does not fit", "Set a smaller pool capacity"),
        files={"kvtier.toml": '[pool]\ncapacity = "1000TiB"\n'},
    ),
]
STORAGE = [
    Case(
        title="a file where the disk tier's root should be",
        command=RUN,
        status=1,
        says=("tier 'disk'", "can't write below root 'cache'", "set root to a directory"),
        files={"cache": "a file"},
    ),
    Case(
        title="a root that may not be written",
        command=RUN,
        status=1,
        says=("Permission denied", "set root to a directory"),
        storage=_refusing(errno.EACCES, directories=True),
    ),
    Case(
        title="a read-only root",
        command=RUN,
        status=1,
        says=("Read-only file system", "set root to a directory"),
        storage=_refusing(errno.EROFS, directories=True),
    ),
    Case(
        title="a root that has become read-only (a warning: what it holds is served)",
        command=RUN,
        status=0,
        says=("tier 'disk'", "Read-only file system", "Its blocks are served, and nothing is stored"),
        storage=_refusing(errno.EROFS, directories=False),
    ),
    Case(
        title="a root that has become read-only, examined",
        command=DOCTOR,
        status=1,
        says=("FAILED to store", "Read-only file system", "what to do"),
        storage=_refusing(errno.EROFS, directories=False),
    ),
    Case(
        title="a full disk (a warning: it costs hits)",
        command=RUN,
        status=0,
        says=("No space left on device", "costs hits and nothing else"),
        storage=_full_disk,
    ),
    Case(
        title="a full disk, examined",
        command=DOCTOR,
        status=1,
        says=("FAILED to store", "No space left on device", "what to do: see that its storage has room"),
        storage=_full_disk,
    ),
    Case(
        title="a URL without a bucket",
        command=CHECK,
        status=2,
        says=("tiers.s3.url", "names no bucket"),
        files={"kvtier.toml": _s3("").replace("s3:///kv", "s3://")},
    ),
    Case(
        title="a bucket that does not exist",
        command=DOCTOR,
        status=1,
        says=("FAILED to open", "can't use s3://absent/kv", "bucket"),
        files={"kvtier.toml": _s3("absent")},
        needs_s3=True,
    ),
    Case(
        title="wrong credentials",
        command=DOCTOR,
        status=1,
        says=("FAILED to open", "can't use s3://bucket/kv", "check the credentials"),
        files={"kvtier.toml": _s3("bucket", key="wrong-key")},
        needs_s3=True,
        checks_keys=True,
    ),
    Case(
        title="a server that is down",
        command=DOCTOR,
        status=1,
        says=("FAILED to open", "can't use s3://bucket/kv", "check that the server runs"),
        files={"kvtier.toml": _s3("bucket").replace("ENDPOINT", "http://127.0.0.1:9")},
        needs_s3=True,
    ),
    Case(
        title="the same at the start, with `open_retry` (a warning: it costs hits)",
        command=RUN,
        status=0,
        says=("it could not open", "can't use s3://bucket/kv", "it costs hits and nothing else"),
        files={
            "kvtier.toml": POOL
            + _s3("bucket").replace("ENDPOINT", "http://127.0.0.1:9")
            + '[tiers.s3.limits]\nopen_retry = "1m"\n'
        },
        needs_s3=True,
    ),
]

VALKEY = [
    Case(
        title="a cluster",
        command=CHECK,
        status=2,
        says=("tiers.far.url", "clusters are not followed"),
        files={"kvtier.toml": _valkey("redis-cluster://one,two")},
    ),
    Case(
        title="a size, which the server has of its own",
        command=CHECK,
        status=2,
        says=("tiers.far.capacity", "a limit of its own"),
        files={"kvtier.toml": _valkey("redis://127.0.0.1:9") + 'capacity = "1GiB"\n'},
    ),
    Case(
        title="a Valkey server that is down",
        command=DOCTOR,
        status=1,
        says=("FAILED to open", "127.0.0.1:9", "check that the server runs"),
        files={"kvtier.toml": _valkey(f"redis://:{SECRET}@127.0.0.1:9")},
    ),
]

SECTIONS = {
    "The command line": COMMAND_LINE,
    "Models and prompts": MODELS_AND_PROMPTS,
    "Plugins": PLUGINS,
    "Settings": SETTINGS,
    "Storage": STORAGE,
    "A Valkey server": VALKEY,
}
