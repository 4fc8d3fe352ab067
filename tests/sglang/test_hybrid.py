"""A real SGLang whose layers have sliding windows or states answers from what was restored as from its own cache.

It runs on its own pools, trees and attention for CPUs, with kernels in plain torch (``kernels``).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.plugins.distributions import Site
from tests.sglang.engines import (
    PAGE,
    WINDOW,
    Engine,
    needs_sglang,
    prompt,
    save_recurrent_model,
    save_windowed_model,
)

pytestmark = [needs_sglang, pytest.mark.timeout(1500)]
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Hybrid:
    """A model. SGLang keeps states with pages of one token alone where there is no GPU, and memory for many of them."""

    save: Callable[[Path], Path]
    page: int
    kept: int
    """Blocks beside those of full attention that a restored prompt needs."""
    last: int
    """Up to where a prompt of 440 tokens can be restored once it was answered."""


HYBRIDS = {
    "windows": Hybrid(save_windowed_model, page=PAGE, kept=WINDOW // PAGE, last=432),
    "states": Hybrid(save_recurrent_model, page=1, kept=1, last=400),
}


@pytest.fixture(params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest) -> Hybrid:
    return HYBRIDS[request.param]


@pytest.fixture
def start(hybrid: Hybrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Engine]]:
    """Starts engines of the model, all with one disk."""
    (tmp_path / "site").mkdir()
    plugin = {"kernels": "tests.sglang.kernels:register"}
    Site(tmp_path / "site").install("kvtier-kernels", {"sglang.srt.plugins": plugin}, {})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))  # SGLang's processes get this one's path
    model = hybrid.save(tmp_path / "model")
    config = tmp_path / "kvtier.toml"
    config.write_text(
        f'on_reset = "pool"\n[pool]\ncapacity = "16MiB"\n[tiers.disk]\ntype = "disk"\nlayout = "files"\n'
        f'root = "{tmp_path}/blocks"\ncapacity = "64MiB"\nmin_free = 0\n'
    )
    started: list[Engine] = []

    def start_one() -> Engine:
        log = tmp_path / f"{len(started)}.log"
        started.append(Engine(model, log, config=config, page_size=hybrid.page, max_mamba_cache_size=64))
        return started[-1]

    yield start_one
    for engine in started:
        engine.close()


def _settle(engine: Engine) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not engine.figures()["is_settled"]:
        assert time.monotonic() < deadline, "not all was stored"
        time.sleep(0.05)


def test_windows_and_states_are_restored_where_they_were_kept_and_nowhere_else(hybrid, start, tmp_path):
    engine = start()
    begun = prompt("a", 400)
    longer = [*begun, *prompt("b", 40)]
    [first] = engine.ask(begun)
    assert first.cached == 0
    [own] = engine.ask(longer)
    assert own.cached == 400
    _settle(engine)
    stored = engine.figures()["tiers"]["disk"]["stored_blocks"]
    assert stored < 2 * 440 // hybrid.page, "windows and states were kept for a part of the pages"
    engine.flush()
    [restored] = engine.ask([*begun, *prompt("c", 40)])
    assert restored.cached == 400
    [computed] = engine.ask([*begun, *prompt("c", 40)], cache_salt="nobody's")
    assert (computed.tokens, computed.cached) == (restored.tokens, 0)
    assert engine.figures()["hit_blocks"]["disk"] == 400 // hybrid.page + hybrid.kept
    engine.flush()
    assert engine.ask(begun[:200])[0].cached == 0, "nothing was kept there"
    _settle(engine)
    engine.close()

    engine = start()
    [new] = engine.ask(longer)
    assert (new.tokens, new.cached) == (own.tokens, hybrid.last)
    assert new.logprobs == pytest.approx(own.logprobs, abs=1e-3)
    _settle(engine)
    for file in (tmp_path / "blocks").rglob("*"):
        if file.is_file() and file.stat().st_size >= 4096:
            data = bytearray(file.read_bytes())
            data[100] ^= 1
            file.write_bytes(data)
    engine.flush()
    [damaged] = engine.ask(longer)
    assert (damaged.tokens, damaged.cached) == (own.tokens, 0)
