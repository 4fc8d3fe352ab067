"""Real vLLM with layers that keep a state beside attention: a prompt needs all blocks of the one, one of the other."""

import pytest

from tests.vllm.engines import BLOCK, assert_all_is_over, connector, disk, needs_vllm, prompt
from tests.vllm.models import save_states_model

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]
ROOM = {"num_gpu_blocks_override": 100, "max_num_batched_tokens": BLOCK}
"""Blocks for both groups. vLLM's CPU kernel for Mamba 2 gives no state in the middle of what it computes at once."""


@pytest.fixture(scope="module")
def states_model(tmp_path_factory):
    return save_states_model(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def states_plain(start, states_model):
    return start(model=states_model, **ROOM)


@pytest.fixture(scope="module")
def engine(start, states_model, tmp_path_factory):
    return start(connector(disk(tmp_path_factory.mktemp("root"))), model=states_model, **ROOM)


@pytest.mark.parametrize("extra", [0, 1, 9], ids=["whole blocks", "and a token", "and a rest"])
def test_i17_attention_and_state_come_back_from_pool_and_disk(engine, states_plain, extra):
    wanted = prompt(1 + extra, blocks=8, extra=extra)
    (expected,) = states_plain.generate(wanted)
    assert len(set(expected)) > 2, "the output says nothing"
    assert engine.store(wanted) == [expected]
    engine.call("settle")
    for connector_too, source in ((False, "pool"), (True, "disk")):
        assert engine.call("reset", connector=connector_too)
        hits = engine.call("books")["hits"].get(source, 0)
        [answer] = engine.call("generate", prompts=[wanted])
        assert answer["tokens"] == expected
        # Of whole blocks vLLM computes the last one again: a state is that of a block's end.
        blocks = 8 if extra else 7
        assert answer["cached"] == blocks * BLOCK
        assert engine.call("settle")["hits"][source] - hits == blocks + 1


def test_i17_prompts_that_share_a_beginning_answer_as_without_connector(engine, states_plain):
    begin = prompt(100, blocks=4, extra=0)
    prompts = [[*begin, *prompt(200 + number, blocks=number % 3, extra=5)] for number in range(6)]
    expected = [states_plain.generate(wanted) for wanted in prompts]
    for connector_too in (False, True, True):
        assert [engine.store(wanted) for wanted in prompts] == expected
        engine.call("settle")
        assert engine.call("reset", connector=connector_too)
    assert_all_is_over(engine.call("settle"))
