"""Two tensor-parallel ranks of a real SGLang restore a prompt together, or compute it together."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sglang.engines import PAGE, Engine, environment, needs_sglang, prompt

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


def test_where_a_load_raises_in_one_rank_the_other_hears_of_it(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sglang.raising_rank", str(rank), str(tmp_path / "meeting")],
            env={**os.environ, **environment()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert said[0] == {"right": True, "mistaken": False, "stuck": False}
    assert said[1] == {"right": True, "mistaken": False, "stuck": "told to be stuck"}
