"""Fingerprints a transformers model: which other models' KV bytes are interchangeable with its own (C02).

Decides what identifies the weights: the hub's commit where there is one, else a digest of the weight files; what is in
memory, since files change; and the configuration that the KV depends on. A model whose origin is unknown gets a
namespace of its own.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from kvtier_core.engine import GroupSpec, Namespace
from kvtier_transformers.cache import DeviceKV
from kvtier_transformers.model_state import config_digest, read_state
from kvtier_transformers.state_bytes import digest_state
from kvtier_weights import digest_weights, list_model_files

LAYOUT = "transformers: by layer K page, V page; page (tokens, kv_heads, head_dim)"
_EDGES_ITEMS = 1024
"""Of each tensor in memory, where the edges of the files are trusted."""
_log = logging.getLogger("kvtier.transformers")


def _origin_digest(model: PreTrainedModel, files: Sequence[Path] | None, *, edges: bool) -> str | None:
    """Of where the model came from, as it is now."""
    if files:
        return digest_weights(files, edges=edges)
    directory = Path(model.name_or_path or "")
    if model.name_or_path and directory.is_dir() and (files := list_model_files(directory)):
        return digest_weights(files, root=directory, edges=edges)
    commit: str | None = getattr(model.config, "_commit_hash", None)
    return commit


def _weights_digest(model: PreTrainedModel, files: Sequence[Path] | None, *, edges: bool) -> str | None:
    state = read_state(model)
    if state.foreign:
        _log.warning(
            "the KV of %s is reused by this engine alone, not after a restart: it runs code that is neither "
            "transformers' nor torch's, which may be other code by then: %s",
            type(model).__name__,
            ", ".join(dict.fromkeys(state.foreign)),
        )
        return None
    origin = _origin_digest(model, files, edges=edges)
    if origin is None:
        return None
    loaded = digest_state(state, most=_EDGES_ITEMS if edges else None)
    return f"{origin}-loaded-{loaded}-config-{config_digest(model.config)}"


def _own_name(model: PreTrainedModel) -> str:
    # A local model stays the same model when its directory moves: the digest tells its weights apart, not the path.
    origin = model.name_or_path or type(model).__name__
    return Path(origin).name if Path(origin).exists() else origin


def namespace_for(
    model: PreTrainedModel,
    kv: DeviceKV,
    *,
    files: Sequence[Path] | None = None,
    name: str | None = None,
    edges: bool = False,
) -> Namespace:
    """The namespace of *model* with its KV in *kv*.

    *files* are the weight files; unset, all files of the directory the model was loaded from, if any. *edges* trusts
    the first and last MiB of each, and a sample of what is in memory. *name* stands in for the model's own name, which
    for a local model is the last part of its path. All of the model's state counts as it is now: a model changed in
    memory is another one, and one that runs code of others shares with nobody.

    Raises ``OSError`` when a weight file can't be read, ``UnsupportedModelError`` when state can't be told. Cost: as
    ``digest_weights``, and 0.1 s of CPU a GiB in memory.
    """
    kind = kv.tensors[0].device.type  # by which the kernels round
    layers = tuple(f"model.layers.{index}.self_attn" for index in range(len(kv.tensors) // 2))
    return Namespace(
        model=name or _own_name(model),
        revision=getattr(model.config, "_commit_hash", None),
        weights_digest=_weights_digest(model, files, edges=edges),
        kv_dtype=str(kv.tensors[0].dtype).removeprefix("torch."),
        tokens_per_block=kv.tokens_per_block,
        groups=(GroupSpec(layers=layers, block_bytes=kv.block_bytes),),
        layout=LAYOUT if kind == "cpu" else f"{LAYOUT}; computed on {kind}",
    )
