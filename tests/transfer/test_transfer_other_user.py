"""Another user of the machine has the name that an engine's pool would have."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from kvtier_core.transfer import SCHEDULER, Pool, PoolGeometry
from kvtier_core.transfer import handover as handover_module
from kvtier_core.transfer.socket_owner import uid_of_bound
from tests.transfer.conftest import TIMEOUT_S

_GEOMETRY = PoolGeometry(num_rows=4, row_bytes=4096, num_workers=2)
_OTHER = 65533
"""A user that nobody is."""
_HOLD = """
import os, socket, sys
uid, address, listens = int(sys.argv[1]), "\\0" + sys.argv[2], sys.argv[3] == "True"
if uid != os.geteuid():
    os.setuid(uid)
held = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
held.bind(address)
if listens:
    held.listen()
print("held", flush=True)
sys.stdin.read()
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
Hold = Callable[..., None]


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def hold(name: str) -> Iterator[Hold]:
    """Lets a process of the user *uid* have the pool's name until the test ends."""
    with contextlib.ExitStack() as at_end:

        def start(uid: int, *, listens: bool) -> None:
            address = f"kvtier-{os.geteuid()}-{name}"
            command = [sys.executable, "-c", _HOLD, str(uid), address, str(listens)]
            holder = at_end.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )  # whose end of stdin ends it
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"

        yield start


@needs_root
@pytest.mark.parametrize("listens", [False, True], ids=["bound", "listening"])
@pytest.mark.parametrize("member", [0, SCHEDULER], ids=["who would make it", "who waits for it"])
def test_s16_a_name_that_another_user_has_is_told_at_once(
    name: str, hold: Hold, *, listens: bool, member: int
) -> None:
    hold(_OTHER, listens=listens)
    begin = time.monotonic()
    with pytest.raises(
        PermissionError,
        match=rf"'{name}' is held by another user \(uid {_OTHER}\): give the pool another name",
    ):
        Pool.open(_GEOMETRY if member == 0 else None, name, member, timeout_s=TIMEOUT_S)
    assert time.monotonic() - begin < TIMEOUT_S / 2, "long before the time is over"


def test_s16_a_process_of_this_user_that_hangs_is_not_taken_for_another_users(name: str, hold: Hold) -> None:
    hold(os.geteuid(), listens=False)
    with pytest.raises(TimeoutError, match=r"did not hand it over within 0\.1 s: .* End them$"):
        Pool.open(_GEOMETRY, name, 0, timeout_s=0.1)


def test_s16_where_the_kernel_does_not_say_whose_it_is_both_cases_are_told(
    name: str, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(os.geteuid(), listens=False)
    monkeypatch.setattr(handover_module, "uid_of_bound", lambda _address, _kind: None)
    with pytest.raises(
        TimeoutError, match=r"End them, or give the pool another name if they are another user's$"
    ):
        Pool.open(_GEOMETRY, name, 0, timeout_s=0.1)


def test_s16_the_owner_of_a_socket_is_found_among_many(name: str) -> None:
    with contextlib.ExitStack() as at_end:
        for number in range(300):  # more than the kernel tells in one message
            held = at_end.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            held.bind(f"\0{name}-{number:064}")
        for number in (0, 299):
            address = f"\0{name}-{number:064}".encode()
            assert uid_of_bound(address, socket.SOCK_SEQPACKET) == os.geteuid()
            assert uid_of_bound(address, socket.SOCK_STREAM) is None
        assert uid_of_bound(f"\0{name}".encode(), socket.SOCK_SEQPACKET) is None
