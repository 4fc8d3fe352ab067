"""A block that a tier evicted, asked for after a restart, when nobody remembers it."""

from pathlib import Path

import torch

from kvtier_core.proof import row_bytes_for
from kvtier_core.runtime import open_session
from kvtier_core.settings import load_settings
from kvtier_core.transfer import KVLayout
from tests.session.toy import LAYERS, PATIENCE_S, TOKENS, namespace_of

_BLOCKS = 4


def test_r14_c60_what_a_tier_evicted_before_a_restart_is_not_said_to_be_never_stored(tmp_path: Path):
    kv = KVLayout([torch.zeros(8, TOKENS, 8) for _ in range(LAYERS)])
    row_bytes = row_bytes_for(kv.payload_bytes[0])
    file = tmp_path / "kvtier.toml"
    file.write_text(
        f'[pool]\ncapacity = {row_bytes * 64}\n[tiers.disk]\ntype = "disk"\nroot = "{tmp_path}/tier"\n'
        f'layout = "files"\ncapacity = {row_bytes * _BLOCKS}\nmin_free = 0\n'
    )
    settings, namespace = load_settings(file=file, environ={}), namespace_of(kv, "0", "1", "2")
    prompts = [[100 * number + i for i in range(TOKENS + 1)] for number in range(3 * _BLOCKS)]

    with open_session(settings, namespace, kv) as session:
        for number, prompt in enumerate(prompts):
            session.begin(str(number), prompt)
            session.load(str(number), session.wait_matched(str(number), PATIENCE_S), [0, 1])
            session.wait_loaded(str(number), PATIENCE_S)
            session.computed(str(number), len(prompt), [0, 1])
            session.end(str(number))
            assert session.wait_stored(str(number), PATIENCE_S)
            assert session.flush(PATIENCE_S)
        assert session.stats()["tiers"]["disk"]["stored_blocks"] == len(prompts)

    with open_session(settings, namespace, kv) as session:
        session.begin("again", prompts[0])
        assert session.wait_matched("again", PATIENCE_S) == 0
        assert session.explain("again") == [{"from_token": 0, "group": 0, "reason": "not_stored"}]
        session.end("again")
