"""Which of vLLM's kinds of speculation are served, and which model's weights count, without vLLM."""

from types import SimpleNamespace

import pytest

from kvtier_vllm.speculation import drafter_of, layers_by_first_table, strange_speculation
from tests.vllm.engines import needs_vllm

DRAFTER = object()


def speculative(method="eagle", rejection="standard"):
    return SimpleNamespace(method=method, rejection_sample_method=rejection, draft_model_config=DRAFTER)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"])
def test_v8_a_drafter_that_is_a_model_counts(method):
    assert drafter_of(speculative(method)) is DRAFTER
    assert strange_speculation(speculative(method, "block")) is None


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"])
def test_v8_what_keeps_no_kv_does_not_count(method):
    assert drafter_of(speculative(method)) is None
    assert strange_speculation(speculative(method)) is None


def test_v8_no_speculation_is_nothing_strange():
    assert drafter_of(None) is None
    assert strange_speculation(None) is None


@pytest.mark.parametrize("method", ["custom_class", "extract_hidden_states", "of_a_later_release"])
def test_v8_what_kvtier_does_not_know_is_named(method):
    assert strange_speculation(speculative(method)) == f"method = {method!r}"


def test_v8_what_is_not_lossless_is_named():
    said = strange_speculation(speculative(rejection="synthetic"))
    assert said == "rejection_sample_method = 'synthetic'"


@pytest.mark.parametrize(
    ("method", "has_second_runner", "found"),
    [
        ("draft_model", False, "draft_model."),
        ("draft_model", True, None),
        ("eagle3", False, None),
        ("ngram", False, None),
    ],
)
def test_v8_a_draft_models_layers_are_written_by_the_first_groups_table(method, has_second_runner, found):
    config = SimpleNamespace(speculative_config=speculative(method), use_v2_model_runner=has_second_runner)
    assert layers_by_first_table(config) == found


@needs_vllm
def test_v8_every_method_of_this_release_is_known_or_refused_on_purpose():
    from typing import get_args

    from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

    methods = set(_flat(get_args(SpeculativeMethod))) - set(get_args(MTPModelTypes)) | {"mtp"}
    refused = {method for method in methods if strange_speculation(speculative(method))}
    assert refused == {"custom_class", "extract_hidden_states"}


def _flat(values):
    from typing import get_args

    for value in values:
        yield from [value] if isinstance(value, str) else _flat(get_args(value))
