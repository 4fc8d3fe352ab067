"""An engine that nobody told of a tier: what it says, and what its metrics show from the first request on."""

import pytest

from kvtier_core.engine import MissReason
from tests.vllm.engines import connector, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def engine(start):
    return start(connector({"pool": {"capacity": "4MiB"}}))


def test_v6_without_a_tier_a_warning_says_that_nothing_survives(engine):
    assert (
        "nothing will be restored from a tier: no tier is configured, and no settings file was given: name one with "
        "kvtier_config or KVTIER_CONFIG"
    ) in engine.log()


def test_v9_every_counter_is_there_at_0_from_the_first_request_on(engine):
    engine.generate([1, 2, 3], max_tokens=1)
    metrics = engine.call("metrics")
    misses = {reason: metrics[f'vllm:kvtier_misses{{"reason": "{reason.value}"}}'] for reason in MissReason}
    assert set(misses.values()) == {0}
    assert metrics['vllm:kvtier_hit_blocks{"source": "pool"}'] == 0
    assert metrics["vllm:kvtier_evicted_blocks"] == 0
