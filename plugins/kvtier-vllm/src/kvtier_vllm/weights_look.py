"""A look at all weights that a worker holds, to tell whether they are still the same.

Names no vLLM type: it runs in every worker, wherever the weights are.
"""

import hashlib
from itertools import chain
from typing import Any

import torch

_WORD = 8
_WORDS = 8192
"""That make one sum: 64 KiB."""


def look_at_weights(worker: Any) -> str:
    """Stands for every parameter and buffer of the worker's models: names, dtypes, shapes, and a sum of each 64 KiB.

    Of LoRA adapters it has the numbers of those that are loaded: what these hold shows in their files.

    Proof against chance, not against intent. Cost: one pass over the weights, where they are; on a CPU 0.1 s a GiB.
    Raises ``RuntimeError`` or ``TypeError``, as torch does, for weights that have no bits to read.
    """
    models = [worker.get_model()]
    draft = getattr(worker, "get_draft_model", lambda: None)()
    if draft is not None:
        models.append(draft)
    digest = hashlib.sha256()
    if getattr(worker, "lora_config", None) is not None:
        digest.update(f"adapters {sorted(worker.list_loras())}\n".encode())
    with torch.inference_mode():
        for model in models:
            for name, weight in chain(model.named_parameters(), model.named_buffers()):
                digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
                for sums in _sums(weight.detach().reshape(-1)):
                    digest.update(sums.cpu().numpy().data)
    return digest.hexdigest()


def _sums(items: torch.Tensor) -> list[torch.Tensor]:
    """The sums of the items' bits, taken as 64-bit words that may overflow, and the bytes that are left over."""
    if items.storage_offset() * items.element_size() % _WORD:
        items = items.clone()  # words must be aligned
    per_word = max(1, _WORD // items.element_size())
    whole = len(items) - len(items) % (per_word * _WORDS)
    words = items[:whole].view(torch.int64).reshape(-1, _WORDS)  # (sums, _WORDS)
    return [words.sum(1), items[whole:].view(torch.uint8)]
