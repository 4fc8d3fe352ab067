"""Every architecture in real vLLM: the same answers from the pool and from disk, or a refusal that names the layer."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.vllm.engines import needs_vllm


@needs_vllm
@pytest.mark.timeout(3600)
def test_i17_every_architecture_answers_as_without_connector_or_is_refused_by_the_layers_name():
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.architectures", "--json"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout.splitlines()[-1])["found"]
    outcomes = Counter(outcome for outcome, _ in found.values())
    assert outcomes["fault"] == 0, done.stderr[-3000:]
    assert outcomes["served"] >= 18
