"""What a disk tier writes is its owner's alone, and what others could change is not used (C38)."""

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.main import main
from kvtier_core.errors import TierOpenError
from kvtier_core.keys import OffloadKey
from kvtier_core.proof import Sealer
from tests.tiers.extents import KEYS, MAKER, MIB, ROW, A, B, drive, extent_files, index_file, program, rows
from tests.tiers.other_users import GROUP, OTHER, THIRD, act_as, needs_root, public_directory
from tests.tiers.small_disk import child

LAYOUTS = pytest.mark.parametrize("layout", ["extents", "files"])
INNER = [
    ("extents", "."),
    ("extents", ".kvtier"),
    ("extents", ".kvtier/alive"),
    ("extents", "ns"),
    ("files", "."),
    ("files", "ns"),
    ("files", "ns/tmp"),
    ("files", f"ns/{A.hex()[:2]}"),
]


@pytest.fixture
def public() -> Iterator[Path]:
    with public_directory() as place:
        yield place


def fill(root: Path, layout: str) -> None:
    with drive(root, capacity=16 * MIB, layout=layout) as tier:
        assert tier.store(rows(A, B)).error is None


def content_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def assert_refused(root: Path, layout: str, inner: str, why: str) -> None:
    """The tier is refused, naming the setting, and has changed nothing; with the setting it serves."""
    before = content_of(root)
    for read_only in (
        [False] if inner.endswith("alive") else [False, True]
    ):  # a reader has no use for that one
        with pytest.raises(TierOpenError, match=f"{why}.*allow_writable_by_others") as caught:
            drive(root, layout=layout, read_only=read_only)
        assert "ForeignError" not in str(caught.value)
    assert content_of(root) == before
    with drive(root, layout=layout, allow_writable_by_others=True) as tier:
        assert tier.load([A, B]).rows == rows(A, B)
        assert tier.store(rows(KEYS[3])).error is None


# Whose a root is.


@pytest.mark.parametrize(("layout", "inner"), INNER)
@pytest.mark.parametrize(("mode", "who"), [(0o770, "its group"), (0o707, "everybody")])
def test_s5_c38_a_directory_that_others_may_write_to_is_refused(tmp_path, layout, inner, mode, who):
    root = tmp_path / "root"
    fill(root, layout)
    (root / inner).chmod(mode)
    assert_refused(root, layout, inner, f"{who}.* may write to it")


@needs_root
@pytest.mark.parametrize(("layout", "inner"), INNER)
def test_s5_c38_a_directory_that_another_user_owns_is_refused(tmp_path, layout, inner):
    root = tmp_path / "root"
    fill(root, layout)
    os.chown(root / inner, OTHER, -1)
    assert_refused(root, layout, inner, f"belongs to another user \\(uid {OTHER}\\)")


@needs_root
def test_s5_c38_what_root_owns_may_be_read_by_others(public):
    root = public / "root"
    fill(root, "extents")
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)

    def read() -> None:
        with drive(root, read_only=True) as tier:
            assert tier.load([A, B]).rows == rows(A, B)

    act_as(OTHER, read)


@pytest.mark.parametrize("action", ["status", "rebuild"])
def test_s5_c38_the_command_names_its_own_option(tmp_path, capsys, action):
    root = tmp_path / "root"
    fill(root, "extents")
    root.chmod(0o777)
    assert main(["disk", action, str(root)]) != 0
    assert "--allow-writable-by-others" in capsys.readouterr().err
    assert main(["disk", action, str(root), "--allow-writable-by-others"]) == 0
    assert "ns: 2 blocks" in capsys.readouterr().out


def test_s5_c38_a_namespace_of_others_is_passed_over_and_said(tmp_path, warnings):
    root = tmp_path / "root"
    with drive(root, namespace="theirs") as tier:
        tier.store(rows(A, namespace="theirs"))
    (root / "theirs").chmod(0o777)
    (extent,) = extent_files(root)
    with drive(root) as tier:
        assert tier.store(rows(A)).error is None
        assert extent.exists()
    assert any(f"{root / 'theirs'} is passed over: everybody may write to it" in text for text in warnings())


@pytest.mark.parametrize("inner", ["theirs", "theirs/tmp", f"theirs/{A.hex()[:2]}"])
@pytest.mark.parametrize("when", ["before", "while running"])
def test_s5_c38_in_files_a_namespace_of_others_is_passed_over_and_said(tmp_path, warnings, inner, when):
    root = tmp_path / "root"
    with drive(root, layout="files", namespace="theirs") as tier:
        tier.store(rows(A, namespace="theirs"))
    if when == "before":
        (root / inner).chmod(0o777)
    with drive(root, layout="files", capacity=2 * ROW) as tier:
        (root / inner).chmod(0o777)
        assert tier.store(rows(A)).error is None
        assert tier.store(rows(B)).error is None
        assert tier.load([A, B]).rows == rows(A, B)
    blocks = list((root / "theirs").rglob("*.kv"))
    if when == "before" or not inner.endswith("tmp"):
        assert len(blocks) == 1, "nothing of theirs was touched"
        told = [
            text for text in warnings() if f"{root / inner} is passed over: everybody may write to it" in text
        ]
        assert len(told) == 1
    assert not any("can't write" in text for text in warnings())


@pytest.mark.parametrize("inner", ["tmp", A.hex()[:2]])
def test_s5_c38_a_directory_opened_to_others_while_running_is_told_in_plain_words(tmp_path, warnings, inner):
    root = tmp_path / "root"
    with drive(root, layout="files") as tier:
        tier.store(rows(A))
        (root / "ns" / inner).chmod(0o777)
        results = [tier.load([A]).result, tier.store(rows(B)).error, tier.store(rows(A)).error]
        errors = [str(error) for error in results if error is not None]
    texts = [*errors, *warnings()]
    assert any("everybody may write to it" in text and "allow_writable_by_others" in text for text in texts)
    assert not any("ForeignError" in text for text in texts)


# Blocks of others.


def other_row(key: OffloadKey) -> bytes:
    """A block with a valid proof that nobody stored."""
    row = bytearray(ROW)
    row[: MAKER.payload_bytes] = bytes(MAKER.payload_bytes)
    Sealer("ns").seal(key, memoryview(row), MAKER.payload_bytes)
    return bytes(row)


def put_row(path: Path, row: bytes) -> None:
    """Exchange the row of A, in an extent or a file of its own, as its owner would."""
    content = path.read_bytes()
    (was,) = rows(A).values()
    assert was in content
    path.write_bytes(content.replace(was, row))


def file_of_a(root: Path, layout: str) -> Path:
    if layout == "files":
        return root / "ns" / A.hex()[:2] / f"{A.hex()}.kv"
    (path,) = extent_files(root)
    return path


@pytest.mark.parametrize("while_running", [False, True])
@pytest.mark.parametrize("change", ["owner", "mode"])
@LAYOUTS
def test_s5_c38_a_block_that_others_sealed_anew_is_a_miss(tmp_path, layout, change, while_running):
    if change == "owner" and os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    root = tmp_path / "root"
    fill(root, layout)
    tier = drive(root, capacity=16 * MIB, layout=layout) if while_running else None
    path = file_of_a(root, layout)
    put_row(path, other_row(A))
    if change == "owner":
        os.chown(path, OTHER, -1)
    else:
        path.chmod(0o666)
    with tier or drive(root, capacity=16 * MIB, layout=layout) as tier:
        assert tier.load([A]).rows == {}
        assert tier.store(rows(A)).error is None
        assert tier.load([A]).rows == rows(A)


@pytest.mark.parametrize("change", ["owner", "mode"])
def test_s5_c38_an_extent_that_is_open_already_is_given_up_by_the_next_store(tmp_path, change):
    if change == "owner" and os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    root = tmp_path / "root"
    fill(root, "extents")
    with drive(root, capacity=16 * MIB) as tier:
        assert tier.store(rows(KEYS[2])).error is None
        (path,) = extent_files(root)
        if change == "owner":
            os.chown(path, OTHER, -1)
        else:
            path.chmod(0o666)
        put_row(path, other_row(A))
        tier.store(rows(KEYS[3]))
        assert tier.load([A]).rows == {}
        assert tier.store(rows(A, KEYS[3])).error is None
        assert tier.load([A, KEYS[3]]).rows == rows(A, KEYS[3])


@needs_root
@LAYOUTS
def test_s5_c38_another_user_can_not_put_a_block_below_a_root(public, layout):
    root = public / "root"
    fill(root, layout)
    directory = file_of_a(root, layout).parent

    def attack() -> None:
        for place in (root, directory, root / ".kvtier"):
            with pytest.raises(PermissionError):
                (place / "0000000009.ext").write_bytes(b"theirs")

    act_as(OTHER, attack)


# Links.


def plant(root: Path, victim: Path, starter: int, *, exchange: bool) -> None:
    """Put links to *victim* wherever an engine may write next, until killed; also in the place of what is there."""
    names = ["id.draft", "probe", f"namespace-{starter}.draft"]
    if exchange:
        names += ["id", "lock", "index.draft"]
        names += [
            f"index-{number:06}.db{end}" for number in (1, 2) for end in ("", "-wal", "-shm", "-journal")
        ]
    places = [*(root / ".kvtier" / name for name in names), root / "ns" / "namespace.json"]
    while True:
        for place in places:
            try:
                if exchange:
                    (root / "link").symlink_to(victim)
                    (root / "link").replace(place)
                else:
                    place.symlink_to(victim)
            except OSError:
                continue


@needs_root
@LAYOUTS
@pytest.mark.parametrize(("allowed", "exchange"), [(False, True), (True, False), (True, True)])
def test_s5_c38_links_planted_while_the_engine_starts_lead_nowhere(public, layout, allowed, exchange):
    victim = public / "victim"
    victim.write_bytes(b"precious")
    for number in range(20):
        root = public / f"root{number}"
        root.mkdir()
        for inner in (".kvtier", "ns") if allowed else ():
            (root / inner).mkdir()
            (root / inner).chmod(0o777)
        root.chmod(0o777)

        def planting(root: Path = root, starter: int = os.getpid()) -> int:
            os.setgid(OTHER)
            os.setuid(OTHER)
            plant(root, victim, starter, exchange=exchange)
            return 0

        planter = child(planting)
        try:
            give_up = time.monotonic() + 10
            while allowed and not any((root / ".kvtier").iterdir()) and time.monotonic() < give_up:
                os.sched_yield()  # the planter is at work
            if allowed:
                try:
                    with drive(root, layout=layout, allow_writable_by_others=True) as tier:
                        tier.store(rows(A))
                except TierOpenError:
                    pass  # who may write there may make it fail, and no more
            else:
                with pytest.raises(TierOpenError, match="allow_writable_by_others"):
                    drive(root, layout=layout)
        finally:
            os.kill(planter, signal.SIGKILL)
            os.waitpid(planter, 0)
        assert victim.read_bytes() == b"precious", f"start {number} wrote through a link"
        assert stat.S_IMODE(victim.stat().st_mode) == 0o644
        assert victim.stat().st_uid == os.geteuid()


def test_s5_c38_a_file_with_another_name_is_not_cut_short(tmp_path):
    root = tmp_path / "root"
    fill(root, "extents")
    (extent,) = extent_files(root)
    theirs = tmp_path / "theirs"
    os.link(extent, theirs)
    before = theirs.read_bytes()
    index_file(root).unlink()
    extent.with_name("0000000002.ext").write_bytes(before)  # one of the two can't be entered
    with drive(root, capacity=2 * MIB, extent_size="1MiB") as tier:
        tier.store(rows(*KEYS[:100]))
    assert theirs.read_bytes()[:4096] == before[:4096]


# Modes.


@LAYOUTS
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077, 0o777])
def test_s18_b11_c38_what_is_made_is_its_owners_alone_whatever_the_umask(tmp_path, layout, umask):
    root = tmp_path / "new" / "root"
    before = os.umask(umask)
    try:
        tier = drive(root, capacity=16 * MIB, layout=layout)
        try:
            assert tier.store(rows(A)).error is None
            modes = {
                path: stat.S_IMODE(path.lstat().st_mode) for path in [root.parent, root, *root.rglob("*")]
            }
        finally:
            tier.shutdown()
    finally:
        os.umask(before)
    assert len(modes) > 4
    assert {path: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
    fill(root, layout)


@needs_root
@LAYOUTS
@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_b11_c38_in_a_shared_root_all_files_have_its_mode_and_group(public, layout, umask):
    root = public / "root"
    root.mkdir()
    os.chown(root, OTHER, GROUP)
    root.chmod(0o2770)
    before = os.umask(umask)
    try:
        with drive(root, layout=layout, allow_writable_by_others=True) as tier:
            assert tier.store(rows(A)).error is None
            found = {path: path.lstat() for path in root.rglob("*")}
    finally:
        os.umask(before)
    assert {status.st_gid for status in found.values()} == {GROUP}
    assert {stat.S_IMODE(status.st_mode) for path, status in found.items() if path.is_dir()} == {0o2770}
    assert {stat.S_IMODE(status.st_mode) for path, status in found.items() if not path.is_dir()} == {0o660}


@needs_root
@LAYOUTS
def test_s5_b11_c38_users_of_one_group_share_a_root(public, layout):
    root = public / "root"
    root.mkdir()
    os.chown(root, OTHER, GROUP)
    root.chmod(0o770)

    def take_part(stores: OffloadKey, loads: list[OffloadKey]) -> None:
        changes = {"layout": layout, "allow_writable_by_others": True}
        with drive(root, capacity=16 * MIB, **changes) as tier:
            assert tier.load(loads).rows == rows(*loads)
            assert tier.store(rows(stores)).error is None
            assert tier.load([*loads, stores]).rows == rows(*loads, stores)

    act_as(OTHER, lambda: take_part(A, []), group=GROUP)
    act_as(THIRD, lambda: take_part(B, [A]), group=GROUP)
    act_as(OTHER, lambda: take_part(KEYS[2], [A, B]), group=GROUP)
    if layout == "extents":
        act_as(OTHER, lambda: main(["disk", "rebuild", "--allow-writable-by-others", str(root)]), group=GROUP)
        act_as(THIRD, lambda: take_part(KEYS[3], [A, B, KEYS[2]]), group=GROUP)


# What is no file, or has no end.


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # zeros without end


def make_sparse(path: Path) -> None:
    path.touch(mode=0o600)
    os.truncate(path, 1 << 40)


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


ENDLESS = pytest.mark.parametrize(
    "make", [make_fifo, pytest.param(make_device, marks=needs_root), make_sparse, make_link_to_device]
)
BESIDE = [f".kvtier/index-000001.db{end}" for end in ("-journal", "-wal", "-shm")]
SMALL = [".kvtier/id", *BESIDE, "ns/namespace.json"]
_OPENS = """
import pathlib, sys
with t.drive(pathlib.Path(sys.argv[1]), layout=sys.argv[2], capacity=16 * t.MIB) as tier:
    print(tier.load([t.A, t.B]).rows == t.rows(t.A, t.B), tier.store(t.rows(t.KEYS[2])).error)
"""


@ENDLESS
@pytest.mark.parametrize(
    ("layout", "name"), [*(("extents", name) for name in SMALL), ("files", "ns/namespace.json")]
)
def test_s12_c38_what_stands_in_a_small_files_place_stops_no_start(tmp_path, layout, name, make):
    root = tmp_path / "root"
    fill(root, layout)
    place = root / name
    place.unlink(missing_ok=True)
    make(place)
    out, err = program(_OPENS, root, layout).communicate(timeout=60)
    assert out == "True None\n", err
    if name not in BESIDE:
        assert stat.S_ISREG(place.lstat().st_mode)
        assert place.stat().st_size < 4096
    if name.endswith("json"):
        assert json.loads(place.read_text())["namespace"] == "ns"


@ENDLESS
def test_s12_c38_what_stands_in_the_place_of_a_sign_of_life_is_nobodys(tmp_path, make):
    root = tmp_path / "root"
    fill(root, "extents")
    place = root / ".kvtier" / "alive" / "123-theirs"
    make(place)
    out, err = program(_OPENS, root, "extents").communicate(timeout=60)
    assert out == "True None\n", err
    assert not os.path.lexists(place)


@pytest.mark.parametrize("make", [make_fifo, make_link_to_device])
def test_s12_c38_what_stands_in_the_locks_place_is_refused_by_name(tmp_path, make):
    root = tmp_path / "root"
    fill(root, "extents")
    (root / ".kvtier" / "lock").unlink()
    make(root / ".kvtier" / "lock")
    _, err = program(_OPENS, root, "extents").communicate(timeout=60)
    assert "lock is no regular file" in err


@ENDLESS
def test_s12_c38_the_number_of_a_root_is_read_up_to_a_bound_while_running(tmp_path, make):
    root = tmp_path / "root"
    with drive(root, capacity=16 * MIB) as tier:
        assert tier.store(rows(A)).error is None
        (root / ".kvtier" / "id").unlink()
        make(root / ".kvtier" / "id")
        assert tier.load([A]).rows == rows(A)


# Signs of life.

_KILLED = """
import os, pathlib, signal, sys
from kvtier_disk.extents.index import Index
Index.add_owner = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
t.direct(pathlib.Path(sys.argv[1]))
"""


def test_s14_c32_a_sign_of_life_whose_process_died_before_it_was_entered_goes(tmp_path):
    root = tmp_path / "root"
    dead = program(_KILLED, root)
    dead.communicate(timeout=60)
    assert dead.returncode == -signal.SIGKILL
    (left,) = (root / ".kvtier" / "alive").iterdir()
    with drive(root, capacity=16 * MIB) as other, drive(root, capacity=16 * MIB) as tier:
        assert not left.exists()
        assert len(list((root / ".kvtier" / "alive").iterdir())) == 2
        assert other.store(rows(A)).error is None
        assert tier.store(rows(B)).error is None
    assert list((root / ".kvtier" / "alive").iterdir()) == []
