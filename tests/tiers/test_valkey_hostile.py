"""The Valkey tier and a server that answers what it likes: never wrong bytes, never a hang, and doubt is told once.

No real server is needed: what it would send lies ready on a socket before it is asked.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("valkey")

from kvtier_core.errors import TierOpenError
from kvtier_core.tier import OffloadKey
from kvtier_testing.rows import RowMaker
from kvtier_valkey import ValkeyTier
from kvtier_valkey.faults import (
    NotABlockError,
    ServerBusyError,
    ServerConfusedError,
    ServerFullError,
    ServerLostError,
    ServerRefusedError,
    ServerSilentError,
)
from kvtier_valkey.link import Link
from tests.tiers.valkey_server import KEYS, make_tier

MAKER = RowMaker("space", 100)
SIZE = MAKER.row_bytes
ABSENT = {KEYS[2], KEYS[5]}
SECONDS = 0.1
SLACK_S = 5.0
"""What a busy machine may add."""
FAULTS = (ServerLostError, ServerSilentError, ServerRefusedError)
UNASKED = [
    b"-ERR x\r\n",
    b"+OK\r\n",
    b":7\r\n",
    b"$-1\r\n",
    b":%d\r\n" % SIZE,
    b">2\r\n+invalidate\r\n*0\r\n",
    b"\r\n",
]
IMPOSSIBLE = [b"$-2\r\n", b"$99999999999\r\n", b"$1x\r\n", b"$ 5\r\n", b"$\r\n", b"$%s\r\n" % (b"9" * 5000)]

Answers = list[bool | Exception | str]


def value(key: OffloadKey) -> bytes:
    return b"$%d\r\n%b\r\n" % (SIZE, MAKER.make(key))


def loaded(tier: ValkeyTier) -> Answers:
    """What a load answers. Where it says that a row is filled, its proof must hold: the core looks at nothing else."""
    rows = [bytearray(SIZE) for _ in KEYS]
    answers = list(tier.load_many(KEYS, [memoryview(row) for row in rows]))
    for key, row, answer in zip(KEYS, rows, answers, strict=True):
        if answer is True and MAKER.proves(key, bytes(row)):
            assert bytes(row) == MAKER.make(key)
    return [
        "wrong" if answer is True and not MAKER.proves(key, bytes(row)) else answer
        for key, row, answer in zip(KEYS, rows, answers, strict=True)
    ]


def stored(tier: ValkeyTier) -> Answers:
    return list(tier.store_many(KEYS, [memoryview(MAKER.make(key)) for key in KEYS]))


def asked(tier: ValkeyTier) -> Answers:
    return list(tier.contains(KEYS))


HONEST: dict[Callable[[ValkeyTier], Answers], list[bytes]] = {
    loaded: [*(b"$-1\r\n" if key in ABSENT else value(key) for key in KEYS), b":0\r\n"],
    stored: [*(b"+OK\r\n" for _ in KEYS), b":0\r\n"],
    asked: [*(b":0\r\n" if key in ABSENT else b":%d\r\n" % SIZE for key in KEYS), b"$-1\r\n"],
}
"""By call, what a server that holds all but ``ABSENT`` replies, the last of which ends it."""


def right(call: Callable[[ValkeyTier], Answers]) -> Answers:
    return [call is stored or key not in ABSENT for key in KEYS]


@contextmanager
def tier_of(*conversations: bytes, stays: bool = False) -> Iterator[ValkeyTier]:
    """A tier each of whose connections gets the next of these bytes. Then it ends, or is silent where it *stays*."""
    limits = dict.fromkeys(("load_timeout", "store_timeout", "lookup_timeout"), f"{round(SECONDS * 1000)}ms")
    tier = make_tier("redis://server", maker=MAKER, limits=limits)
    left = list(conversations)
    theirs: list[socket.socket] = []

    def connect(*_place: object) -> Link:
        if not left:
            raise ConnectionRefusedError("no more")
        ours, server = socket.socketpair()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        server.sendall(left.pop(0))
        if not stays:
            server.shutdown(socket.SHUT_WR)
        theirs.append(server)
        return Link(ours)

    try:
        with patch("kvtier_valkey.server.connect", connect):
            yield tier
    finally:
        tier.close()
        for server in theirs:
            server.close()


def are_right_or_faults(call: Callable[[ValkeyTier], Answers], answers: Answers) -> bool:
    return all(
        answer is expected or isinstance(answer, FAULTS)
        for answer, expected in zip(answers, right(call), strict=True)
    )


calls = st.sampled_from(list(HONEST))


@pytest.mark.parametrize("call", HONEST)
def test_i19_an_honest_server_is_believed_and_its_connection_used_again(call):
    with tier_of(b"".join(HONEST[call] * 3), stays=True) as tier:
        # Of what lies ready behind the first call's replies the tier knows that nobody asked for it.
        assert call(tier) == right(call)
    with tier_of(b"".join(HONEST[call]), b"", stays=True) as tier:
        assert call(tier) == right(call)
        assert all(isinstance(answer, ServerSilentError) for answer in call(tier)), (
            "the first connection's silence"
        )


@given(call=calls, at=st.integers(0, 6), reply=st.sampled_from(UNASKED))
@example(call=stored, at=0, reply=b"+OK\r\n")
@example(call=loaded, at=0, reply=b"-ERR x\r\n")
def test_i19_a_reply_that_nobody_asked_for_leaves_no_answer_of_its_call(call, at, reply):
    replies = HONEST[call]
    with tier_of(b"".join([*replies[:at], reply, *replies[at:]]), stays=True) as tier:
        answers = call(tier)
        if at == len(KEYS) and answers == right(call):
            return  # before the last one, as a refusal: it has shifted nothing
        assert all(isinstance(answer, ServerConfusedError) for answer in answers), answers
        assert {str(type(answer)) for answer in asked(tier)} == {str(ServerLostError)}, (
            "on another connection"
        )


@given(call=calls, at=st.integers(0, 6), what=st.sampled_from(["dropped", "doubled"]), stays=st.booleans())
def test_i19_a_reply_too_many_or_too_few_leaves_no_answer_of_its_call(call, at, what, stays):
    replies = HONEST[call]
    changed = [*replies[:at], *([replies[at]] * 2 if what == "doubled" else []), *replies[at + 1 :]]
    with tier_of(b"".join(changed), stays=stays) as tier:
        answers = call(tier)
    if at == len(KEYS):  # the last one itself
        assert answers == right(call)
    else:
        assert all(isinstance(answer, ServerConfusedError) for answer in answers), answers


@given(at=st.permutations(range(6)))
def test_i19_rows_in_another_order_are_found_by_their_proofs(at):
    replies = HONEST[loaded]
    with tier_of(b"".join([*(replies[place] for place in at), replies[-1]])) as tier:
        answers = loaded(tier)
    for place, answer, expected in zip(at, answers, right(loaded), strict=True):
        assert answer is (KEYS[place] not in ABSENT) or answer == "wrong"
        assert expected or answer is not True


@given(call=calls, data=st.data(), stays=st.booleans())
def test_i19_replies_that_end_anywhere_give_those_before_and_no_others(call, data, stays):
    whole = b"".join(HONEST[call])
    cut = data.draw(st.integers(0, len(whole) - 1))
    began = time.monotonic()
    with tier_of(whole[:cut], stays=stays) as tier:
        answers = call(tier)
    assert time.monotonic() - began < SECONDS + SLACK_S
    assert are_right_or_faults(call, answers), answers


@given(call=calls, data=st.data())
def test_i19_a_byte_that_was_lost_changed_or_added_makes_no_wrong_row(call, data):
    whole = b"".join(HONEST[call])
    at = data.draw(st.integers(0, len(whole) - 1))
    inserted = data.draw(st.binary(max_size=3))
    with tier_of(whole[:at] + inserted + whole[at + data.draw(st.integers(0, 2)) :]) as tier:
        answers = call(tier)
    assert all(type(answer) is bool or isinstance(answer, FAULTS) or answer == "wrong" for answer in answers)


FRAGMENTS = [
    *UNASKED, *IMPOSSIBLE, value(KEYS[0]), value(KEYS[1])[:-1], b"$%d\r\n" % SIZE, b"$0\r\n\r\n", b"*2\r\n", b"*-1\r\n",
    b"*1048576\r\n", b"*9999999999\r\n", b"$1\r\n0\r\n", b"$3\r\nabc\r\n", b"*0\r\n", b"_\r\n", b"#t\r\n", b"%1\r\n",
    b",1.5\r\n", b"=5\r\ntxt:a\r\n", b"-\r\n", b"-ERR \x1b[2Jcleared\nnext\r\n", b"-LOADING\r\n", b"+" * 5000, b"\0",
    b"$9\r\nmaxmemory\r\n", b"$23\r\nmaxmemory:9999999999999\r\n", b"\x15\x03\x03\x00\x02\x02\x46",
]  # fmt: skip
garbage = st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=20), max_size=12).map(b"".join)


@given(parts=garbage)
@example(parts=b"-ERR \x1b[2Jcleared\nnext\r\n")
def test_i19_whatever_a_server_says_is_an_answer_or_a_fault(parts):
    for call in HONEST:
        with tier_of(parts) as tier:
            assert all(
                type(answer) is bool or isinstance(answer, FAULTS) or answer == "wrong"
                for answer in call(tier)
            )
    assert (fault_of(parts, ValkeyTier.open) or "a").isprintable(), "one line of a log"
    fault_of(parts, ValkeyTier.remove_namespace)
    fault_of(parts, lambda tier: tier.delete(KEYS))


@pytest.mark.parametrize("most", [b"-1", b"9" * 5000, "\u0661\u00b2".encode(), b"", b"1 2", b"0x10"])
def test_i19_a_server_that_says_nonsense_of_itself_is_used_all_the_same(most):
    said = b"role:master\r\nmaxmemory:%b\r\nmaxmemory_policy:noeviction\r\n" % most
    assert fault_of(b"$%d\r\n%b\r\n" % (len(said), said), ValkeyTier.open) is None


def fault_of(parts: bytes, act: Callable[[ValkeyTier], None]) -> str | None:
    """What is said where it can't be done. Anything but a fault fails the test."""
    with tier_of(parts, b"+OK\r\n:0\r\n") as tier:
        try:
            act(tier)
        except (*FAULTS, TierOpenError) as error:
            return str(error)
    return None


@pytest.mark.parametrize("reply", IMPOSSIBLE)
@pytest.mark.parametrize("at", [0, 3, 5])
def test_i19_an_impossible_length_is_found_at_once(reply, at):
    replies = [*HONEST[loaded][:at], reply]
    with (
        patch("tests.tiers.test_valkey_hostile.SECONDS", 60.0),
        tier_of(b"".join(replies), stays=True) as tier,
    ):
        began = time.monotonic()
        answers = loaded(tier)
        assert time.monotonic() - began < SLACK_S
    assert all(isinstance(answer, ServerConfusedError) for answer in answers), answers


def test_i19_a_lost_byte_of_the_last_value_is_found_at_once():
    whole = b"".join([*HONEST[loaded][:-2], value(KEYS[5]), b":0\r\n"])
    at = len(whole) - 100
    with (
        patch("tests.tiers.test_valkey_hostile.SECONDS", 60.0),
        tier_of(whole[:at] + whole[at + 1 :], stays=True) as tier,
    ):
        began = time.monotonic()
        assert all(isinstance(answer, ServerConfusedError) for answer in loaded(tier))
        assert time.monotonic() - began < SLACK_S


def test_i19_doubt_is_told_once_with_what_to_do(caplog):
    shifted = b"".join([b"-ERR x\r\n", *HONEST[loaded]])
    with caplog.at_level(logging.WARNING), tier_of(*[shifted] * 3) as tier:
        for _ in range(3):
            assert all(isinstance(answer, ServerConfusedError) for answer in loaded(tier))
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        "tier 'far' (kvtier-valkey): server:6379 sent a reply that answers no question: b'$-1'. No"
    )
    assert "look at what stands between here and the server" in told


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("MOVED 3999 127.0.0.1:6381", ServerRefusedError),
        ("ASK 3999 127.0.0.1:6381", ServerRefusedError),
        ("NOAUTH Authentication required.", ServerRefusedError),
        ("ERR unknown command 'GET'", ServerRefusedError),
        ("LOADING Valkey is loading the dataset in memory", ServerBusyError),
        ("BUSY Valkey is busy running a script.", ServerBusyError),
        ("READONLY You can't write against a read only replica.", ServerBusyError),
        ("MASTERDOWN Link with MASTER is down", ServerBusyError),
        ("CLUSTERDOWN The cluster is down", ServerBusyError),
        ("TRYAGAIN Multiple keys request during rehashing of slot", ServerBusyError),
        ("NOREPLICAS Not enough good replicas to write.", ServerBusyError),
        ("OOM command not allowed when used memory > 'maxmemory'.", ServerFullError),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", NotABlockError),
    ],
)
@pytest.mark.parametrize("call", HONEST)
def test_i19_a_refusal_is_one_of_its_question_and_the_others_count(call, line, kind):
    refused = f"-{line}\r\n".encode()
    with tier_of(b"".join([HONEST[call][0], refused, *HONEST[call][2:]])) as tier:
        answers = call(tier)
    if call is stored and kind is ServerFullError:
        assert answers[1] is False, "declined"
    else:
        assert type(answers[1]) is kind
        assert isinstance(answers[1], ConnectionError) is (kind is ServerBusyError), (
            "whether it is tried again"
        )
    assert [*answers[:1], *answers[2:]] == [*right(call)[:1], *right(call)[2:]]


@pytest.mark.parametrize("call", HONEST)
def test_i19_a_server_that_refuses_everything_is_not_taken_for_a_confused_one(call):
    with tier_of(b"-NOAUTH Authentication required.\r\n" * 7) as tier:
        assert [type(answer) for answer in call(tier)] == [ServerRefusedError] * 6


@pytest.mark.parametrize("call", HONEST)
def test_i19_a_slow_drip_ends_with_the_time_of_the_call(call):
    ours, theirs = socket.socketpair()
    is_over = threading.Event()

    def drip() -> None:
        for byte in b"".join(HONEST[call]):
            if is_over.wait(0.02):
                return
            theirs.sendall(bytes([byte]))

    dripping = threading.Thread(target=drip)
    with theirs, tier_of(b"") as tier, patch("kvtier_valkey.server.connect", lambda *_place: Link(ours)):
        dripping.start()
        began = time.monotonic()
        answers = call(tier)
        assert time.monotonic() - began < SECONDS + SLACK_S
        is_over.set()
        dripping.join()
    assert isinstance(answers[-1], ServerSilentError)
    assert are_right_or_faults(call, answers)


@pytest.mark.parametrize(
    "found",
    [
        b"*2\r\n$4\r\nhost\r\n$1\r\n0\r\n",
        b"*2\r\n$4\r\nhost\r\n$5\r\n65536\r\n",
        b"*2\r\n$4\r\nhost\r\n$5000\r\n" + b"9" * 5000 + b"\r\n",
        b"*2\r\n$4\r\nhost\r\n$2\r\n-1\r\n",
        b"*2\r\n$0\r\n\r\n$4\r\n6379\r\n",
        b"*2\r\n$5\r\na..bc\r\n$4\r\n6379\r\n",
        b"*2\r\n$2\r\n\xff\xfe\r\n$4\r\n6379\r\n",
        b"*2\r\n$3\r\na\0b\r\n$4\r\n6379\r\n",
        b"*3\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\n2\r\n",
        b"*-1\r\n",
        b"-ERR no\r\n",
    ],
)
def test_i19_a_sentinel_that_names_no_place_is_told(found):
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(1 << 16)
            client.sendall(found)
            client.recv(1)

    server = threading.Thread(target=serve)
    server.start()
    port = listener.getsockname()[1]
    tier = make_tier(f"redis+sentinel://127.0.0.1:{port}/main", maker=MAKER)
    with listener, pytest.raises(TierOpenError, match=f"127.0.0.1:{port} "):
        tier.open()
    server.join()
