"""A program: the digests of vLLM's resolved configurations, without an engine. vLLM's options come as JSON lines.

Apart from the tests because vLLM sets up its process for good.
"""

import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints; the answers must stay clean
    from vllm.engine.arg_utils import EngineArgs

    from kvtier_vllm.inspection import read_config_digest

    for line in sys.stdin:
        config = EngineArgs(**json.loads(line)).create_engine_config()
        print(json.dumps(read_config_digest(config)), file=answers, flush=True)


if __name__ == "__main__":
    main()
