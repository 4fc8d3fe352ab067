"""What real vLLMs are served with a store behind them: while it is killed and restarted, and from one to another."""

import random
import time
from collections.abc import Callable

from kvtier_testing.driving import PATIENCE_S
from tests.vllm.engines import EngineProcess, assert_all_is_over, prompt

BLOCKS = 10
PROMPTS = 24
"""Of 10 blocks each: more than the engine's device cache and pool hold together."""
PART = 40


def serve_through(
    engine: EngineProcess, plain: EngineProcess, kill: Callable[[], None], restart: Callable[[], None]
) -> None:
    """200 requests in five parts: undisturbed, and with the store killed, restarted, killed and restarted meanwhile.

    All answers are right, and in the end there are hits again.
    """
    right = {seed: plain.generate(prompt(seed, blocks=BLOCKS))[0] for seed in range(PROMPTS)}
    rng = random.Random(1)
    hits = []
    for in_the_middle in (None, kill, restart, kill, restart):
        seeds = [rng.randrange(PROMPTS) for _ in range(PART)]
        requests = [{"prompt": prompt(seed, blocks=BLOCKS), "max_tokens": 8} for seed in seeds]
        engine.send("soak", requests=requests, at_once=4, aborts={}, resets=[])
        if in_the_middle is not None:
            in_the_middle()
        said = [answer["tokens"][0] for answer in engine.read()]
        assert said == [right[seed] for seed in seeds]
        hits.append(engine.call("books")["hits"].get("far", 0))
    assert hits[0] > 0
    give_up = time.monotonic() + 2 * PATIENCE_S
    while engine.call("books")["hits"]["far"] == hits[-1]:
        assert time.monotonic() < give_up, "hits did not come back"
        for seed in range(PROMPTS):
            assert engine.generate(prompt(seed, blocks=BLOCKS)) == [right[seed]]
    assert_all_is_over(engine.call("settle"))


def hand_over(prefill: EngineProcess, decode: EngineProcess, plain: EngineProcess) -> None:
    """The one engine computes prompts, and the other goes on with them from the store, with the same tokens."""
    for seed in (1, 2):
        wanted = prompt(seed, blocks=BLOCKS)
        right = plain.generate(wanted)
        assert prefill.generate(wanted, max_tokens=1, params={"do_remote_decode": True}) == [right[0][:1]]
        prefill.generate([1, 2, 3])  # stores happen in the steps after
        prefill.call("settle")
        assert decode.generate(wanted) == right
        assert decode.call("books")["hits"] == {"far": seed * BLOCKS}
    assert prefill.close() == 0
    assert decode.close() == 0
