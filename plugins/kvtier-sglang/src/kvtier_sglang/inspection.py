"""Reads SGLang's resolved arguments and its KV memory in the scheduler's process, and says them as ``EngineFacts``."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.configs.model_config import ModelConfig
from sglang.version import __version__ as sglang_version

from kvtier_core.engine import GroupSpec
from kvtier_core.transfer import KVLayout
from kvtier_sglang.facts import EngineFacts, why_weights_are_unknown
from kvtier_weights import changed_since, digest_weights, list_model_files, process_began_ns

_log = logging.getLogger("kvtier.sglang")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that share the heads of a model, and which of them this one is."""

    group: Any
    """``torch.distributed``'s, on the CPU; ``None`` for one process."""
    rank: int = 0
    size: int = 1


def find_ranks(params: Any) -> Ranks:
    """Those that SGLang's tree keeps in step."""
    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None:
        return Ranks(group=None)
    size = torch.distributed.get_world_size(group=group)
    return Ranks(group=group, rank=torch.distributed.get_rank(group=group), size=size)


def read_facts(
    server_args: Any,
    kv_pool: Any,
    *,
    pools: Sequence[Any],
    layout: KVLayout,
    kv_parts: Sequence[GroupSpec],
    ranks: Ranks,
    has_request_windows: bool = False,
    side_states: Sequence[str] = (),
) -> EngineFacts:
    """The facts of the engine that is being built, whose KV is in *pools*, the parts of *kv_pool*.

    Raises ``OSError`` when a file of the model can't be read.

    Costs as ``digest_weights``.
    """
    groups = namespace_of(type(server_args))
    arguments = {name: resolution_result(server_args, name) for name in groups}
    model = str(arguments["model_path"])
    return EngineFacts(
        model=Path(model).name if Path(model).exists() else model,
        weights_digest=_weights_digest(Path(model), arguments),
        arguments=arguments,
        groups=groups,
        environment={name: value for name, value in os.environ.items() if name.startswith("SGLANG_")},
        parts=(
            f"sglang {sglang_version}",
            f"torch {torch.__version__}",
            *_processor(str(arguments["device"])),
            *_other_plugins(),
        ),
        kv_pool=type(kv_pool).__name__,
        pools=[type(pool).__name__ for pool in pools],
        kv_layout=" ".join(sorted(set(filter(None, map(_layout_of, pools))))),
        kv_dtype=str(kv_pool.dtype).removeprefix("torch."),
        device=layout.device.type,
        is_multimodal=bool(ModelConfig.from_server_args(server_args).is_multimodal),
        is_quantized_kv=any(getattr(pool, "is_quantized_kv_cache", False) for pool in pools),
        has_request_windows=has_request_windows,
        side_states=side_states,
        tokens_per_page=kv_pool.page_size,
        rank=ranks.rank,
        num_ranks=ranks.size,
        kv_parts=kv_parts,
    )


def _layout_of(pool: Any) -> str | None:
    """SGLang's name of the layout of its pages; a pool of states has none."""
    return getattr(pool, "kv_cache_layout", getattr(pool, "layout", None))


def _weights_digest(model: Path, arguments: Mapping[str, object]) -> str | None:
    """What identifies the weights, and the code and settings that come with them; ``None`` where nothing does.

    This process has loaded them. Files that changed after it began may hold others by now.
    """
    why = why_weights_are_unknown(arguments)
    if why is None and not model.is_dir():
        why = f"model_path = {str(model)!r} is no directory of this machine"
    if why is None:
        files = list_model_files(model)
        digest = digest_weights(files, root=model)
        if (changed := changed_since(process_began_ns(), model, files)) is None:
            return digest
        why = f"{changed} was written or put in its place after SGLang's process began"
    _log.warning(
        "no other run will reuse this one's pages: %s, so that kvtier does not see which weights SGLang loads; give a "
        "local directory with the model's files, and start again once they are complete",
        why,
    )
    return None


def _processor(device: str) -> list[str]:
    """What the numbers of a computation on *device* depend on."""
    if device == "cuda":
        return [torch.cuda.get_device_name(), f"CUDA {torch.version.cuda}"]
    return [torch.backends.cpu.get_cpu_capability()]


def _other_plugins() -> list[str]:
    """Plugins that may change what SGLang computes."""
    found = entry_points(group="sglang.srt.plugins")
    return sorted(
        f"plugin {point.name} {point.dist.version if point.dist else 'unknown'}"
        for point in found
        if not point.value.startswith("kvtier_sglang.")
    )
