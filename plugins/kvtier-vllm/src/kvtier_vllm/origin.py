"""Where vLLM gets a model's weights and code from, and what tells them from any others (C02).

Decides which loaders read nothing but the model's own files. Names no vLLM type: it is given vLLM's configurations.
"""

import logging
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier_weights import changed_since, digest_weights, list_model_files

_log = logging.getLogger("kvtier.vllm")

_COMMIT_DIGITS = 40
_LOADERS_OF_FILES = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
)
"""vLLM's load formats that read the model's directory, or its commit on the hub, and nothing else."""

_ARRIVE_LATER = ("sharded_rdt",)
"""vLLM's backends of weight transfer whose calls return before the weights are there."""


def own_name(model: str) -> str:
    """A local model stays the same model when its directory moves: the digest tells its weights apart, not the path."""
    return Path(model).name if Path(model).exists() else model


def commit_of(revision: object) -> str | None:
    """The commit that a hub revision was resolved to, where it was; vLLM hands on a text that carries it."""
    commit = getattr(revision, "resolved", revision)
    if isinstance(commit, str) and len(commit) == _COMMIT_DIGITS and set(commit) <= set(string.hexdigits):
        return commit
    return None


def weights_elsewhere(model: Any, load: Any) -> str | None:
    """What says that vLLM loads weights from where kvtier does not look; ``None`` where nothing does.

    *model* and *load* are vLLM's ``ModelConfig`` and ``LoadConfig``.
    """
    if load.load_format == "dummy":
        return None  # no weights from anywhere: unknown ones
    if load.load_format not in _LOADERS_OF_FILES:
        return f"load_format = {load.load_format!r}"
    extra = load.model_loader_extra_config
    pattern = extra.get("pattern") if isinstance(extra, Mapping) else None
    if pattern is not None and "/" in pattern:
        return f"pattern = {pattern!r} in model_loader_extra_config"
    if model.model_weights:
        return f"model_weights = {model.model_weights!r}"
    return None


def silent_weights(transfer: Any) -> str | None:
    """What says that weights may arrive between a client's calls; ``None`` where nothing does.

    *transfer* is vLLM's ``WeightTransferConfig``, or ``None``.
    """
    if transfer is None or transfer.backend not in _ARRIVE_LATER:
        return None
    return f"weight_transfer_config with backend = {transfer.backend!r}"


def weights_digest(model: Any, load: Any, *, edges: bool, since_ns: int) -> str | None:
    """What identifies the weights, and the code that comes with them; ``None`` where nothing does.

    Of a local model a digest of all files that count, by their first and last MiB alone with *edges*; of the hub's
    its commit. Files that have changed *since_ns*, when the process began that loaded the weights, may hold others by
    now. Raises and costs as ``digest_weights`` does.
    """
    if load.load_format == "dummy" or weights_elsewhere(model, load) or any(_strangers(model)):
        return None
    path = Path(model.model)
    if not path.exists():
        return commit_of(model.revision)
    root = path if path.is_dir() else None
    files = _with_its_shards(path) if root is None else list_model_files(path)
    digest = digest_weights(files, root=root, edges=edges) if files else None
    if (changed := changed_since(since_ns, path, files)) is None:
        return digest
    _log.warning(
        "no other run will reuse this one's blocks: %s was written or put in its place after the engine's process "
        "began, so that vLLM may have loaded others. Start the engine again, once the model's files are complete",
        changed,
    )
    return None


def _with_its_shards(file: Path) -> list[Path]:
    """*file*, and with ``model-00001-of-00003.gguf`` the other two."""
    stem, separator, count = file.stem.rpartition("-of-")
    begin, dash, number = stem.rpartition("-")
    if not (separator and dash and number.isdigit() and count.isdigit()):
        return [file]
    last = f"-of-{count}{file.suffix}"
    return [
        path
        for path in sorted(file.parent.iterdir())
        if path.name.startswith(f"{begin}-") and path.name.endswith(last)
    ]


def _strangers(model: Any) -> Iterator[bool]:
    """Whether code or weights come from beside the model, where its files and its commit say nothing of them."""
    settings: Mapping[str, Any] = model.hf_config.to_dict()
    if model.trust_remote_code:
        yield model.code_revision is not None and commit_of(model.code_revision) is None
        yield model.hf_config_path is not None
        yield "--" in str(settings.get("auto_map", ""))  # ``repository--module.Class``
    # such as the text_model_id of Ultravox: parts that the hub gives by name, whatever they are today
    yield any(name.endswith("_model_id") and value for name, value in settings.items())
