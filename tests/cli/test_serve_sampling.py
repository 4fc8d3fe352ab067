"""How ``kvtier serve`` draws a token."""

from collections import Counter

import numpy as np
import pytest

from kvtier.serve.sampling import Sampler

LOGITS = np.array([np.log(0.1), np.log(0.5), -np.inf, np.log(0.4)], np.float32)
DRAWS = 4000


def _shares(sampler: Sampler) -> list[float]:
    drawn = Counter(sampler(LOGITS.copy()) for _ in range(DRAWS))
    return [drawn[token] / DRAWS for token in range(len(LOGITS))]


def test_tokens_are_drawn_by_their_share_and_an_impossible_one_never():
    shares = _shares(Sampler(1.0, 1.0, seed=1))
    assert shares == pytest.approx([0.1, 0.5, 0.0, 0.4], abs=0.03)
    assert shares[2] == 0


def test_heat_levels_the_shares_and_cold_leaves_the_likeliest():
    weights = np.sqrt([0.1, 0.5, 0.0, 0.4])
    assert _shares(Sampler(2.0, 1.0, seed=1)) == pytest.approx(list(weights / weights.sum()), abs=0.03)
    assert _shares(Sampler(1e-12, 1.0, seed=1)) == [0, 1, 0, 0]


def test_top_p_keeps_the_fewest_tokens_that_have_that_share():
    assert _shares(Sampler(1.0, 0.0, seed=1)) == [0, 1, 0, 0]
    assert _shares(Sampler(1.0, 0.45, seed=1)) == [0, 1, 0, 0]
    assert _shares(Sampler(1.0, 0.8, seed=1)) == pytest.approx([0, 5 / 9, 0, 4 / 9], abs=0.03)
    assert _shares(Sampler(1.0, 0.95, seed=1)) == pytest.approx([0.1, 0.5, 0.0, 0.4], abs=0.03)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_seed_makes_an_answer_repeatable_and_none_does_not(top_p):
    logits = np.zeros(1000, np.float32)

    def answer(seed: int | None) -> list[int]:
        sampler = Sampler(1.0, top_p, seed)
        return [sampler(logits) for _ in range(20)]

    assert answer(7) == answer(7)
    assert len({tuple(answer(seed)) for seed in (1, 2, None, None)}) == 4
    assert answer(-(1 << 63))
