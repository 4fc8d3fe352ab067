"""What namespaces that nobody uses hold below the URL of an fsspec tier: on local files, where their age can be set."""

import errno
import json
import os
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from kvtier_core.values import TierContext
from kvtier_fsspec import FsspecTier, description
from tests.tiers.engine import TierEngine
from tests.tiers.fsspec_rules import KEYS


class Closed(LocalFileSystem):
    """Local files whose uppermost directory can't be listed."""

    protocol = "closed"
    root = ""

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("closed://"))

    def ls(self, path, **kwargs):
        if str(path).rstrip("/") == self.root:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return super().ls(path, **kwargs)


def blocks_by_namespace(root: Path) -> dict[str, int]:
    counts = {path.name: len(list(path.glob("??/*.kv"))) for path in root.iterdir()}
    return {name: count for name, count in counts.items() if count}


def leave_unused(root: Path, weights: str, age_s: float) -> str:
    """A namespace of four blocks that no engine uses; its name."""
    with TierEngine(FsspecTier, weights=weights, url=f"file://{root}") as engine:
        engine.store("s", KEYS[:4])
    for path in (root / engine.namespace).glob("??/*.kv"):
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    described = root / engine.namespace / "namespace.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "in_use_until": 0}))
    return engine.namespace


def test_b3_c13_the_oldest_block_of_all_namespaces_that_nobody_uses_leaves_first(tmp_path):
    new = leave_unused(tmp_path, "new", age_s=1)
    old = leave_unused(tmp_path, "old", age_s=2)
    with TierEngine(FsspecTier, url=f"file://{tmp_path}", capacity="40KiB") as engine:
        assert blocks_by_namespace(tmp_path) == {new: 4, old: 4}
        engine.store("s", KEYS[:5])
        assert blocks_by_namespace(tmp_path) == {new: 4, old: 1, engine.namespace: 5}


def test_b3_c34_of_an_emptied_namespace_nothing_stays_but_files_of_others(tmp_path):
    names = [leave_unused(tmp_path, weights, age_s=1) for weights in ("one", "two")]
    (tmp_path / names[1] / "ab").mkdir(exist_ok=True)
    (tmp_path / names[1] / "ab" / "notes").write_text("mine")
    with TierEngine(FsspecTier, url=f"file://{tmp_path}", capacity="4KiB") as engine:
        engine.store("s", KEYS[:1])
    assert blocks_by_namespace(tmp_path) == {engine.namespace: 1}
    with TierEngine(FsspecTier, url=f"file://{tmp_path}", capacity="4KiB"):
        pass  # a start that finds their descriptions without blocks
    assert {path.name for path in tmp_path.iterdir()} == {names[1], engine.namespace}
    assert [path.name for path in (tmp_path / names[1]).rglob("*") if path.is_file()] == ["notes"]


def test_i18_c34_an_emptied_namespace_is_described_until_the_last_temporary_file_is_old(tmp_path):
    name = leave_unused(tmp_path, "one", age_s=1)
    (folder,) = {path.parent for path in (tmp_path / name).glob("??/*.kv")}
    for path in folder.glob("*.kv"):
        path.unlink()
    left = folder / f"abcd.kv.{'0' * 32}.tmp"
    left.write_bytes(b"half a block")
    (folder / "mine.tmp").write_text("somebody else's")
    for age_s, there in ((10, {name}), (4000, set())):
        os.utime(left, (time.time() - age_s,) * 2)
        os.utime(folder / "mine.tmp", (1, 1))
        with TierEngine(FsspecTier, url=f"file://{tmp_path}", capacity="4KiB") as engine:
            pass
        described = {path.parent.name for path in tmp_path.glob("*/namespace.json")}
        assert described - {engine.namespace} == there
    assert [path.name for path in (tmp_path / name).rglob("*") if path.is_file()] == ["mine.tmp"]


def test_b3_c33_a_url_whose_namespaces_cannot_be_listed_serves_and_says_so_once(
    tmp_path, monkeypatch, warnings
):
    fsspec.register_implementation("closed", Closed, clobber=True)
    monkeypatch.setattr(Closed, "root", str(tmp_path))
    monkeypatch.setattr(FsspecTier, "follow_interval", 0.01)
    with TierEngine(FsspecTier, url=f"closed://{tmp_path}", publish="move", capacity="8KiB") as engine:
        engine.store("s", KEYS[:2])
        assert engine.load("l", KEYS[:2]) == 2
        for _ in range(20):
            engine.manager.wait(0.01)
    (told,) = warnings()
    assert "can't look after the namespaces below" in told
    assert "Permission denied" in told


def test_b3_c34_closing_makes_no_removed_namespace_anew(tmp_path):
    tier = FsspecTier(
        FsspecTier.Settings.model_validate({"type": "fsspec", "url": f"file://{tmp_path}"}),
        TierContext(name="far", namespace="ns", row_bytes=4096, description={"epoch": "later"}),
    )
    tier.open()
    tier.follow()
    assert (tmp_path / "ns" / "namespace.json").exists()
    tier.remove_namespace()
    tier.follow()
    tier.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"in_use_until": true}',
        b'{"in_use_until": -1e999}',
        b'{"in_use_until": NaN}',
        b"\xff",
    ],
)
def test_what_is_no_description_of_ours_is_neither_in_use_nor_out_of_it(content):
    assert not description.is_one(content)
    assert not description.is_out_of_use(content)
