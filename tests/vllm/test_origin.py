"""What identifies the weights that vLLM loads (C02), on vLLM's configurations as far as they are looked at."""

import os
import time
from types import SimpleNamespace

import pytest

from kvtier_vllm.origin import weights_digest, weights_elsewhere

COMMIT = "a" * 40
NEVER_NS = 1 << 63
FILES = {
    "model.safetensors": b"one",
    "model.pt": b"one",
    "model.bin": b"one",
    "consolidated.00.pth": b"one",
    "np/weights.0": b"one",
    "model-rank-0-part-0.safetensors": b"one",
    "model.safetensors.index.json": b"{}",
    "config.json": b"{}",
    "hf_quant_config.json": b"{}",
    "modeling_own.py": b"pass",
}


def model(path, *, config=None, **changes):
    settings = {
        "model": str(path),
        "model_weights": "",
        "revision": None,
        "code_revision": None,
        "hf_config_path": None,
        "trust_remote_code": False,
        **changes,
    }
    return SimpleNamespace(**settings, hf_config=SimpleNamespace(to_dict=lambda: config or {}))


def load(load_format="auto", **extra):
    return SimpleNamespace(load_format=load_format, model_loader_extra_config=extra)


def digest(*arguments, edges=False, since_ns=NEVER_NS):
    return weights_digest(*arguments, edges=edges, since_ns=since_ns)


@pytest.fixture
def directory(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_c02_every_file_that_vllm_may_load_counts_whatever_lies_beside_it(directory, name):
    before = digest(model(directory), load())
    (directory / name).write_bytes(b"two")
    assert before != digest(model(directory), load())


def test_c02_the_middle_of_a_file_counts_unless_edges_are_trusted(directory):
    raw = bytearray(3 << 20)
    (directory / "model.safetensors").write_bytes(raw)
    full, edges = (digest(model(directory), load(), edges=trust) for trust in (False, True))
    raw[3 << 19] = 1
    (directory / "model.safetensors").write_bytes(raw)
    assert digest(model(directory), load()) != full
    assert digest(model(directory), load(), edges=True) == edges


def test_c02_a_file_is_a_model_with_its_other_shards(tmp_path):
    shards = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for file in [*shards, tmp_path / "single.gguf"]:
        file.write_bytes(b"one")
    sharded, single = (digest(model(file), load()) for file in (shards[0], tmp_path / "single.gguf"))
    shards[1].write_bytes(b"two")
    assert digest(model(shards[0]), load()) != sharded
    assert digest(model(tmp_path / "single.gguf"), load()) == single


def test_c02_a_commit_of_the_hub_identifies_its_files_and_a_branch_does_not():
    assert digest(model("org/model", revision=COMMIT), load()) == COMMIT
    assert digest(model("org/model", revision=SimpleNamespace(resolved=COMMIT)), load()) == COMMIT
    assert digest(model("org/model", revision="main"), load()) is None


@pytest.mark.parametrize(
    ("loader", "change", "says"),
    [
        (load("tensorizer", tensorizer_uri="s3://b/w"), {}, "load_format = 'tensorizer'"),
        (load("runai_streamer"), {"model_weights": "s3://b/w"}, "model_weights = 's3://b/w'"),
        (load("somebodys_own"), {}, "load_format = 'somebodys_own'"),
        (load("sharded_state", pattern="../other/w-{rank}-{part}"), {}, "pattern = '../other/"),
        (load(), {"model_weights": "s3://b/w"}, "model_weights = 's3://b/w'"),
    ],
)
def test_c02_weights_from_elsewhere_are_named_and_have_no_digest(directory, loader, change, says):
    assert says in (weights_elsewhere(model(directory, **change), loader) or "")
    assert digest(model(directory, **change), loader) is None


@pytest.mark.parametrize(
    "loader",
    [
        load(),
        load("pt"),
        load("npcache"),
        load("sharded_state", pattern="w-{rank}-{part}"),
        load("runai_streamer"),
        load("runai_streamer_sharded", pattern="w-{rank}-{part}"),
    ],
)
def test_v16_c02_a_models_own_files_are_not_elsewhere(directory, loader):
    assert weights_elsewhere(model(directory), loader) is None
    assert digest(model(directory), loader) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"trust_remote_code": True, "code_revision": "main"},
        {"trust_remote_code": True, "hf_config_path": "/elsewhere"},
        {"trust_remote_code": True, "config": {"auto_map": {"AutoModel": "org/code--modeling.Model"}}},
        {"config": {"text_model_id": "org/language-model"}},
    ],
)
def test_c02_code_and_parts_from_another_repository_make_a_model_unknown(directory, change):
    assert digest(model(directory, **change), load()) is None
    assert digest(model("org/model", revision=COMMIT, **change), load()) is None


def test_c02_a_models_own_code_is_among_its_files(directory):
    own = {"trust_remote_code": True, "config": {"auto_map": {"AutoModel": "modeling_own.Model"}}}
    assert digest(model(directory, **own), load()) == digest(model(directory), load())


def test_c02_random_weights_are_unknown_and_from_nowhere(directory):
    assert digest(model(directory), load("dummy")) is None
    assert weights_elsewhere(model(directory), load("dummy")) is None


def write_file(directory):
    (directory / "model.safetensors").write_bytes(b"two")


def exchange_file(directory):
    os.replace(directory / "model.pt", directory / "model.safetensors")


def exchange_directory(directory):
    directory.rename(directory.with_name("old"))
    directory.with_name("new").rename(directory)


def exchange_link(directory):
    other = directory.with_name("link to be")
    other.symlink_to(directory.with_name("new"))
    other.rename(directory.with_name("link"))


@pytest.mark.parametrize(
    ("exchange", "named"),
    [
        (None, None),
        (write_file, "model/model.safetensors"),
        (exchange_file, "model"),
        (exchange_directory, "model"),
        (exchange_link, "link"),
    ],
)
def test_c02_f2_files_that_change_while_vllm_starts_identify_nothing(tmp_path, caplog, exchange, named):
    for name in ("model", "new"):
        (tmp_path / name).mkdir()
        for file in ("model.safetensors", "model.pt"):
            (tmp_path / name / file).write_bytes(name.encode())
    (tmp_path / "link").symlink_to(tmp_path / "model")
    time.sleep(0.1)
    since_ns = time.time_ns() - 50_000_000  # a file's times are those of the kernel's last tick
    place = tmp_path / ("link" if named == "link" else "model")
    if exchange is not None:
        exchange(tmp_path / "model")
    assert (digest(model(place), load(), since_ns=since_ns) is None) == (exchange is not None)
    assert (f"{tmp_path / str(named)} was written or put in its place" in caplog.text) == (
        exchange is not None
    )
