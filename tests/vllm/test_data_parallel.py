"""Two engines of one server by data parallelism: each has a pool of its own, and they share a disk."""

import json

import pytest

from tests.vllm.engines import connector, disk, needs_vllm, prompt
from tests.vllm.server import Server
from tests.vllm.test_tutorial import save_chat_model

pytestmark = [needs_vllm, pytest.mark.timeout(2400)]


def test_v14_two_engines_answer_right_and_find_their_blocks_after_a_restart(start, tmp_path):
    mine = save_chat_model(tmp_path / "mine")
    size = json.loads((mine / "config.json").read_text())["vocab_size"]
    prompts = [[token % size for token in prompt(seed)] for seed in range(4)]
    right = start(model=mine, enable_prefix_caching=False).generate(*prompts)
    found = []
    for _ in range(2):
        server = Server(mine, tmp_path, connector(disk(tmp_path / "root")), data_parallel_size=2)
        try:
            server.until_it_serves()
            said = [server.ask(wanted) for wanted in prompts]
            assert [tokens for tokens, _ in said] == right
            found.append([blocks for _, blocks in said])
            for _ in range(2):  # both engines store in the steps after
                server.ask([1, 2, 3])
        finally:
            server.close()
    assert found == [[0] * 4, [10] * 4]
