"""The demo's worker process: loads the model, answers the ordered questions, tells every step on stdout as JSON lines.

Decides how a leg is run and timed. Every process first runs a few tokens through the model without kvtier, so that
the first measured token does not pay for the libraries' own start.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from transformers import DynamicCache

from kvtier_core import KvtierError, load_settings
from kvtier_core.engine import Generation, RequestIdentity, hash_blocks, make_offload_key
from kvtier_transformers.decoding import GreedyDecoder, Progress
from kvtier_transformers.demo.legs import Answer, Leg, Order, OverheadPair, WorkerReport
from kvtier_transformers.demo.manual import make_prompts
from kvtier_transformers.demo.reading import read_vs_raw
from kvtier_transformers.engine import Engine
from kvtier_transformers.models import LoadedModel, find_smollm2, load

_OVERHEAD_TOKENS = 1024
_CHUNK_TOKENS = 512
_WARM_UP_TOKENS = 64
_FLUSH_TIMEOUT_S = 300.0


class _Line:
    """The parent's end of stdout. Nothing else may print there."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def send(self, event: str, **data: Any) -> None:
        self._stream.write(json.dumps({"event": event, **data}) + "\n")
        self._stream.flush()


class _Worker:
    def __init__(self, order: Order, line: _Line) -> None:
        self._order = order
        self._line = line
        self._loaded: LoadedModel = load(find_smollm2())
        self._prompts = make_prompts(self._loaded.tokenizer, order.prefix_tokens)
        self._report = WorkerReport(bytes_per_token=0, integrity_misses=0)

    def run(self) -> None:
        self._plain(self._prompts[0][:_WARM_UP_TOKENS], lambda _tokens: None, answer_tokens=2)
        self._line.send("ready")
        if Leg.PLAIN in self._order.legs:
            for question in self._order.questions:
                self._line.send("started", leg=Leg.PLAIN, question=question)
                generation = self._plain(
                    self._prompts[question], self._tell_tokens, self._order.answer_tokens
                )
                self._answered(Leg.PLAIN, question, generation)
        tier_legs = [leg for leg in self._order.legs if leg is not Leg.PLAIN]
        if tier_legs:
            self._run_tiers(tier_legs)
        if self._order.overhead_pairs:
            self._measure_overhead()
        self._line.send("report", **self._report.to_json())

    def _run_tiers(self, legs: Sequence[Leg]) -> None:
        with self._open_engine() as engine:
            for leg in legs:
                # Only the first question meets empty tiers: after it, the text all questions share is in the pool.
                questions = self._order.questions[:1] if leg is Leg.COLD_TIERS else self._order.questions
                for question in questions:
                    self._line.send("started", leg=leg, question=question)
                    generation = engine.generate(
                        self._prompts[question], max_tokens=self._order.answer_tokens, ignore_eos=True
                    )
                    self._answered(leg, question, generation)
            _flush(engine)
            stats = engine.stats()
            self._report = WorkerReport(
                bytes_per_token=engine.bytes_per_token,
                integrity_misses=sum(tier["integrity_misses"] for tier in stats["tiers"].values()),
            )
        if Leg.DISK in legs and self._order.questions[-1] == len(self._prompts) - 1:
            self._report = replace(
                self._report, disk_read_vs_raw=self._compare_reading(stats["pool"]["row_bytes"])
            )

    def _compare_reading(self, row_bytes: int) -> float | None:
        """The disk tier beside raw reads, for the text that all questions share."""
        settings = load_settings(file=Path(self._order.directory) / "kvtier.toml", environ={})
        (tier,) = settings.tiers
        prompt = self._prompts[0][: self._order.prefix_tokens]
        hashes = hash_blocks(prompt, settings.pool.block_size, RequestIdentity())
        keys = [make_offload_key(block_hash, 0) for block_hash in hashes]
        root = Path(self._order.directory) / "tier"
        return read_vs_raw(settings, tier, root, keys, row_bytes)

    def _open_engine(self) -> Engine:
        return Engine.open(
            self._loaded.model,
            max_tokens=max(map(len, self._prompts)) + self._order.answer_tokens,
            config=Path(self._order.directory) / "kvtier.toml",
            chunk_tokens=_CHUNK_TOKENS,
            files=self._loaded.files,
        )

    def _measure_overhead(self) -> None:
        """Alternate cold runs without and with kvtier, the prompt in the same pieces: it is storing that is compared.

        A first pair pays for memory's first use, and is left out. The prompt is cut: a pair of long ones takes half a
        minute, and what storing costs grows with the tokens as computing does.
        """
        prompt, answer_tokens = self._prompts[0][:_OVERHEAD_TOKENS], self._order.answer_tokens
        with self._open_engine() as engine:
            for pair in range(self._order.overhead_pairs + 1):

                def plain() -> None:
                    self._plain(prompt, self._tell_tokens, answer_tokens, chunk_tokens=_CHUNK_TOKENS)

                def tiers(salt: str = f"overhead-{pair}") -> None:  # under a salt of its own nothing is known
                    engine.generate(prompt, max_tokens=answer_tokens, ignore_eos=True, salt=salt)
                    _flush(engine)

                seconds = {run: _cpu_seconds(run) for run in ((plain, tiers) if pair % 2 else (tiers, plain))}
                if pair:
                    measured = OverheadPair(plain_cpu_s=seconds[plain], tiers_cpu_s=seconds[tiers])
                    self._line.send("pair", **measured.to_json())

    def _plain(
        self, prompt: list[int], progress: Progress, answer_tokens: int, *, chunk_tokens: int | None = None
    ) -> Generation[torch.Tensor]:
        """The same greedy decoding without kvtier.

        The prompt in one pass, as transformers' own ``generate`` has it, unless *chunk_tokens* says otherwise.
        """
        started = time.perf_counter()
        model = self._loaded.model
        decoder = GreedyDecoder(
            model,
            DynamicCache(config=model.config),
            chunk_tokens=chunk_tokens or len(prompt),
            on_progress=progress,
        )
        first_logits = decoder.prefill(prompt)
        token_ids = [int(first_logits.argmax())]
        ttft_s = time.perf_counter() - started
        while len(token_ids) < answer_tokens:
            token_ids.append(int(decoder.step(token_ids[-1]).argmax()))
        return Generation(
            token_ids=tuple(token_ids),
            finish_reason="length",
            prompt_tokens=len(prompt),
            hit_tokens=0,
            hits_by_tier={},
            misses=(),
            ttft_s=ttft_s,
            load_s=0.0,
            seconds=time.perf_counter() - started,
            first_logits=first_logits,
        )

    def _tell_tokens(self, tokens: int) -> None:
        self._line.send("tokens", tokens=tokens)

    def _answered(self, leg: Leg, question: int, generation: Generation[torch.Tensor]) -> None:
        logits_file = f"logits-{os.getpid()}-{leg}-{question}.npy"
        np.save(Path(self._order.directory) / logits_file, generation.first_logits.numpy())
        answer = Answer(
            leg=leg,
            question=question,
            token_ids=generation.token_ids,
            text=str(self._loaded.tokenizer.decode(generation.token_ids, skip_special_tokens=True)),
            prompt_tokens=generation.prompt_tokens,
            ttft_s=generation.ttft_s,
            load_s=generation.load_s,
            hits_by_tier=generation.hits_by_tier,
            logits_file=logits_file,
        )
        self._line.send("answer", **answer.to_json())


def _flush(engine: Engine) -> None:
    if not engine.flush(_FLUSH_TIMEOUT_S):
        raise KvtierError(f"the disk tier did not take all blocks within {_FLUSH_TIMEOUT_S:g} s")


def _cpu_seconds(run: Callable[[], None]) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun


def main() -> int:
    """Read the order from stdin, work, report. A kvtier error is told in one line and ends in status 2."""
    order = Order.from_json(json.load(sys.stdin))
    if order.threads is not None:
        torch.set_num_threads(order.threads)
    line = _Line(sys.stdout)
    sys.stdout = sys.stderr  # whatever a library prints must not end up between the JSON lines
    try:
        _Worker(order, line).run()
    except KvtierError as error:
        line.send("error", message=str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
