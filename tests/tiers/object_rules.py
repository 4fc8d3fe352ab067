"""What the object-store tier owes on every server, beside the conformance tests, and what it does about faults."""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from kvtier_core.errors import TierOpenError
from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierContext
from kvtier_fsspec import following
from kvtier_fsspec.object_tier import ObjectTier
from kvtier_fsspec.packs import PackName
from kvtier_testing.checks import make_rows
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.fixtures import NAMESPACE
from kvtier_testing.rows import similar_keys
from kvtier_testing.tiers import TierTests, assert_contents
from tests.tiers.engine import TierEngine
from tests.tiers.fault_proxy import (
    Fault,
    FaultProxy,
    Request,
    cut_body,
    delay,
    flip,
    hang_up,
    lose_answer,
    refuse,
    shorten,
)
from tests.tiers.s3_server import KEY, SECRET, client, options

KEYS = similar_keys(12)
A, B, C, D = KEYS[:4]
BUCKET = "bucket"
DENIED = refuse(403, "AccessDenied", "Access Denied")
EXPIRED = refuse(
    400, "ExpiredToken", "The provided token has expired.", more=f"<Token-0>{SECRET}-token</Token-0>"
)
SLOW_DOWN = refuse(503, "SlowDown", "Please reduce your request rate.")
TOO_MANY = refuse(429, "TooManyRequests", "Please reduce your request rate.")
NO_BUCKET = refuse(404, "NoSuchBucket", "The specified bucket does not exist")
ELSEWHERE = refuse(400, "AuthorizationHeaderMalformed", "the region 'a' is wrong; expecting 'b'")


def is_pack(request: Request) -> bool:
    return "/packs/" in request.path and "list-type" not in request.path


def on(method: str, fault: Fault, times: int | None = None) -> Callable[[Request], Fault | None]:
    """The fault for requests of that method for packs: always, or so many times."""
    left = [times]

    def choose(request: Request) -> Fault | None:
        if request.method != method or not is_pack(request) or left[0] == 0:
            return None
        if left[0] is not None:
            left[0] -= 1
        return fault

    return choose


def everything(fault: Fault) -> Callable[[Request], Fault | None]:
    return lambda _request: fault


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up, "it never came"
        time.sleep(0.01)


class Witness:
    """An independent look at what is below a URL, and damage to it."""

    def __init__(self, port: int, url: str) -> None:
        self._client = client(port)
        self._root = url.removeprefix(f"s3://{BUCKET}/")

    def close(self) -> None:
        self._client.close()

    def names(self, folder: str = f"{NAMESPACE}/packs") -> list[str]:
        prefix = f"{self._root}/{folder}/"
        answer = self._client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"].removeprefix(prefix) for item in answer.get("Contents", ())]

    def packs(self) -> list[str]:
        """Those with blocks in them."""
        return [name for name in self.names() if PackName.read(name).blocks]

    def blocks(self) -> list[int]:
        """One entry for each block that there is."""
        return [number for name in self.packs() for number in range(PackName.read(name).blocks)]

    def get(self, path: str) -> bytes:
        content: bytes = self._client.get_object(Bucket=BUCKET, Key=f"{self._root}/{path}")["Body"].read()
        return content

    def put(self, path: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"{self._root}/{path}", Body=content)

    def remove(self, path: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=f"{self._root}/{path}")


class ObjectTests(TierTests):
    """Give it ``server_port`` of a server with a bucket named ``bucket``."""

    full_rounds = 4

    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return ObjectTier

    @pytest.fixture
    def url(self):
        return f"s3://{BUCKET}/{secrets.token_hex(8)}"

    @pytest.fixture
    def proxy(self, server_port):
        proxy = FaultProxy(server_port)
        yield proxy
        proxy.stop()

    @pytest.fixture
    def tier_settings(self, proxy, url):
        return {"url": url, "storage_options": options(proxy.port)}

    @pytest.fixture
    def witness(self, server_port, url):
        witness = Witness(server_port, url)
        yield witness
        witness.close()

    @pytest.fixture
    def quick(self, monkeypatch):
        """Engines look at the bucket all the time."""
        monkeypatch.setattr(ObjectTier, "follow_interval", 0.02)

    # Packs.

    def test_i18_blocks_of_one_store_are_one_object_of_rows_and_their_index(self, open_tier, maker, witness):
        rows = make_rows(maker, KEYS)
        with open_tier(threads=1) as tier:
            assert tier.store(rows).error is None
            assert_contents(tier, rows)
        (name,) = witness.packs()
        content = witness.get(f"{NAMESPACE}/packs/{name}")
        assert content.startswith(b"".join(rows.values()))
        read = PackName.read(name)
        assert (read.blocks, len(content)) == (len(KEYS), read.bytes(maker.row_bytes))

    def test_i18_neighbours_are_read_in_one_request(self, open_tier, maker, proxy):
        rows = make_rows(maker, KEYS)
        tier = open_tier(threads=1)
        tier.store(rows)
        proxy.requests.clear()
        assert tier.load(KEYS[2:9]).rows == make_rows(maker, KEYS[2:9])
        assert (
            len([request for request in proxy.requests if request.method == "GET" and is_pack(request)]) == 1
        )

    @pytest.mark.usefixtures("quick")
    def test_i18_s10_what_another_engine_stores_is_found_by_following(self, open_tier, maker):
        rows = make_rows(maker, KEYS)
        one, other = open_tier(), open_tier()
        one.store(rows)
        wait_until(lambda: other.lookup(KEYS) == [True] * len(KEYS))
        assert_contents(other, rows)

    @pytest.mark.usefixtures("quick")
    def test_i18_of_many_packs_the_newest_are_listed_and_found(self, open_tier, maker, proxy, monkeypatch):
        monkeypatch.setattr(following, "_FEW", 0)
        one, other = open_tier(), open_tier()
        wait_until(lambda: any("start-after" in request.path for request in proxy.requests))
        for number in range(3):
            rows = make_rows(maker, KEYS[4 * number : 4 * number + 4])
            one.store(rows)
            wait_until(partial(_has, other, list(rows)))
        assert_contents(other, make_rows(maker, KEYS))

    def test_i18_s2_a_lookup_makes_no_request(self, open_tier, maker, proxy, monkeypatch):
        monkeypatch.setattr(ObjectTier, "follow_interval", 3600.0)
        open_tier().store(make_rows(maker, KEYS[:6]))
        tier = open_tier()
        proxy.fault = everything(hang_up)
        assert tier.lookup(KEYS) == [True] * 6 + [False] * 6
        assert tier.backend.resident() is not None, "the engine's thread reads it"

    def test_s9_a_start_asks_for_packs_and_not_for_blocks(self, open_tier, maker, proxy):
        many = similar_keys(200)
        with open_tier(threads=1) as tier:
            tier.store(make_rows(maker, many))
        proxy.requests.clear()
        with open_tier() as tier:
            assert tier.lookup(many) == [True] * 200
        assert len(proxy.requests) < 20

    @pytest.mark.usefixtures("quick")
    def test_s11_what_another_engine_stored_is_not_stored_again(self, open_tier, maker, witness):
        rows = make_rows(maker, KEYS)
        one, other = open_tier(), open_tier()
        one.store(rows)
        wait_until(lambda: other.lookup(KEYS) == [True] * len(KEYS))
        before = witness.packs()
        assert other.store(rows).held == tuple(KEYS)
        assert witness.packs() == before

    def test_i18_removed_blocks_are_gone_for_all_and_can_be_stored_again(self, tier_settings, maker):
        one = make_tier(tier_settings)
        one.store_many(KEYS, [memoryview(maker.make(key)) for key in KEYS])
        one.delete([A, B])
        other = make_tier(tier_settings)
        assert other.contains(KEYS) == [False] * 2 + [True] * 10
        other.store(A, memoryview(maker.make(A)))
        again = make_tier(tier_settings)
        assert again.contains([A, B, C]) == [True, False, True]
        assert load(again, A) == maker.make(A)

    def test_i18_objects_of_the_first_version_are_no_blocks_and_stay(self, open_tier, maker, witness):
        path = f"{NAMESPACE}/{A.hex()[:2]}/{A.hex()}.kv"
        witness.put(path, maker.make(A))
        tier = open_tier()
        assert_contents(tier, {}, absent=[A])
        tier.store(make_rows(maker, [A]))
        assert_contents(tier, make_rows(maker, [A]), absent=[B])
        assert witness.get(path) == maker.make(A)

    # Damage.

    @pytest.mark.parametrize(
        "damage", [lambda index: index[:-1] + b"?", lambda _index: b"", lambda index: index[1:]]
    )
    def test_i18_k2_a_pack_with_a_damaged_index_is_not_served(
        self, open_tier, maker, witness, warnings, damage
    ):
        with open_tier(threads=1) as tier:
            tier.store(make_rows(maker, [A, B]))
            (name,) = witness.packs()
            tier.store(make_rows(maker, [C]))
        path = f"{NAMESPACE}/packs/{name}"
        content = witness.get(path)
        size = 2 * maker.row_bytes
        witness.put(path, content[:size] + damage(content[size:]))
        with open_tier() as tier:
            assert_contents(tier, make_rows(maker, [C]), absent=[A, B])
            assert tier.store(make_rows(maker, [A, B])).error is None
            assert_contents(tier, make_rows(maker, [A, B, C]))
        assert len([text for text in warnings() if "is damaged" in text]) <= 1

    def test_i18_k2_a_pack_that_became_shorter_gives_no_wrong_bytes(self, open_tier, maker, witness):
        tier = open_tier(threads=1)
        tier.store(make_rows(maker, [A, B]))
        (name,) = witness.packs()
        witness.put(f"{NAMESPACE}/packs/{name}", maker.make(A) + maker.make(B)[:4000])
        loaded = tier.load([A, B])
        assert set(loaded.result.failed) >= {B}
        assert all(row == maker.make(key) for key, row in loaded.rows.items())

    def test_s7_blocks_found_wrong_are_stored_over(self, open_tier, maker, witness):
        rows = make_rows(maker, [A, B])
        tier = open_tier(threads=1)
        tier.store(rows)
        (name,) = witness.packs()
        path = f"{NAMESPACE}/packs/{name}"
        content = bytearray(witness.get(path))
        content[100] ^= 1
        witness.put(path, bytes(content))
        assert not maker.proves(A, tier.load([A]).rows[A])
        tier.discard([A])
        assert tier.store(rows).error is None
        assert_contents(tier, rows)
        assert_contents(open_tier(), rows)

    def test_c33_packs_removed_by_others_are_misses(self, open_tier, maker, witness):
        rows = make_rows(maker, [A, B])
        tier = open_tier(threads=1)
        tier.store(rows)
        (name,) = witness.packs()
        witness.remove(f"{NAMESPACE}/packs/{name}")
        loaded = tier.load([A, B])
        assert (loaded.result.error, loaded.result.missing) == (None, (A, B))
        assert tier.store(rows).error is None
        assert_contents(tier, rows)

    # Room.

    def test_i18_c13_the_capacity_is_kept_and_what_was_used_stays(self, tier_settings, maker, witness):
        tier = make_tier(tier_settings, capacity=10 * (maker.row_bytes + 200))
        tier.store(A, memoryview(maker.make(A)))
        for number, key in enumerate(similar_keys(30, seed=2)):
            tier.store(key, memoryview(maker.make(key)))
            assert len(witness.packs()) == min(10, number + 2)
            age(tier, minutes=2)
            tier.touch([A])
        assert load(tier, A) == maker.make(A)
        assert make_tier(tier_settings).contains([A]) == [True]

    def test_i18_c13_a_store_of_more_than_the_capacity_stays_within_it(self, tier_settings, maker, witness):
        tier = make_tier(tier_settings, capacity=17 * (maker.row_bytes + 100))
        many = similar_keys(100)
        assert tier.store_many(many, [memoryview(maker.make(key)) for key in many]) == [True] * 100
        assert 12 < len(witness.blocks()) <= 17
        assert tier.contains(many).count(True) == len(witness.blocks())

    @pytest.mark.usefixtures("quick")
    def test_i18_one_capacity_holds_for_several_engines(self, open_tier, maker, witness):
        engines = [open_tier(capacity_blocks=11, threads=1) for _ in range(2)]
        for round_ in range(6):
            for engine in engines:
                keys = similar_keys(5, seed=100 * round_ + engines.index(engine))
                assert engine.store(make_rows(maker, keys)).error is None
                for other in engines:
                    wait_until(partial(_has, other, keys))
                assert len(witness.blocks()) <= 11

    def test_i18_ttl_ends_the_life_of_a_pack(self, tier_settings, maker, witness):
        tier = make_tier({**tier_settings, "ttl": "100s"})
        tier.store(A, memoryview(maker.make(A)))
        tier.follow()
        assert tier.contains([A]) == [True]
        old = PackName.of(
            int((time.time() - 101) * 1000), "0" * 8, 1, len(witness.get(_only(witness))) - 8192
        )
        witness.put(f"{NAMESPACE}/packs/{old.text}", witness.get(_only(witness)))
        witness.remove(_only(witness, but=old.text))
        other = make_tier({**tier_settings, "ttl": "100s"})
        other.follow()
        assert other.contains([A]) == [False]
        assert witness.packs() == []

    def test_b3_c13_what_nobody_uses_counts_and_leaves_first(self, tier_settings, witness):
        names = []
        for _ in range(3):
            with TierEngine(ObjectTier, weights=None, capacity="24KiB", threads=1, **tier_settings) as engine:
                names.append(engine.namespace)
                for number in range(5):
                    engine.store(f"s{number}", KEYS[number : number + 1])
                assert engine.load("l", KEYS[:5]) == 5
        assert len(witness.names(f"{names[-1]}/packs")) == 5
        assert sum(len(witness.names(f"{name}/packs")) for name in names) <= 6

    def test_remove_namespace_leaves_nothing_of_it_and_all_of_others(self, tier_settings, maker, witness):
        mine, theirs = make_tier(tier_settings), make_tier(tier_settings, namespace="theirs")
        for tier in (mine, theirs):
            tier.store(A, memoryview(maker.make(A)))
        mine.remove_namespace()
        mine.remove_namespace()
        assert witness.names(NAMESPACE) == []
        assert (mine.contains([A]), theirs.contains([A])) == ([False], [True])
        mine.follow()
        mine.close()
        assert witness.names(NAMESPACE) == []

    # Opening.

    @pytest.mark.parametrize(
        ("fault", "says", "advises"),
        [
            (NO_BUCKET, "bucket does not exist", "create the bucket"),
            (DENIED, "AccessDenied: Access Denied", "check the credentials"),
            (EXPIRED, "ExpiredToken: The provided token has expired", "check the credentials"),
            (ELSEWHERE, "the region 'a' is wrong", "set region"),
            (SLOW_DOWN, "SlowDown", "check url"),
        ],
    )
    def test_i18_a_server_that_refuses_is_told_with_what_to_do(self, open_tier, proxy, fault, says, advises):
        proxy.fault = everything(fault)
        with pytest.raises(TierOpenError) as caught:
            open_tier()
        text = str(caught.value)
        assert says in text
        assert advises in text
        assert not [secret for secret in (KEY, SECRET) if secret in text]

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"endpoint_url": "nonsense"}, "no URL such as.*correct url or storage_options"),
            ({"endpoint_ur": "http://127.0.0.1:1"}, "endpoint_ur.*correct url or storage_options"),
            ({"endpoint_url": "http://127.0.0.1:1"}, "127.0.0.1:1: .*refused.*check that the server runs"),
            (
                {"endpoint_url": "http://no.such.host.invalid:1"},
                "no.such.host.invalid.*check that the server",
            ),
        ],
    )
    def test_i18_options_that_lead_nowhere_are_told(self, tier_settings, change, says):
        settings = {**tier_settings, "storage_options": {**tier_settings["storage_options"], **change}}
        with pytest.raises(TierOpenError, match=f"(?i){says}") as caught:
            make_tier(settings)
        assert SECRET not in str(caught.value)

    def test_b10_a_bucket_that_can_only_be_read_is_read_and_given_nothing(
        self, open_tier, maker, proxy, warnings
    ):
        rows = make_rows(maker, [A, B])
        with open_tier() as tier:
            tier.store(rows)
        proxy.fault = lambda request: DENIED if request.method in ("PUT", "POST", "DELETE") else None
        tier = open_tier()
        assert_contents(tier, rows, absent=[C])
        assert tier.store(make_rows(maker, [C])).missing == (C,)
        (told,) = [text for text in warnings() if "can't be written" in text]
        assert "nothing is stored" in told

    # Faults on the way. None of them is remembered as absence.

    @pytest.mark.parametrize("fault", [DENIED, EXPIRED, NO_BUCKET, SLOW_DOWN, hang_up, cut_body, shorten])
    def test_i18_a_load_that_goes_wrong_fails_and_works_again(self, open_tier, maker, proxy, fault):
        rows = make_rows(maker, [A, B])
        tier = open_tier(threads=1)
        tier.store(rows)
        proxy.fault = on("GET", fault)
        loaded = tier.load([A, B]).result
        assert (loaded.failed, loaded.missing) == ((A, B), ())
        assert SECRET not in str(loaded.error)
        proxy.fault = None
        tier.store(rows)  # a block that could not be had is stored over
        assert_contents(tier, rows)
        assert_contents(open_tier(), rows)

    @pytest.mark.parametrize("fault", [SLOW_DOWN, TOO_MANY, hang_up, cut_body])
    def test_i18_a_load_that_goes_wrong_once_is_tried_again(self, open_tier, maker, proxy, fault):
        rows = make_rows(maker, [A, B])
        tier = open_tier(threads=1)
        tier.store(rows)
        proxy.fault = on("GET", fault, times=1)
        assert tier.load([A, B]).rows == rows

    @pytest.mark.parametrize("fault", [DENIED, EXPIRED, NO_BUCKET, SLOW_DOWN, hang_up])
    def test_i18_a_store_that_goes_wrong_fails_and_publishes_nothing(
        self, open_tier, maker, proxy, witness, fault
    ):
        rows = make_rows(maker, [A, B])
        tier = open_tier(threads=1)
        proxy.fault = on("PUT", fault)
        stored = tier.store(rows)
        assert stored.failed == (A, B)
        assert SECRET not in str(stored.error)
        proxy.fault = None
        assert witness.packs() == []
        assert tier.lookup([A, B]) == [False, False]
        assert tier.store(rows).error is None
        assert_contents(tier, rows)

    @pytest.mark.usefixtures("quick")
    def test_i18_a_store_whose_answer_is_lost_is_whole_or_absent(self, open_tier, maker, proxy):
        rows = make_rows(maker, [A, B])
        tier = open_tier(threads=1)
        proxy.fault = on("PUT", lose_answer)
        tier.store(rows)
        proxy.fault = None
        wait_until(lambda: tier.lookup([A, B]) == [True, True])
        assert_contents(tier, rows)

    def test_i18_flipped_bytes_prove_nothing(self, open_tier, maker, proxy):
        tier = open_tier(threads=1)
        tier.store(make_rows(maker, [A]))
        proxy.fault = on("GET", flip)
        assert not maker.proves(A, tier.load([A]).rows[A]), "the core counts it as damaged"

    def test_i18_a_server_that_answers_late_holds_up_one_load(self, open_tier, maker, proxy):
        rows = make_rows(maker, [A, B])
        tier = open_tier(threads=1)
        tier.store(rows)
        proxy.fault = on("GET", delay(10.0, proxy), times=1)
        begin = time.monotonic()
        assert tier.load([A, B]).rows == rows
        assert time.monotonic() - begin >= 9.0

    def test_i18_a_server_that_never_answers_ends_within_the_deadline(self, open_tier, maker, proxy):
        tier = open_tier(threads=1, limits={"load_timeout": 4.0})
        tier.store(make_rows(maker, [A]))
        proxy.fault = on("GET", delay(3600.0, proxy))
        loaded = tier.load([A]).result
        assert loaded.failed == (A,)
        assert "timed out" in str(loaded.error).lower() or "error sending request" in str(loaded.error)

    @pytest.mark.usefixtures("quick")
    def test_i18_a_look_that_goes_wrong_removes_nothing(self, open_tier, maker, proxy):
        rows = make_rows(maker, [A, B])
        tier = open_tier(threads=1)
        tier.store(rows)
        for fault in (NO_BUCKET, DENIED, hang_up):
            proxy.fault = partial(_on_listing, fault)
            proxy.requests.clear()
            wait_until(lambda: len(proxy.requests) > 5)
            assert tier.lookup([A, B]) == [True, True]
        proxy.fault = None
        assert_contents(tier, rows)

    def test_k13_o2_a_forked_child_is_told_and_does_not_hang(self, tier_settings, maker):
        tier = make_tier(tier_settings)
        tier.store(A, memoryview(maker.make(A)))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                load(tier, A)
            except OSError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as said:
            assert "forked process" in said.read()
        os.waitpid(child, 0)
        assert load(tier, A) == maker.make(A)


def _has(tier: TierDriver, keys: Sequence[OffloadKey]) -> bool:
    return tier.lookup(keys) == [True] * len(keys)


def _on_listing(fault: Fault, request: Request) -> Fault | None:
    return fault if "list-type" in request.path else None


def _only(witness: Witness, *, but: str = "") -> str:
    (name,) = [name for name in witness.packs() if name != but]
    return f"{NAMESPACE}/packs/{name}"


def make_tier(
    settings: dict[str, Any],
    *,
    namespace: str = NAMESPACE,
    row_bytes: int = 8192,
    capacity: int | None = None,
) -> ObjectTier:
    """The tier without the core around it, open."""
    context = TierContext(
        name="far",
        namespace=namespace,
        row_bytes=row_bytes,
        description={"namespace": namespace},
        capacity_bytes=capacity,
    )
    tier = ObjectTier(ObjectTier.Settings.model_validate({"type": "fsspec", **settings}), context)
    tier.open()
    return tier


def age(tier: ObjectTier, *, minutes: int) -> None:
    """As if what is there had been used so much earlier."""
    for pack in tier._table._packs.values():
        pack.used -= 60 * minutes


def load(tier: ObjectTier, key: OffloadKey) -> bytes | None:
    into = bytearray(tier.context.row_bytes)
    return bytes(into) if tier.load(key, memoryview(into)) else None
