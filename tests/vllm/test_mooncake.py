"""Prefill and decode in two real vLLMs that run at the same time, with a Mooncake Store between them.

Run where both vLLM and Mooncake are installed.
"""

import pytest

from tests.tiers.mooncake_store import MooncakeStore, is_installed
from tests.vllm.engines import connector, needs_vllm, prompt

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(not is_installed(), reason="needs the package mooncake-transfer-engine-non-cuda"),
    pytest.mark.timeout(1200),
]
BLOCKS = 10


def test_c25_one_engine_prefills_and_another_decodes(start, plain, tmp_path):
    store = MooncakeStore(tmp_path)
    try:
        far = {"type": "mooncake", "master_server_address": store.address}
        transfer = connector({"pool": {"capacity": "4MiB"}, "tiers": {"far": far}})
        prefill, decode = start(transfer), start(transfer)
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
    finally:
        store.stop()
