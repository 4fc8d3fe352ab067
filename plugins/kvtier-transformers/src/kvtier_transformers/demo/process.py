"""Starts the demo's worker processes and hands on what they tell.

Decides what a worker sees of this process: none of its ``KVTIER_*`` variables, so that the demo runs its own
configuration, and no network for the model libraries. Ends its worker whatever happens.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from typing import Any

from kvtier_core import ConfigError, KvtierError
from kvtier_transformers.demo.legs import Order

_WORKER = "kvtier_transformers.demo.worker"
_CONFIGURATION_STATUS = 2
_TAIL_CHARACTERS = 4000


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    # Where other programs share the cores, torch's threads spinning for one another cost a factor of ten; asleep,
    # they cost nothing that shows. The same for every leg.
    return {"OMP_WAIT_POLICY": "PASSIVE"} | kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_worker(order: Order) -> Generator[dict[str, Any], None, None]:
    """Run one worker to its end, yielding its events.

    Raises ``ConfigError`` with the worker's message when it says what is missing, ``KvtierError`` with the end of its
    stderr when it dies.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as complaints,
        subprocess.Popen(
            [sys.executable, "-m", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=_environment(),
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(order.to_json()))
            process.stdin.close()
            message = None
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "error":
                    message = event["message"]
                else:
                    yield event
            status = process.wait()
        finally:
            process.kill()
        if status == _CONFIGURATION_STATUS and message is not None:
            raise ConfigError(message)
        if status != 0:
            complaints.seek(0)
            raise KvtierError(
                f"the demo's worker ended with status {status}:\n{complaints.read()[-_TAIL_CHARACTERS:]}"
            )
