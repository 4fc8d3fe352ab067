"""A prompt that was written once is found again from its beginning, through a real session and a real device (C14)."""

import pytest
import torch

from kvtier_core.proof import row_bytes_for
from kvtier_core.runtime import open_session
from kvtier_core.settings import PoolSettings, Settings
from kvtier_core.transfer import KVLayout
from tests.policies.every import FROM_PLUGINS
from tests.session.toy import PATIENCE_S, TOKENS, namespace_of

PIECE = 16
FIRST_TOKEN = {"first": 1_000_000, "second": 2_000_000}


@pytest.mark.needs_torch
@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_r3_500_and_600_unread_blocks_in_1000_rows_leave_most_of_the_first_prompt(policy):
    layout = KVLayout([torch.zeros(600, TOKENS, 8)])
    capacity = 1000 * row_bytes_for(layout.payload_bytes[0])
    pool = PoolSettings(capacity=capacity, policy=policy, prefault=False)
    settings = Settings(pool=pool, tiers={}, tier_types={}, policies=FROM_PLUGINS)
    with open_session(settings, namespace_of(layout, "0"), layout) as session:
        for name, blocks in (("first", 500), ("second", 600)):
            tokens = [FIRST_TOKEN[name] + position for position in range(blocks * TOKENS)]
            session.begin(name, tokens)
            for end in range(PIECE, blocks + PIECE, PIECE):
                session.computed(name, min(end, blocks) * TOKENS, list(range(blocks)))
                assert session.flush(PATIENCE_S)
            session.end(name)
        session.begin("again", [FIRST_TOKEN["first"] + position for position in range(500 * TOKENS)])
        assert session.wait_matched("again", PATIENCE_S) >= 394 * TOKENS
