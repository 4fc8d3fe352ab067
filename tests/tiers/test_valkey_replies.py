"""A Valkey server's replies to many questions at once: however they are cut, each row has its own bytes, or none."""

import random
import socket
import threading
import time
from collections.abc import Sequence

import pytest

pytest.importorskip("valkey")

from kvtier_valkey.faults import ServerBusyError, ServerLostError, ServerRefusedError
from kvtier_valkey.frames import Frames
from kvtier_valkey.link import Link
from kvtier_valkey.wire import Wire

SIZE = 4096
_HEAD = b"$4096\r\n"
OTHERS = {
    b"$-1\r\n": False,
    b"$0\r\n\r\n": False,
    b"$4095\r\n" + b"s" * 4095 + b"\r\n": False,
    b"$40960\r\n" + b"l" * 40_960 + b"\r\n": False,
    b"$4\r\n$409\r\n": False,  # within another size, what looks like a head
    b"-ERR unknown\r\n": ServerRefusedError,
    b"-LOADING the dataset\r\n": ServerBusyError,
}
"""Replies that fill no row, and what each means."""


class CountingLink(Link):
    """Counts how often it receives."""

    calls = 0

    def receive(self, parts: Sequence[memoryview], *, whole: bool) -> int:
        self.calls += 1
        return super().receive(parts, whole=whole)


def begun(link: Link) -> Wire:
    wire = Wire(link, "server")
    wire.begin(time.monotonic() + 60)
    return wire


def read(wire: Wire, rows: Sequence[bytearray]) -> tuple[list[object], OSError | None]:
    """What ``fill`` told of each row, up to a fault; and the fault."""
    answers: list[object] = []
    try:
        for answer in wire.fill([memoryview(row) for row in rows]):
            answers.append(answer)  # noqa: PERF402 - those before a fault count
    except OSError as error:
        return answers, error
    return answers, None


def conversation(rng: random.Random, count: int) -> tuple[list[bytes], list[object], list[bytes | None]]:
    """Replies, what each means, and what is in the row behind it where it is filled."""
    replies: list[bytes] = []
    meanings: list[object] = []
    values: list[bytes | None] = []
    for _ in range(count):
        if rng.random() < 0.7:
            value = rng.randbytes(SIZE)
            values.append(value)
            replies.append(_HEAD + value + b"\r\n")
            meanings.append(True)
        else:
            reply, meaning = rng.choice(list(OTHERS.items()))
            replies.append(reply)
            meanings.append(meaning)
            values.append(None)
    return replies, meanings, values


def is_as_meant(answer: object, meaning: object) -> bool:
    return type(answer) is meaning if isinstance(meaning, type) else answer is meaning


def in_pieces(rng: random.Random, data: bytes) -> list[bytes]:
    most = rng.choice([3, 50, 5000, 1 << 20])
    pieces = []
    while data:
        size = rng.randint(1, most)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


@pytest.mark.parametrize("seed", range(12))
def test_i19_whatever_comes_between_values_each_row_has_its_own_bytes(seed):
    rng = random.Random(seed)
    replies, meanings, values = conversation(rng, 30)
    pieces = in_pieces(rng, b"".join(replies) + b":7\r\n")
    ours, theirs = socket.socketpair()

    def serve() -> None:
        for piece in pieces:
            theirs.sendall(piece)

    with ours, theirs:
        server = threading.Thread(target=serve)
        server.start()
        wire = begun(Link(ours))
        rows = [bytearray(SIZE) for _ in replies]
        answers, fault = read(wire, rows)
        server.join()
        assert fault is None
        assert all(map(is_as_meant, answers, meanings)), (answers, meanings)
        assert len(answers) == len(meanings)
        for row, value in zip(rows, values, strict=True):
            assert value is None or row == value
        assert wire.number() == 7, "the next reply is where it should be"


def test_i19_a_connection_cut_anywhere_gives_the_rows_before_and_no_other():
    value = random.Random(0).randbytes(SIZE)
    replies = [_HEAD + value + b"\r\n", b"$-1\r\n", _HEAD + value + b"\r\n", _HEAD + value + b"\r\n"]
    whole = b"".join(replies)
    ends = [sum(map(len, replies[: number + 1])) for number in range(len(replies))]
    near = {place for end in (0, *ends) for place in range(end - 5, end + 12)}
    for cut in sorted(place for place in near if 0 <= place < len(whole)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(whole[:cut])
            theirs.shutdown(socket.SHUT_WR)
            rows = [bytearray(SIZE) for _ in replies]
            answers, fault = read(begun(Link(ours)), rows)
            assert answers == [True, False, True, True][: sum(end <= cut for end in ends)], cut
            assert isinstance(fault, ServerLostError)
            for row, answer in zip(rows, answers, strict=False):
                assert not answer or row == value


@pytest.mark.parametrize("end", [b"ab", b"\rb", b"a\n", b"$-1\r\n", b"\n\r"])
def test_i19_a_value_with_another_end_is_a_fault_and_so_is_all_behind_it(end):
    value = bytes(SIZE)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(_HEAD + value + b"\r\n" + _HEAD + value + end + b"\r\n" + _HEAD + value + b"\r\n")
        answers, fault = read(begun(Link(ours)), [bytearray(SIZE) for _ in range(3)])
        assert answers == [True]
        assert isinstance(fault, ServerLostError)
        assert "longer than it said" in str(fault)


def test_i19_rows_that_have_come_are_received_together():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.sendall((_HEAD + bytes(SIZE) + b"\r\n") * 30)
        link = CountingLink(ours)
        answers, fault = read(begun(link), [bytearray(SIZE) for _ in range(30)])
        assert (answers, fault) == ([True] * 30, None)
        assert link.calls <= 4


def test_i19_a_thousand_absent_blocks_are_not_each_prepared_for_all_others(monkeypatch):
    made = []

    def counted(values: Sequence[memoryview]) -> Frames:
        made.append(len(values))
        return Frames(values)

    monkeypatch.setattr("kvtier_valkey.wire.Frames", counted)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.sendall(b"$-1\r\n" * 1000)
        answers, fault = read(begun(Link(ours)), [bytearray(SIZE)] * 1000)
        assert (answers, fault) == ([False] * 1000, None)
        assert sum(made) < 1000


def test_i19_usual_answers_and_others_are_told_apart():
    replies = [b":7\r\n"] * 5 + [b":70\r\n", b":7\r\n", b"-ERR no\r\n", b":0\r\n"] + [b":7\r\n"] * 2000
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.sendall(b"".join(replies) + b"+OK\r\n" * 3 + b"-OOM full\r\n+OK\r\n")
        wire = begun(Link(ours))
        numbers = list(wire.numbers(len(replies), 7))
        assert isinstance(numbers.pop(7), ServerRefusedError)
        assert numbers == [7] * 5 + [70, 7, 0] + [7] * 2000
        done = list(wire.all_done(5))
        assert [type(one).__name__ for one in done] == ["NoneType"] * 3 + ["ServerFullError", "NoneType"]
