"""What is unsafe is refused when real vLLM starts, by name."""

import pytest

from tests.vllm.engines import EngineError, connector, disk, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


def refusal(start, *arguments, **options):
    with pytest.raises(EngineError) as raised:
        start(*arguments, **options)
    return str(raised.value)


def test_k9_o3_an_unknown_option_ends_the_start_with_the_allowed_names(start, tmp_path):
    said = refusal(start, connector(disk(tmp_path), cpu_bytes_to_use=1))
    assert "kvtier knows no 'cpu_bytes_to_use'" in said
    assert "kvtier_config" in said


def test_k1_o3_a_hash_that_is_not_cryptographic_is_refused_with_a_disk(start, tmp_path):
    said = refusal(start, connector(disk(tmp_path)), prefix_caching_hash_algo="xxhash")
    assert "'xxhash' is not cryptographic" in said
    assert "tier 'disk'" in said


def test_k12_windows_in_larger_blocks_are_refused(start, tmp_path, hybrid_model):
    said = refusal(
        start, connector(disk(tmp_path), blocks_per_chunk=2), model=hybrid_model, num_gpu_blocks_override=100
    )
    assert "blocks_per_chunk = 2 with sliding windows" in said
