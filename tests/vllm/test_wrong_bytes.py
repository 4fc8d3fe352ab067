"""The negative control: these tests would see a wrong byte, and kvtier does."""

import pytest

from tests.vllm.engines import connector, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


def test_c03_changed_bytes_change_the_tokens_and_the_proof_keeps_them_out(start, awkward, plain):
    engine = start(connector(awkward.settings()), environment=awkward.environment)
    wanted = [prompt(seed) for seed in (1, 2)]
    expected = plain.generate(*wanted)
    assert engine.store(*wanted) == expected
    engine.call("settle")

    awkward.give(change=True, blind=True)
    assert engine.call("reset", connector=True)
    (blindly,) = engine.generate(wanted[0])
    assert engine.call("books")["hits"] == {"awkward": 10}
    assert blindly != expected[0], "the output does not depend on the KV: these tests prove nothing"

    awkward.give(change=True)
    assert engine.call("reset", connector=True)
    assert engine.generate(wanted[1]) == expected[1:]
    books = engine.call("books")
    assert books["hits"] == {"awkward": 10}
    assert books["integrity"] == {"awkward": 10}
    assert books["misses"].get("integrity") == 1
    engine.close()
