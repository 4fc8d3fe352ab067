"""What of the Mooncake tier needs no Mooncake: the order of work, the life of a client, settings, what is told."""

import sys
import threading
from types import ModuleType

import pytest
from pydantic import ValidationError

from kvtier_core.errors import TierOpenError
from kvtier_core.values import RequestInfo, TierContext, TierJob
from kvtier_mooncake import MooncakeSettings, MooncakeTier, tier
from kvtier_mooncake.client import Client, Region
from kvtier_mooncake.connection import Connection
from kvtier_mooncake.work import Doubts, Kind, Work, WorkQueue
from kvtier_testing.driving import PATIENCE_S
from kvtier_testing.rows import similar_keys

KEYS = similar_keys(6)
ADDRESS = "master.example:50051"


def work(kind, number=1, *, is_prefix=False):
    job = TierJob(id=number, request=RequestInfo(request_id="r"), keys=KEYS, is_prefix=is_prefix)
    return Work(kind, job, "ns")


# -- work


def test_c28_lookups_come_before_loads_and_loads_before_stores_part_by_part():
    queue = WorkQueue()
    store, load, lookup = work(Kind.STORE, 1), work(Kind.LOAD, 2), work(Kind.LOOKUP, 3)
    queue.put(store)
    assert queue.first().take(4) == range(4)
    queue.put(load)
    queue.put(lookup)
    order = []
    while (first := queue.first()) is not None:
        order.append((first.job.id, first.take(4)))
    assert order == [
        (3, range(4)),
        (3, range(4, 6)),
        (2, range(4)),
        (2, range(4, 6)),
        (1, range(4, 6)),
    ]


def test_c30_a_job_is_over_when_no_thread_has_a_part_of_it():
    load = work(Kind.LOAD)
    first, second = load.take(3), load.take(3)
    load.end(second, [True, False, "broken"])
    assert not load.is_over
    load.end(first, [True, True, True])
    assert load.is_over
    result = load.result()
    assert (result.missing, result.failed) == ((KEYS[4],), (KEYS[5],))
    assert result.error == "1 of 6 blocks failed: broken"


def test_c22_a_prefix_is_asked_about_up_to_its_first_absent_key():
    lookup = work(Kind.LOOKUP, is_prefix=True)
    lookup.end(lookup.take(2), [True, True])
    assert not lookup.is_over
    lookup.end(lookup.take(2), [True, False])
    assert lookup.is_over
    assert lookup.result().present == (True, True, True, False, None, None)


def test_c22_a_lookup_that_is_given_up_keeps_the_answers_it_has_and_is_no_fault():
    lookup, load = work(Kind.LOOKUP), work(Kind.LOAD)
    for one in (lookup, load):
        one.end(one.take(2), [True, False])
        one.give_up("its deadline passed")
    assert lookup.result().present == (True, False, None, None, None, None)
    assert lookup.result().error is None
    assert load.result().failed == tuple(KEYS[2:])


def test_doubts_are_bounded_and_end_with_the_replacement():
    doubts = Doubts(2)
    doubts.add(["a", "b", "c"])
    assert ["a" in doubts, "b" in doubts, "c" in doubts] == [False, True, True]
    doubts.replaced(["b", "never"])
    assert ["b" in doubts, "c" in doubts] == [False, True]


# -- the client's life


class FakeClient(Client):
    def __init__(self):
        self.is_closed = False

    def close(self):
        self.is_closed = True


class Makes:
    """Connects, and keeps what it has made."""

    def __init__(self):
        self.made: list[FakeClient] = []

    def __call__(self):
        self.made.append(FakeClient())
        return self.made[-1]


def test_c31_a_call_that_raises_is_seen_after_its_client_has_been_closed():
    connect = Makes()
    made, connection = connect.made, Connection(connect)
    connection.open()
    with pytest.raises(TimeoutError), connection.lend():
        raise TimeoutError("given up")
    assert made[0].is_closed
    with connection.lend() as client:
        assert client is made[1]
    assert not made[1].is_closed
    connection.close()
    assert made[1].is_closed


def test_c31_a_client_that_others_use_is_closed_when_they_have_done():
    connect = Makes()
    made, connection = connect.made, Connection(connect)
    connection.open()
    inside, go_on = threading.Event(), threading.Event()
    was_closed = []

    def use():
        with connection.lend():
            inside.set()
            assert go_on.wait(PATIENCE_S)
            was_closed.append(made[0].is_closed)

    def fail():
        with pytest.raises(TimeoutError), connection.lend():
            raise TimeoutError("given up")

    threads = [threading.Thread(target=use), threading.Thread(target=fail)]
    threads[0].start()
    assert inside.wait(PATIENCE_S)
    threads[1].start()
    with connection.lend() as client:  # the one in use, or, once it is given up, a new one
        assert client in made
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert was_closed == [False]
    assert made[0].is_closed


def test_c31_a_store_that_can_not_be_reached_is_tried_again_after_a_pause():
    tries = []

    def connect():
        tries.append(1)
        if len(tries) > 1:
            raise TierOpenError("nobody there")
        return FakeClient()

    connection = Connection(connect)
    connection.open()
    with pytest.raises(TimeoutError), connection.lend():
        raise TimeoutError("given up")
    for _ in range(20):
        with pytest.raises(TierOpenError, match="nobody there"), connection.lend():
            pass
    assert len(tries) < 20


@pytest.fixture
def few_threads(monkeypatch):
    """No more threads than this many can be had; ``None`` for any number."""
    left: list[int | None] = [None]

    def start(self, start=threading.Thread.start):
        if left[0] is not None:
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    return left


@pytest.fixture
def clients(monkeypatch):
    """Every client that a tier makes, the one that gives memory among them."""
    connect = Makes()
    for name in ("Client", "Segment"):
        monkeypatch.setattr(tier, name, lambda *_: connect())
    return connect.made


def fail_to_open(few_threads, can_be_had):
    """A tier that needs two threads and does not get them."""
    settings = MooncakeSettings(
        type="x", master_server_address="127.0.0.1:1", threads=2, global_segment_size="1MiB"
    )
    opened = MooncakeTier(settings, TierContext(name="far", namespace="ns", row_bytes=4096, description={}))
    few_threads[0] = can_be_had
    with pytest.raises(RuntimeError, match="can't start new thread"):
        opened.on_open(pool=None)
    few_threads[0] = None
    return opened


@pytest.mark.parametrize("can_be_had", [0, 1])
def test_c34_4_a_tier_that_gets_no_thread_leaves_nothing_open_and_can_be_shut_down(
    clients, few_threads, can_be_had
):
    opened = fail_to_open(few_threads, can_be_had)
    assert [one.is_closed for one in clients] == [True, True]
    opened.shutdown(0.0)


@pytest.mark.parametrize("can_be_had", [0, 1])
def test_k4_a_tier_that_got_no_thread_can_be_opened_again(clients, few_threads, can_be_had):
    opened = fail_to_open(few_threads, can_be_had)
    opened.on_open(pool=None)
    assert [one.is_closed for one in clients] == [True, True, False, False]
    opened.shutdown(PATIENCE_S)
    assert all(one.is_closed for one in clients)


class Answers:
    """In place of Mooncake's client: it answers every call with these codes."""

    def __init__(self, *codes):
        self.batch_get_into = self.batch_put_from = self.batch_upsert_from = lambda *_: list(codes)


@pytest.mark.parametrize("move", [Client.get, Client.put, Client.replace])
def test_c31_a_transfer_that_failed_at_once_may_go_on_as_well(move):
    client = FakeClient()
    client._store, client._config = Answers(10, -800), None
    with pytest.raises(TimeoutError, match="1 of 2 transfers failed, or were given up"):
        move(client, ["a", "b"], [0, 10], 10)


# -- settings, and what is told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"master_server_address": "master.example"}, "must be host:port, such as master.example:50051"),
        ({"metadata_server": "http://master.example/metadata"}, "a URL with a port"),
        ({"metadata_server": "master.example:8080"}, "a URL with a port"),
        ({"replica_num": 0}, "greater than or equal to 1"),
        ({"protocol": "smoke"}, "'tcp' or 'rdma'"),
        ({"global_segment_size": "1GiB"}, r"look for it at 127\.0\.0\.1, .*: set local_hostname to"),
        ({"global_segment_size": "1GiB", "local_hostname": "localhost"}, "set local_hostname to"),
        ({"global_segment_size": "1GiB", "local_hostname": "[::1]:12345"}, "look for it at ::1, "),
    ],
)
def test_c53_settings_that_can_not_be_meant_are_refused(settings, told):
    with pytest.raises(ValidationError, match=told):
        MooncakeSettings.model_validate({"type": "mooncake", "master_server_address": ADDRESS, **settings})


@pytest.mark.parametrize(
    ("master", "own"),
    [("127.0.0.1:50051", "127.0.0.1"), ("localhost:50051", "127.0.0.1"), (ADDRESS, "10.0.0.7")],
)
def test_c53_memory_can_be_given_where_others_reach_it(master, own):
    settings = MooncakeSettings(
        type="x", master_server_address=master, local_hostname=own, global_segment_size="1GiB"
    )
    assert settings.global_segment_size == 1 << 30


@pytest.mark.parametrize(
    ("metadata", "servers"),
    [
        ("P2PHANDSHAKE", {}),
        ("http://10.0.0.1:8080/metadata", {"metadata_server": ("10.0.0.1", 8080)}),
        ("etcd://[::1]:2379", {"metadata_server": ("::1", 2379)}),
    ],
)
def test_the_servers_that_must_answer(metadata, servers):
    settings = MooncakeSettings(type="x", master_server_address=ADDRESS, metadata_server=metadata)
    assert settings.servers == {"master_server_address": ("master.example", 50051), **servers}


def test_c51_a_missing_client_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    settings = MooncakeSettings(type="x", master_server_address=ADDRESS)
    with pytest.raises(TierOpenError, match="pip install mooncake-transfer-engine") as caught:
        Client(settings, "far", Region(0, 0))
    assert str(caught.value).startswith("tier 'far' (kvtier-mooncake): ")


class Unlinked(ModuleType):
    """What imports it is told that a library is missing."""

    def __getattr__(self, name: str) -> object:
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")


def test_c51_a_missing_library_of_the_system_is_told_with_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", Unlinked("mooncake.store"))
    settings = MooncakeSettings(type="x", master_server_address=ADDRESS)
    with pytest.raises(
        TierOpenError, match="libibverbs.so.1: cannot open .*Debian's package libibverbs1"
    ) as caught:
        Client(settings, "far", Region(0, 0))
    assert "pip install" not in str(caught.value)
