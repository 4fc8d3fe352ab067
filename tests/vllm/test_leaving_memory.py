"""KV memory that vLLM gives up, or uses for something else, after a reset: no copy touches it any more (C36)."""

import pytest

from tests.vllm.engines import assert_all_is_over, connector, disk, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("how", ["reset", "sleep"])
def test_v13_nothing_is_read_or_written_once_the_reset_has_returned(start, tmp_path, plain, how):
    wanted = prompt(1)
    expected = plain.generate(wanted)
    engine = start(connector(disk(tmp_path)), simulated_gpu={"seed": 0})
    assert engine.call("leave_memory", prompt=wanted, how=how) == [True, False]
    assert engine.store(wanted) == expected
    books = engine.call("settle")
    assert_all_is_over(books)
    assert books["hits"] == {}, "vLLM has not heard of the end of those stores"
    assert engine.call("reset")
    assert engine.generate(wanted) == expected
    assert engine.call("books")["hits"] == {"pool": 10}
