"""Real vLLM with scheduler and worker in one process: every tier's hit gives the tokens of the plain engine."""

from typing import Any

import pytest

from tests.vllm.engines import BLOCK, connector, disk, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def engine(start, root):
    return start(connector(disk(root)))


def external_hits(engine):
    return engine.call("metrics").get("vllm:external_prefix_cache_hits", 0)


def test_a_prefix_evicted_from_the_device_comes_back_from_the_pool(engine, plain):
    wanted = prompt(1)
    expected = plain.generate(wanted)
    assert engine.store(wanted) == expected
    engine.generate(*[prompt(seed) for seed in (101, 102, 103, 104)])  # more than the device's 40 blocks
    before = external_hits(engine)
    hits = engine.call("books")["hits"].get("pool", 0)
    assert engine.generate(wanted) == expected
    assert external_hits(engine) == before + 10 * BLOCK
    assert engine.call("books")["hits"]["pool"] == hits + 10


def test_c02_requests_with_other_salts_share_no_block(engine, plain):
    wanted = prompt(35)
    expected = plain.generate(wanted)
    assert engine.generate(wanted, salt="one tenant") == expected
    engine.call("settle")
    before = external_hits(engine)
    assert engine.call("reset", connector=True)
    for salt in ("another", None):
        assert engine.generate(wanted, salt=salt) == expected
        assert external_hits(engine) == before
    assert engine.generate(wanted, salt="one tenant") == expected
    assert external_hits(engine) == before + 10 * BLOCK


def test_c34_a_prefix_dropped_from_device_and_pool_comes_back_from_the_disk(engine, plain):
    wanted = prompt(2)
    expected = plain.generate(wanted)
    assert engine.store(wanted) == expected
    engine.call("settle")
    hits = engine.call("books")["hits"].get("disk", 0)
    before = external_hits(engine)
    assert engine.call("reset", connector=True)
    assert engine.generate(wanted) == expected
    assert external_hits(engine) == before + 10 * BLOCK
    assert engine.call("books")["hits"]["disk"] == hits + 10


def test_k12_o4_a_prompt_of_whole_blocks_leaves_a_token_to_compute(engine, plain):
    wanted = prompt(3, blocks=4, extra=0)
    expected = plain.generate(wanted)
    assert engine.store(wanted) == expected
    assert engine.call("reset")
    assert engine.generate(wanted) == expected
    assert engine.generate(wanted) == expected
    longer = [*wanted, *prompt(4, blocks=1)]
    assert engine.generate(longer) == plain.generate(longer)


def test_c10_two_requests_that_share_a_prefix_share_its_blocks(engine, plain):
    shared = prompt(5, blocks=8, extra=0)
    wanted = [[*shared, *prompt(seed, blocks=1)] for seed in (6, 7, 8)]
    expected = plain.generate(*wanted)
    engine.store(wanted[0])
    assert engine.call("reset", connector=True)
    assert engine.generate(*wanted) == expected


def test_c13_nothing_is_pinned_or_leased_when_all_is_quiet(engine):
    engine.store(prompt(9))
    books = engine.call("settle")
    assert books["pins"] == books["leases"] == books["jobs"] == books["detached"] == 0


def test_k4_o2_a_preempted_request_gives_the_same_tokens(engine, plain):
    # Six requests of 6 blocks and 3 to come do not fit into 40 device blocks together.
    wanted = [prompt(seed, blocks=5) for seed in range(10, 16)]
    expected = plain.generate(*wanted, max_tokens=96)
    assert engine.generate(*wanted, max_tokens=96) == expected
    assert engine.call("metrics")["vllm:num_preemptions"] > 0


def test_k4_o2_requests_that_a_reset_preempts_load_what_the_pool_has_kept(engine, plain):
    wanted = [{"prompt": prompt(50), "max_tokens": 4}, {"prompt": prompt(51), "max_tokens": 40}]
    expected = plain.call("soak", requests=wanted, at_once=2, aborts={}, resets=[])
    before = external_hits(engine)
    # The device's cache alone is reset, while the second one runs: vLLM can't load in the step that tells of it.
    for often in (1, 3):
        resets = [{"after": 1, "connector": False}] * often
        said = engine.call("soak", requests=wanted, at_once=2, aborts={}, resets=resets)
        assert said == expected
    assert external_hits(engine) > before


@pytest.mark.parametrize("every", [3, 5])
def test_v2_c04_requests_that_resets_preempt_again_and_again_never_load_in_the_step_that_tells_of_it(
    engine, plain, every
):
    shared = [prompt(60 + number, blocks=8, extra=0) for number in range(2)]
    requests = [
        {"prompt": [*shared[number % 2], *prompt(70 + number, blocks=0)], "max_tokens": 60}
        for number in range(4)
    ]
    expected = plain.call("soak", requests=requests, at_once=4, aborts={}, resets=[])
    resets = [{"after": 0, "later": every, "connector": False}] * 30
    for _ in range(3):
        assert engine.call("soak", requests=requests, at_once=4, aborts={}, resets=resets) == expected
    assert engine.call("books")["resets"]["running=True connector=False busy"] >= 20


def test_c60_hits_are_told_by_tier_on_vllms_endpoint(engine):
    names = [
        'vllm:kvtier_hit_blocks{"source": "disk"}',
        'vllm:kvtier_tier_stored_blocks{"tier": "disk"}',
        'vllm:prompt_tokens_cached_by_source{"source": "disk"}',
    ]
    wanted = prompt(30)
    engine.store(wanted)
    engine.call("settle")
    before = engine.call("metrics")
    assert engine.call("reset", connector=True)
    engine.generate(wanted)
    engine.generate([1, 2, 3])
    after = engine.call("metrics")
    grown = [after[name] - before.get(name, 0) for name in names]
    assert grown[0] == 10
    assert grown[1] >= 0
    assert grown[2] == 10 * BLOCK
    assert after['vllm:kvtier_tier_serving{"tier": "disk"}'] == 1
    assert after["vllm:kvtier_pool_rows"] > 0


def test_c27_a_request_loads_from_the_tiers_it_allows(engine, plain):
    wanted = prompt(31)
    expected = plain.generate(wanted)
    engine.store(wanted)
    engine.call("settle")
    before = external_hits(engine)
    for tiers, hits in (([], 0), ([{"medium": "CPU"}], 0), ([{"medium": "STORAGE"}], 10)):
        assert engine.call("reset", connector=True)
        assert engine.generate(wanted, params={"kv_load_tiers": tiers}) == expected
        assert external_hits(engine) - before == hits * BLOCK


def test_k7_o1_a_new_engine_finds_what_an_earlier_one_stored(start, engine, root, plain):
    wanted = prompt(20)
    engine.store(wanted)
    engine.call("settle")
    later = start(connector(disk(root)))
    assert later.generate(wanted) == plain.generate(wanted)
    assert later.call("books")["hits"] == {"disk": 10}
    assert later.close() == 0


def test_c34_by_default_a_reset_makes_every_tier_miss(start, tmp_path, plain):
    engine = start(connector(disk(tmp_path, on_reset="all")))
    wanted = prompt(21)
    expected = engine.store(wanted)
    engine.call("settle")
    assert engine.call("reset", connector=True)
    before = external_hits(engine)
    assert engine.generate(wanted) == expected == plain.generate(wanted)
    assert external_hits(engine) == before
    engine.close()


def test_c41_a_load_may_start_and_end_in_the_middle_of_a_row(start, tmp_path, plain):
    engine = start(connector(disk(tmp_path), blocks_per_chunk=4))
    wanted = prompt(22, blocks=11)
    expected = plain.generate(wanted)
    assert engine.store(wanted) == expected
    engine.call("settle")
    for connector_too in (False, True):
        assert engine.call("reset", connector=connector_too)
        begins = [*wanted[: 2 * BLOCK], *prompt(23, blocks=1)]
        assert engine.generate(begins) == plain.generate(begins)  # its 2 blocks are in the device now
        before = external_hits(engine)
        assert engine.generate(wanted) == expected
        assert external_hits(engine) - before == 6 * BLOCK  # up to the end of the second row of 4
    engine.close()


def test_c25_a_tier_gets_all_blocks_of_a_request_that_another_node_goes_on_with(engine, plain):
    for seed, params, given in ((24, {"do_remote_decode": True}, 10), (40, None, 0)):
        wanted = prompt(seed)
        expected = plain.generate(wanted)
        only_pool: dict[str, Any] = {"kvtier": {"store_tiers": []}}
        assert engine.generate(wanted, params=only_pool) == expected
        engine.store([4, 5, 6])
        engine.call("settle")
        assert engine.call("reset")
        loaded = external_hits(engine)
        assert engine.generate(wanted, params=params) == expected
        assert external_hits(engine) - loaded == 10 * BLOCK  # nothing of it is computed anew
        engine.store([4, 5, 6])
        hits = engine.call("settle")["hits"].get("disk", 0)
        assert engine.call("reset", connector=True)
        assert engine.generate(wanted) == expected
        assert engine.call("books")["hits"].get("disk", 0) - hits == given


def test_c30_what_a_client_asks_for_wrongly_costs_its_hits_and_nothing_else(engine, plain):
    wanted = prompt(25)
    expected = plain.generate(wanted)
    engine.store(wanted)
    assert engine.call("reset")
    before = external_hits(engine)
    assert engine.generate(wanted, params={"kvtier": {"load_tiers": ["dsik"]}}) == expected
    assert "names 'dsik', but the enabled tiers are 'disk'" in engine.log()
    assert external_hits(engine) == before + 10 * BLOCK  # of the pool, which is no tier
