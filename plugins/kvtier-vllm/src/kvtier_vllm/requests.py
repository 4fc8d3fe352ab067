"""How a request begins, as its client has it: what a client says wrongly costs its own hits and nothing else (C30)."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from vllm.v1.kv_offload.base import ReqContext

from kvtier_core.engine import Hints, OffloadKey, RequestInfo, TierManager, make_offload_key, read_hints
from kvtier_vllm.adapters import KeyName, vllms_own
from kvtier_vllm.order import Asked, Positions

_log = logging.getLogger("kvtier.vllm")


def begin_request(
    tiers: TierManager,
    request_id: str,
    context: ReqContext,
    load_tiers: Sequence[str] | None = None,
    hints: Hints = Hints(),  # noqa: B008 - frozen
) -> RequestInfo:
    """Begin vLLM's request under *request_id*, loading from *load_tiers* alone; a wrong one goes without tiers."""
    info = RequestInfo(request_id=request_id, params=context.kv_transfer_params or {}, hints=hints)
    try:
        tiers.new_request(info, load_tiers=load_tiers)
    except ValueError as error:  # what a client says must not stop the engine
        _log.warning("request %s goes without tiers: %s", context.req_id, error)
        info = replace(info, params={})
        tiers.new_request(info, load_tiers=(), store_tiers=())
    return info


def hints_of(context: ReqContext) -> Hints:
    """What the request's envelope says. Its own version is the transport's, and each action has one."""
    actions = () if context.kv_hints is None else context.kv_hints.actions
    return read_hints([(action.action_type, action.action_version, action.payload) for action in actions])


def keys_of_prompt(
    tiers: TierManager, hashes: Sequence[bytes], tokens_per_hash: int, name: KeyName
) -> Sequence[Sequence[OffloadKey]]:
    """The keys of a prompt in each group, from vLLM's *hashes* of every so many tokens."""
    keys = []
    for group, shape in zip(tiers.namespace.cached_groups, tiers.group_shapes, strict=True):
        step = shape.tokens_per_block // tokens_per_hash
        keys.append(tuple(name(make_offload_key(hashed, group)) for hashed in hashes[step - 1 :: step]))
    return tuple(keys)


def positions_of(context: ReqContext) -> Positions | None:
    """VLLM's own map of a request's keys; ``None`` where it keeps none."""
    return getattr(context, "_offload_key_positions", None)


def keys_asked(tiers: TierManager, request_id: str, context: ReqContext, name: KeyName = vllms_own) -> Asked:
    """The keys of vLLM's request, looked up under *request_id* and the names that *name* gives them."""
    groups = list(tiers.namespace.cached_groups)
    return Asked(positions_of(context), groups, tiers.group_shapes, partial(tiers.lookup, request_id), name)
