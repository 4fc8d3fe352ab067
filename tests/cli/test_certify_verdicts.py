"""What ``kvtier certify`` decides of answers: where prompts are cut, what is near, and the verdict."""

import numpy as np
import pytest

from kvtier.certify.document import least_tokens, make_document
from kvtier.certify.verdicts import Row, difference, judge, make_reference, why_not_certified

BLOCK, VOCAB = 16, 50


def logs(seed, *, shift=0.0):
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) + np.float32(shift)


def reference(*, noise=0.0, control=1.0, dtype="float32"):
    document = make_document(133, BLOCK, VOCAB)
    right = {cut: logs(cut) for cut in document.cuts}
    late = [cut for cut in document.cuts if document.restorable(cut)]
    return make_reference(
        document,
        dtype,
        right,
        {cut: right[cut] + np.float32(noise) for cut in late},
        {cut: right[cut] + np.float32(control) for cut in late},
    )


def answers(of, *, restored=None, wrong=()):
    return {
        cut: (right + np.float32(0.5 if cut in wrong else 0), {"disk": 16} if restored is None else restored)
        for cut, right in of.answers.items()
    }


def test_a_document_is_cut_around_the_ends_of_blocks_and_behind_the_last():
    document = make_document(133, BLOCK, VOCAB)
    assert document.cuts == [15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 133]
    assert [document.restorable(cut) for cut in (15, 16, 17, 128, 129)] == [0, 0, 16, 112, 128]
    assert len(document.token_ids) == 133
    assert make_document(133, BLOCK, VOCAB) == document
    assert max(document.token_ids) < VOCAB


def test_the_shortest_document_has_two_blocks():
    document = make_document(least_tokens(BLOCK), BLOCK, VOCAB)
    assert document.restorable(document.cuts[-1]) == 2 * BLOCK


def test_another_block_differs_in_that_block_alone():
    document = make_document(133, BLOCK, VOCAB)
    other = document.with_other_block(65)
    differ = {
        index for index, (one, two) in enumerate(zip(document.token_ids, other, strict=False)) if one != two
    }
    assert len(other) == 65
    assert differ
    assert differ <= set(range(48, 64))


@pytest.mark.parametrize(
    ("dtype", "verdict"), [("float32", "FAIL"), ("float16", "FAIL"), ("bfloat16", "pass")]
)
def test_a_difference_that_a_coarse_dtype_explains_is_allowed_where_no_noise_was_measured(dtype, verdict):
    one = reference(dtype=dtype)
    found = {
        cut: (right + np.float32(0.19 if cut == 32 else 0), {"disk": 16})
        for cut, right in one.answers.items()
    }
    assert judge("dtype again", one, found).verdict == verdict


def test_the_difference_is_the_largest_and_what_is_no_number_is_infinite():
    one = logs(0)
    other = one.copy()
    other[7] += 2
    assert difference(one, one) == 0
    assert difference(one, other) == pytest.approx(2)
    assert difference(one, one[1:]) == float("inf")
    other[3] = np.nan
    assert difference(one, other) == float("inf")
    masked = one.copy()
    masked[0] = -np.inf
    assert difference(masked, masked) == 0
    assert difference(masked, one) == float("inf")


def test_the_tolerance_is_four_times_the_noise_and_not_less_than_that_of_fp32():
    assert reference().tolerance == 1e-3
    assert reference(noise=0.01).tolerance == pytest.approx(0.04, rel=1e-4)


def test_answers_that_wrong_kv_does_not_change_show_nothing():
    assert reference(noise=0.01, control=0.05).can_tell
    assert not reference(noise=0.01, control=0.03).can_tell


def test_right_answers_with_something_restored_pass():
    right = reference()
    row = judge("pool", right, answers(right))
    assert (row.verdict, row.why, row.difference) == ("pass", "", 0)
    assert row.restored == {"disk": 16 * 14}


def test_a_wrong_answer_fails_and_the_first_is_named():
    right = reference()
    row = judge("restart", right, answers(right, wrong=(65, 129)))
    assert row.verdict == "FAIL"
    assert row.why == "first wrong after 65 tokens, by 0.5: 16 from disk restored, in blocks of 16"
    assert row.difference == pytest.approx(0.5)


def test_nothing_restored_fails_where_something_had_to_be():
    right = reference()
    nothing = answers(right, restored={})
    assert judge("pool", right, nothing).why == "not certified: nothing was restored"
    assert judge("kill", right, nothing, "anything").verdict == "pass"
    assert judge("rope", right, nothing, "nothing").verdict == "pass"
    assert judge("rope", right, answers(right), "nothing").verdict == "FAIL"


def test_fr1_what_only_later_prompts_restore_may_come_from_the_scenario_itself():
    right = reference()
    first, *later = answers(right).items()
    row = judge("restart", right, dict([(first[0], (first[1][0], {})), *later]))
    assert (row.verdict, row.why) == ("FAIL", "not certified: nothing was restored")
    assert row.restored_tokens


def test_what_restored_nothing_at_all_is_not_certified():
    passed = Row(scenario="kill", verdict="pass", restored={"pool": 16})
    empty = Row(scenario="empty tiers", verdict="pass", restored={})
    failed = Row(scenario="restart", verdict="FAIL", why="wrong")
    assert why_not_certified([passed, empty]) is None
    assert why_not_certified([empty]) == "not certified: nothing was restored"
    assert why_not_certified([passed, failed]) == "not certified: 1 of 2 scenarios failed (restart)"
