"""Two tensor-parallel ranks of a real SGLang restore a prompt together, or compute it together."""

import os
import time
from pathlib import Path

import pytest

from tests.sglang.engines import PAGE, Engine, needs_sglang, prompt

pytestmark = [needs_sglang, pytest.mark.timeout(1500)]
TOKENS = 400
WHOLE = (TOKENS - 1) // PAGE * PAGE
BLOCKS = TOKENS // PAGE
PATIENCE_S = 240.0
RANKS = 2


def _blocks(root: Path) -> list[list[Path]]:
    """The files of each rank's pages: each has a namespace of its own."""
    found = [file for file in root.rglob("*") if file.is_file() and file.stat().st_size > 4096]
    namespaces = sorted({file.relative_to(root).parts[0] for file in found})
    return [[file for file in found if file.relative_to(root).parts[0] == name] for name in namespaces]


def _await_blocks(root: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := [len(files) for files in _blocks(root)]) != [count] * RANKS:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_two_ranks_restore_together_and_compute_together_what_one_of_them_lacks(model, tmp_path, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    root, config = tmp_path / "blocks", tmp_path / "kvtier.toml"
    tier = (
        f'[tiers.disk]\ntype = "disk"\nlayout = "files"\nroot = "{root}"\ncapacity = "64MiB"\nmin_free = 0\n'
    )
    config.write_text(f'on_reset = "pool"\n[pool]\ncapacity = "16MiB"\n{tier}')
    engine = Engine(model, tmp_path / "first.log", config=config, tp_size=RANKS)
    try:
        [first], [other] = engine.ask(prompt("a", TOKENS)), engine.ask(prompt("b", TOKENS))
        assert (first.cached, other.cached) == (0, 0)
        _await_blocks(root, 2 * BLOCKS)
        engine.flush()
        [restored] = engine.ask(prompt("a", TOKENS))
        assert (restored.tokens, restored.cached) == (first.tokens, WHOLE)
    finally:
        engine.close()
    for file in _blocks(root)[0]:  # a bit of every page of one rank
        data = bytearray(file.read_bytes())
        data[1000] ^= 1
        file.write_bytes(data)
    engine = Engine(model, tmp_path / "second.log", config=config, tp_size=RANKS)
    try:
        [computed] = engine.ask(prompt("a", TOKENS))
        assert (computed.tokens, computed.cached) == (first.tokens, 0)
        engine.flush()
        [again] = engine.ask(prompt("b", TOKENS))
        assert (again.tokens, again.cached) == (other.tokens, 0)
    finally:
        engine.close()
