"""Fingerprints a transformers model: which other models' KV bytes are interchangeable with its own (C02).

Decides what identifies the weights: the hub's commit where there is one, else a digest of the weight files; what is in
memory, since files change; and the configuration that the KV depends on. A model whose origin is unknown gets a
namespace of its own.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from kvtier_core import GroupSpec, Namespace, digest_weights, list_model_files
from kvtier_transformers.cache import DeviceKV
from kvtier_transformers.compat import rope_settings
from kvtier_transformers.parameters import digest_parameters

LAYOUT = "transformers: by layer K page, V page; page (tokens, kv_heads, head_dim)"
_NO_MATTER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Parts of a configuration that can't change the KV of the same weights, or that a namespace says by itself. All others
count: they can be overridden when a model is loaded, and a later release has more of them."""
_EDGES_ITEMS = 1024
"""Of each parameter in memory, where the edges of the files are trusted."""


def _config_digest(config: PretrainedConfig) -> str:
    settings = {name: value for name, value in config.to_dict().items() if name not in _NO_MATTER}
    settings["rope"] = rope_settings(config)
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]


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
    origin = _origin_digest(model, files, edges=edges)
    loaded = digest_parameters(model, most=_EDGES_ITEMS if edges else None)
    if origin is None or loaded is None:
        return None
    return f"{origin}-loaded-{loaded}-config-{_config_digest(model.config)}"


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
    for a local model is the last part of its path. The parameters count as they are now: a model changed in memory is
    another one.

    Raises ``OSError`` when a weight file can't be read. Cost: as ``digest_weights``, and 0.1 s of CPU a GiB in memory.
    """
    layers = tuple(f"model.layers.{index}.self_attn" for index in range(len(kv.tensors) // 2))
    return Namespace(
        model=name or _own_name(model),
        revision=getattr(model.config, "_commit_hash", None),
        weights_digest=_weights_digest(model, files, edges=edges),
        kv_dtype=str(model.dtype).removeprefix("torch."),
        tokens_per_block=kv.tokens_per_block,
        groups=(GroupSpec(layers=layers, block_bytes=kv.block_bytes),),
        layout=LAYOUT,
    )
