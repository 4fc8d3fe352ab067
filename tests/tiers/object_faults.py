"""What the object-store tier does about faults: each has one outcome, and none is remembered as absence."""

import os
import time
from collections.abc import Callable
from functools import partial

import pytest

from kvtier_core.errors import TierOpenError
from kvtier_testing.checks import make_rows
from kvtier_testing.tiers import assert_contents
from tests.tiers.fault_proxy import (
    Answer,
    Fault,
    Request,
    cut_body,
    delay,
    flip,
    hang_up,
    lose_answer,
    refuse,
    shorten,
)
from tests.tiers.object_place import (
    A,
    B,
    C,
    ObjectFixtures,
    everything,
    is_pack,
    load,
    make_tier,
    wait_until,
)
from tests.tiers.s3_server import KEY, SECRET

DENIED = refuse(403, "AccessDenied", "Access Denied")
EXPIRED = refuse(
    400, "ExpiredToken", "The provided token has expired.", more=f"<Token-0>{SECRET}-token</Token-0>"
)
SLOW_DOWN = refuse(503, "SlowDown", "Please reduce your request rate.")
TOO_MANY = refuse(429, "TooManyRequests", "Please reduce your request rate.")
NO_BUCKET = refuse(404, "NoSuchBucket", "The specified bucket does not exist")
ELSEWHERE = refuse(400, "AuthorizationHeaderMalformed", "the region 'a' is wrong; expecting 'b'")


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


class ObjectFaults(ObjectFixtures):
    """Give it ``server_port`` of a server with a bucket named ``bucket``."""

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

    def test_i18_packs_that_cannot_be_looked_into_take_room_and_are_found_later(
        self, tier_settings, maker, proxy, warnings
    ):
        make_tier(tier_settings).store_many([A, B], [memoryview(maker.make(key)) for key in (A, B)])
        proxy.fault = on("GET", refuse(500, "InternalError", "We encountered an internal error"))
        size = 2 * maker.row_bytes
        tier = make_tier(tier_settings, capacity=2 * size)
        assert tier.contains([A, B]) == [False, False]
        assert size < tier._table.bytes < size + 400
        proxy.fault = None
        tier.follow()
        tier.follow()
        assert tier.contains([A, B]) == [True, True]
        assert size < tier._table.bytes < size + 400
        assert len([text for text in warnings() if "could be looked into" in text]) == 1
        proxy.fault = on("GET", refuse(500, "InternalError", "We encountered an internal error"))
        other = make_tier(tier_settings, capacity=size + 400)
        other.store(C, memoryview(maker.make(C)))
        assert make_tier(tier_settings)._table.bytes < size

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

    @pytest.mark.usefixtures("quick")
    def test_i18_k5_blocks_that_could_not_be_loaded_are_found_again_without_a_store(
        self, open_tier, maker, proxy
    ):
        rows = make_rows(maker, [A, B])
        tier = open_tier(threads=1)
        tier.store(rows)
        proxy.fault = on("GET", SLOW_DOWN)
        assert tier.load([A, B]).result.failed == (A, B)
        proxy.fault = None
        wait_until(lambda: tier.lookup([A, B]) == [True, True])
        assert_contents(tier, rows)

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

    def test_i18_a_client_that_panics_is_a_fault_like_others(self, tier_settings, maker, proxy):
        tier = make_tier(tier_settings)
        tier.store(A, memoryview(maker.make(A)))
        nonsense = (
            b"<DeleteResult><Error><Key>k</Key><Code>c</Code><Message>m</Message></Error></DeleteResult>"
        )
        proxy.fault = lambda request: (
            (lambda *_: Answer(200, {}, nonsense)) if request.method == "POST" else None
        )
        with pytest.raises(OSError, match="PanicException"):
            tier.remove_namespace()
        proxy.fault = None
        tier.remove_namespace()

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


def _on_listing(fault: Fault, request: Request) -> Fault | None:
    return fault if "list-type" in request.path else None
