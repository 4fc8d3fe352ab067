"""The Mooncake tier behind a real manager and pool, while its store is killed, restarted, stopped, or full.

Run by ``nox -s mooncake``, which installs Mooncake.
"""

import ctypes
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import pytest
from pydantic import ValidationError

from tests.tiers.mooncake_store import MooncakeStore, is_installed

if not is_installed():
    pytest.skip("needs the package mooncake-transfer-engine-non-cuda", allow_module_level=True)

from kvtier_core.errors import TierOpenError
from kvtier_core.manager.hook_tier import HookTier
from kvtier_core.values import RequestInfo, TierContext, TierJob
from kvtier_mooncake import MooncakeSettings, MooncakeTier, client
from kvtier_mooncake.memory import StagingMemory
from kvtier_mooncake.work import name_of
from kvtier_testing.driving import PATIENCE_S
from tests.manager.conftest import key
from tests.manager.conftest import make_bench as make_bench  # noqa: PLC0414 - a fixture
from tests.tiers.ports import free_ports


@pytest.fixture
def store(tmp_path):
    store = MooncakeStore(tmp_path)
    yield store
    store.stop()


@pytest.fixture
def make(make_bench):
    """A manager over a pool, in front of a Mooncake tier."""

    def make_one(address, *, limits=(), **settings):
        made = MooncakeSettings.model_validate(
            {"type": "mooncake", "master_server_address": address, **settings}
        )
        return make_bench(
            info=MooncakeTier.info,
            make_port=partial(HookTier, partial(MooncakeTier, made)),
            **dict(limits),
        )

    return make_one


def fill(bench, *numbers):
    """Let the tier hold these blocks, and the pool hold none."""
    bench.new("fill")
    bench.store("fill", *numbers)
    bench.manager.request_finished("fill")
    bench.settle()
    bench.evict_all()


def load(bench, *numbers):
    """A request of its own looks up and loads: whether each loaded block has the right bytes."""
    name = f"load-{time.monotonic()}"
    bench.new(name)
    try:
        return bench.load(name, *numbers)
    finally:
        bench.manager.request_finished(name)


def load_until(bench, *numbers):
    """Ask again and again until everything hits."""
    give_up = time.monotonic() + PATIENCE_S
    while load(bench, *numbers) != [True] * len(numbers):
        assert time.monotonic() < give_up, "hits did not come back"
        bench.manager.wait(0.2)


def test_c29_blocks_go_straight_between_the_pool_and_the_store(store, make, monkeypatch):
    moved = []
    for name in ("put", "get"):
        original = getattr(client.Client, name)

        def watched(self, names, addresses, size, original=original):
            moved.extend(addresses)
            return original(self, names, addresses, size)

        monkeypatch.setattr(client.Client, name, watched)
    bench = make(store.address)
    fill(bench, 1, 2, 3)
    assert load(bench, 1, 2, 3) == [True] * 3
    first, geometry = bench.pool.address, bench.pool.geometry
    assert len(moved) == 6
    assert all(0 <= address - first < geometry.num_rows * geometry.row_bytes for address in moved)


@pytest.mark.parametrize("size", [4096, 100, 10_000], ids=["as long", "shorter", "longer"])
def test_c03_wrong_bytes_are_a_miss_and_the_next_store_replaces_them(store, make, caplog, size):
    bench = make(store.address)
    fill(bench, 1, 2)
    store.overwrite(name_of(bench.manager.namespace.name, key(2)), bytes(size))
    for _ in range(2):
        assert load(bench, 1, 2) == [True]
        bench.evict_all()
    assert caplog.text.count("wrong bytes came for 1 blocks") == (size == 4096), "it was not read again"
    assert "failed" not in caplog.text
    fill(bench, 2)
    load_until(bench, 1, 2)


def test_c31_a_master_that_is_killed_and_restarted_empty_costs_hits_alone(store, make, caplog):
    bench = make(store.address, limits={"lookup_timeout": 1.0})
    fill(bench, 1, 2)
    assert load(bench, 1, 2) == [True, True]
    bench.evict_all()
    bench.manager.coordinator.state.tiers["one"].presence._told.clear()  # what it believes has lapsed
    store.end(store.master)
    begin = time.monotonic()
    assert load(bench, 1, 2) == []
    assert time.monotonic() - begin < PATIENCE_S
    assert "tier 'one'" in caplog.text
    store.start_master()
    give_up = time.monotonic() + PATIENCE_S
    while load(bench, 1, 2) != [True, True]:
        assert time.monotonic() < give_up, "hits did not come back"
        fill(bench, 1, 2)
        bench.manager.wait(0.5)


def test_c31_a_master_that_is_stopped_holds_up_no_request_and_is_used_again(store, make):
    bench = make(store.address, limits={"lookup_timeout": 1.0, "load_timeout": 1.0})
    fill(bench, 1, 2)
    bench.manager.coordinator.state.tiers["one"].presence._told.clear()
    store.master.send_signal(signal.SIGSTOP)
    for _ in range(3):
        begin = time.monotonic()
        assert load(bench, 1, 2) == []
        assert time.monotonic() - begin < 10.0
    store.master.send_signal(signal.SIGCONT)
    _come_back(store, bench)


def test_c31_a_holder_of_memory_that_is_stopped_holds_up_no_request(store, make):
    bench = make(store.address, limits={"lookup_timeout": 1.0, "load_timeout": 1.0})
    fill(bench, 1, 2)
    store.holder.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    assert load(bench, 1, 2) == []
    assert time.monotonic() - begin < 10.0
    store.holder.send_signal(signal.SIGCONT)
    _come_back(store, bench)


def _come_back(store, bench):
    """The master may have given up a process that it did not hear of: it comes back by itself."""
    give_up = time.monotonic() + 2 * PATIENCE_S
    while load(bench, 1, 2) != [True, True]:
        assert time.monotonic() < give_up, "hits did not come back"
        fill(bench, 1, 2)
        bench.manager.wait(0.5)


@pytest.mark.timeout(300)  # Mooncake gives a transfer up after 60 s
def test_c31_a_transfer_that_was_given_up_moves_nothing_once_its_client_is_closed(store):
    size, count = 64 << 10, 64
    memory = StagingMemory(size, count, threads=1)
    rows = [bytes([number + 1]) * size for number in range(count)]
    job = TierJob(id=1, request=RequestInfo(request_id="r"), keys=(), buffers=tuple(map(memoryview, rows)))
    names, addresses = [f"n{number}" for number in range(count)], memory.addresses(0, job, range(count))
    settings = MooncakeSettings(type="x", master_server_address=store.address)
    memory.fill(0, job, range(count))
    asked = client.Client(settings, "far", memory.region)
    assert asked.put(names, addresses, size) == [True] * count
    store.holder.send_signal(signal.SIGSTOP)
    ctypes.memset(memory.region.address, 0, memory.region.size)
    with pytest.raises(TimeoutError, match="64 of 64 transfers failed, or were given up"):
        asked.get(names, addresses, size)
    asked.close()
    store.holder.send_signal(signal.SIGCONT)
    other = client.Client(settings, "far", (elsewhere := StagingMemory(size, count, threads=1)).region)
    give_up = time.monotonic() + PATIENCE_S
    while other.put(["later"], elsewhere.addresses(0, job, range(1)), size) != [True]:
        assert time.monotonic() < give_up, "the holder of memory did not go on"
    other.close()
    assert not any(ctypes.string_at(memory.region.address, memory.region.size))


def test_c31_a_load_whose_transfer_failed_has_its_result_once_its_client_is_closed(store, make, monkeypatch):
    closed = []

    def watched(self, close=client.Client.close):
        close(self)
        closed.append(self)

    monkeypatch.setattr(client.Client, "close", watched)
    bench = make(store.address)
    fill(bench, 1, 2)
    store.end(store.holder)
    assert load(bench, 1, 2) == []
    assert len(closed) == 1
    store.start_holder()
    _come_back(store, bench)


def test_c28_a_store_without_memory_declines_and_stays_in_the_path(store, make, caplog):
    store.holder.communicate()  # it ends as it should, and the master knows
    bench = make(store.address)
    for number in range(8):
        fill(bench, number)
    counted = bench.manager.counters.tiers["one"]
    assert (counted.stored, counted.store_failed, counted.declined) == (0, 0, 8)
    assert caplog.text.count("the store had no room for 1 blocks") == 1
    assert "out of the path" not in caplog.text


def test_an_engine_can_give_the_memory_itself(store, make):
    store.holder.communicate()
    bench = make(store.address, global_segment_size="32MiB")
    fill(bench, 1, 2)
    assert load(bench, 1, 2) == [True, True]


def test_c33_2_a_client_that_is_given_up_takes_no_block_of_the_memory_that_the_engine_gives(
    store, make, monkeypatch
):
    store.holder.communicate()
    bench = make(store.address, global_segment_size="32MiB")
    fill(bench, 1, 2)
    given_up: list[client.Client] = []

    def fail_once(self, names, addresses, size, get=client.Client.get):
        if not given_up:
            given_up.append(self)
            raise TimeoutError("another holder has stalled")
        return get(self, names, addresses, size)

    monkeypatch.setattr(client.Client, "get", fail_once)
    assert load(bench, 1, 2) == []
    load_until(bench, 1, 2)
    assert given_up


def test_c34_4_a_shutdown_while_the_master_is_stopped_ends_in_time_and_is_confirmed_later(store):
    settings = MooncakeSettings(type="x", master_server_address=store.address, global_segment_size="32MiB")
    tier = MooncakeTier(settings, TierContext(name="far", namespace="ns", row_bytes=4096, description={}))
    tier.on_open(pool=None)
    store.master.send_signal(signal.SIGSTOP)
    with subprocess.Popen(["sh", "-c", f"sleep 10; kill -CONT {store.master.pid}"]):
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="see whether the master and the store's other processes"):
            tier.shutdown(2.0)
        assert time.monotonic() - begin < 6.0
    tier.shutdown(PATIENCE_S)


def test_k1_a_wrong_address_is_told_at_the_start_with_what_to_do(make):
    (port,) = free_ports(1)
    told = (
        f"tier 'one' (kvtier-mooncake): nothing answers at 127.0.0.1:{port}: [Errno 111] Connection refused; "
        "start it, or correct master_server_address"
    )
    with pytest.raises(TierOpenError, match=re.escape(told)):
        make(f"127.0.0.1:{port}")


def test_k1_a_metadata_server_that_is_not_there_is_told_at_the_start(store, make):
    (port,) = free_ports(1)
    with pytest.raises(
        TierOpenError, match=rf"nothing answers at 127\.0\.0\.1:{port}: .*correct metadata_server"
    ):
        make(store.address, metadata_server=f"http://127.0.0.1:{port}/metadata")


_WHILE_IT_OPENS = """
import sys, threading
from kvtier_core import TierOpenError
from kvtier_mooncake import MooncakeSettings, client
from kvtier_mooncake.client import Client, Region

client._TRIAL_S = 5.0
settings = MooncakeSettings(type="x", master_server_address=sys.argv[1])
said = []

def open_it():
    try:
        Client(settings, "far", Region(0, 0))
    except TierOpenError as error:
        said.append(str(error))

thread = threading.Thread(target=open_it, daemon=True)
thread.start()
turns = 0
while thread.is_alive():
    thread.join(0.1)
    turns += 1
print(turns, *said)
"""


def open_in_a_process(address):
    """How many turns another thread had meanwhile, and what was said."""
    command = (sys.executable, "-c", _WHILE_IT_OPENS, address)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    turns, _, said = done.stdout.strip().partition(" ")
    return int(turns), said


def test_i19_what_listens_and_is_no_master_is_told_and_nothing_stands_still():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        turns, said = open_in_a_process(address)
    assert turns > 10
    assert f"what listens at {address} has not answered as a Mooncake master does for 5 s" in said


def test_i19_a_master_that_is_stopped_is_told_and_nothing_stands_still(store):
    store.master.send_signal(signal.SIGSTOP)
    turns, said = open_in_a_process(store.address)
    store.master.send_signal(signal.SIGCONT)
    assert turns > 10
    assert "see whether mooncake_master runs there, and is not stopped" in said


@pytest.mark.parametrize("address", ["a..b:50051", f"{'a' * 64}:50051", "a:0", "a:65536", "a:99999"])
def test_i19_an_address_that_cannot_be_meant_is_refused(address):
    with pytest.raises(ValidationError, match=r"must be host:port"):
        MooncakeSettings(type="x", master_server_address=address)
    with pytest.raises(ValidationError, match="must be P2PHANDSHAKE"):
        MooncakeSettings(type="x", master_server_address="a:1", metadata_server=f"http://{address}/metadata")


def test_k4_an_engine_that_may_start_without_it_gets_the_store_when_it_comes(store, make):
    store.end(store.master)
    bench = make(store.address, limits={"open_retry": 0.2})
    assert load(bench, 1) == []
    store.start_master()
    bench.until(lambda: bench.manager.coordinator.state.tiers["one"].serving)
    _come_back(store, bench)
