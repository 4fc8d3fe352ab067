"""Puts the parts together: settings, plugins, pool, manager and device become an engine session.

The only module that knows all of them. It decides the pool's geometry and turns settings into limits.
"""

import logging
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvtier_core.blocktier import BlockTier
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.errors import ConfigError, PoolError, UnsupportedModelError
from kvtier_core.manager import TierBuild, TierManager
from kvtier_core.manager.blocking import BlockingTier
from kvtier_core.manager.guard import TierIdentity
from kvtier_core.manager.hook_tier import HookTier
from kvtier_core.manager.port import MakePort
from kvtier_core.namespace import Namespace, payload_sizes
from kvtier_core.plugins import TierType, class_of_tier
from kvtier_core.policies import make_policy
from kvtier_core.proof import row_bytes_for
from kvtier_core.session import EngineSession
from kvtier_core.settings import Settings, load_settings
from kvtier_core.settings.fields import find_secrets
from kvtier_core.settings.model import MAX_LOADING, MAX_PINNED
from kvtier_core.tier_settings import TierSettings
from kvtier_core.transfer.choice import open_device
from kvtier_core.transfer.device import Device
from kvtier_core.transfer.numa import cpus_near
from kvtier_core.transfer.pool import Pool, PoolGeometry
from kvtier_core.transfer.rounds import SELF_TEST_JOBS, SelfTestError
from kvtier_core.transfer.waiting import bounded
from kvtier_core.units import exact_size, format_size

if TYPE_CHECKING:
    from kvtier_core.transfer.layout import KVLayout

_TOLD_WASTE = 0.1
_TOLD_WASTE_BYTES = 64 << 20
"""Less is worth no line."""
_CLOSE_S = 1.0
"""For tiers that did open to close again, where another has taken all the time."""
_PREFAULT_S = 3.0
"""A start waits no longer for the pool's memory. The first loads then need not share the processors with that pass.

A GiB takes 0.2 s, and 2.1 s where a virtual machine's host gives the memory at the first touch.
"""

_log = logging.getLogger("kvtier")


def plan_geometry(settings: Settings, namespace: Namespace) -> PoolGeometry:
    """The pool's shape for this model: as many rows as ``[pool] capacity`` holds.

    Every row has room for the largest group's block (C29). Groups that take no part in prefix caching have no rows.
    Raises ``ConfigError`` when not one block fits.
    """
    row_bytes = row_bytes_for(max(payload_sizes(list(namespace.cached_groups.values()))))
    num_rows = settings.pool.capacity // row_bytes
    if num_rows < 1:
        raise ConfigError(
            f"pool.capacity = {format_size(settings.pool.capacity)} is smaller than one block of this model "
            f"({format_size(row_bytes)}): set it to at least {exact_size(row_bytes)}, better to the size of a prompt"
        )
    return PoolGeometry(num_rows=num_rows, row_bytes=row_bytes)


def why_pool_is_wasted(namespace: Namespace, geometry: PoolGeometry) -> str | None:
    """What part of the pool holds no KV and what to do, in one line; ``None`` below a tenth, or below 64 MiB.

    Of blocks of 4 KiB it is a half: each has a row of a multiple of 4096 bytes, which ends in 64 bytes of proof. The
    KV groups count alike. No I/O.
    """
    sizes = payload_sizes(list(namespace.cached_groups.values()))
    waste = 1 - sum(sizes) / len(sizes) / geometry.row_bytes
    pool_bytes = geometry.num_rows * geometry.row_bytes
    if waste < _TOLD_WASTE or waste * pool_bytes < _TOLD_WASTE_BYTES:
        return None
    blocks = " and ".join(f"{size} bytes" for size in sorted(set(sizes)))
    if 1 - max(sizes) / geometry.row_bytes < _TOLD_WASTE:
        advice = "choose block sizes that bring the groups closer together"
    else:
        advice = (
            "let a block hold more tokens, by pool.block_size, or by the engine's own setting where it has one "
            "(vLLM's blocks_per_chunk)"
        )
    return (
        f"{waste:.0%} of the pool ({format_size(int(waste * pool_bytes))} of {format_size(pool_bytes)}) will hold "
        f"padding and proofs instead of KV: blocks of {blocks} lie in rows of {geometry.row_bytes} bytes; {advice}"
    )


def _limits(settings: Settings, num_rows: int) -> PoolLimits:
    return PoolLimits(
        max_promotion_rows=max(1, int(num_rows * settings.pool.max_promotion)),
        max_loading_rows=max(1, int(num_rows * MAX_LOADING)),
        max_cascade_rows=max(1, int(num_rows * settings.pool.max_cascade)),
        max_pinned_rows=int(num_rows * MAX_PINNED),
        store_threshold=settings.pool.store_threshold,
    )


def _port_of(tier_type: TierType, settings: TierSettings) -> MakePort:
    cls = class_of_tier(tier_type, settings)
    if issubclass(cls, BlockTier):
        return partial(BlockingTier, cls, settings)
    return partial(HookTier, lambda context: cls(settings, context))


def lasting_tiers(settings: Settings) -> list[str]:
    """The enabled tiers whose blocks other runs or processes may be given, in the order they are asked. No I/O."""
    tiers = settings.enabled_tiers.items()
    infos = ((name, class_of_tier(settings.tier_types[name], tier).info) for name, tier in tiers)
    return [name for name, info in infos if info.persistent or info.shared]


def why_nothing_lasts(settings: Settings, option: str = "--config") -> str | None:
    """Why no block outlives this process and what to do, in one line; ``None`` where a tier keeps some.

    *option* is what names a settings file where this is read, as ``--config`` does on the command line.
    """
    without = settings.why_without_tiers(option)
    if without is not None:
        return f"nothing will be restored from a tier: {without}"
    if lasting_tiers(settings):
        return None
    names = ", ".join(map(repr, settings.enabled_tiers))
    return (
        f"nothing will be restored after a restart: what {names} holds ends with this process; add a tier that keeps "
        'its blocks, such as one of type "disk"'
    )


def plan_tier(settings: Settings, name: str, row_bytes: int) -> TierBuild:
    """How the configured tier *name* is built for rows of *row_bytes*. No I/O.

    Raises ``ConfigError`` when its capacity is smaller than one row.
    """
    tier = settings.tiers[name]
    tier_type = settings.tier_types[name]
    capacity = tier_type.cls.info.resolve_capacity(tier.capacity)
    if capacity is not None and capacity < row_bytes:
        raise ConfigError(
            f"tiers.{name}.capacity = {format_size(capacity)} is smaller than one block of this model "
            f"({format_size(row_bytes)}): set it to several, at least to those of the longest prompt"
        )
    return TierBuild(
        name=name,
        identity=TierIdentity(
            name=name, type=tier.type, distribution=tier_type.distribution, version=tier_type.version
        ),
        info=class_of_tier(tier_type, tier).info,
        limits=tier.limits,
        store_threshold=tier.store_threshold,
        capacity_bytes=capacity,
        secrets=frozenset(find_secrets([type(tier)], dict(tier))),
        policies=settings.policies,
        make_port=_port_of(tier_type, tier),
    )


def open_manager(
    settings: Settings,
    namespace: Namespace,
    pool: Pool,
    *,
    open_timeout_s: float = 60.0,
    as_one_prefix: bool = False,
) -> TierManager:
    """Open the tiers on *pool*, for an engine that moves blocks between device and pool by itself.

    With *as_one_prefix* the keys of all groups are looked up as one prefix, in the order in which the engine asks: it
    finds the end point itself.

    The pool stays the caller's, to be closed after the manager's ``shutdown``. Raises ``ConfigError``, ``PluginError``
    or ``TierOpenError``; then no tier is left open but one that does not confirm its shutdown, for whose sake the pool
    stays mapped, whoever closes it (C34). Takes at most *open_timeout_s*, and a second more where a tier does not open.
    """
    deadline = time.monotonic() + bounded(open_timeout_s)
    geometry = pool.geometry
    manager = TierManager(
        pool=pool,
        namespace=namespace,
        tiers=[plan_tier(settings, name, geometry.row_bytes) for name in settings.enabled_tiers],
        policy=make_policy(settings.pool.policy, geometry.num_rows, settings.policies),
        limits=_limits(settings, geometry.num_rows),
        reset_tiers=settings.on_reset == "all",
        as_one_prefix=as_one_prefix,
    )
    try:
        if settings.pool.prefault:
            pool.prefault()
        manager.open(open_timeout_s)
        pool.wait_for_prefault(min(_PREFAULT_S, deadline - time.monotonic()))
        if waste := why_pool_is_wasted(namespace, geometry):
            _log.warning("%s", waste)
    except BaseException:
        _shut_down(manager, pool, max(_CLOSE_S, deadline - time.monotonic()))
        raise
    return manager


def _shut_down(manager: TierManager, pool: Pool, timeout_s: float) -> None:
    """End what could not be opened; the pool stays mapped for a tier that does not confirm that it is down."""
    if not manager.shutdown(timeout_s):
        pool.keep()


class EngineParts(NamedTuple):
    """What serves one engine on one device. The device ends first, then the manager, then the pool is closed."""

    manager: TierManager
    device: Device
    pool: Pool


def open_parts(
    settings: Settings | Path | None,
    namespace: Namespace,
    layout: "KVLayout",
    *,
    open_timeout_s: float = 60.0,
) -> EngineParts:
    """Open everything for one engine on one device, whose blocks have keys of the engine's own.

    *settings* may be a path of a TOML file, or ``None`` for the environment and the defaults. *layout* describes the
    engine's KV memory, with one group as in the namespace and a factor of 1. On an accelerator that memory is tested
    (C44): nobody else may use it meanwhile. Raises ``ConfigError``, ``PluginError``, ``PoolError`` (the pool does not
    fit this machine), ``TierOpenError`` or ``UnsupportedModelError`` (the accelerator copies wrong); then nothing is
    left open.
    """
    if not isinstance(settings, Settings):
        settings = load_settings(file=settings)
    if layout.block_size_factor != 1:
        raise ValueError(
            f"a session moves whole blocks, the layout has a factor of {layout.block_size_factor}"
        )
    sizes = payload_sizes(list(namespace.cached_groups.values()))
    if sizes != layout.payload_bytes:
        raise ValueError(
            f"the namespace has groups of {sizes} bytes a block, the layout {layout.payload_bytes}"
        )
    geometry = plan_geometry(settings, namespace)
    try:
        pool = Pool.create(geometry, huge_pages=settings.pool.huge_pages)
    except MemoryError as error:
        raise PoolError(str(error)) from None
    with ExitStack() as on_failure:
        on_failure.callback(pool.close)
        if settings.pool.prefault:
            pool.prefault(cpus_near(layout.device))
        manager = open_manager(settings, namespace, pool, open_timeout_s=open_timeout_s)
        on_failure.callback(_shut_down, manager, pool, open_timeout_s)
        device = open_device(layout, pool, on_finished=manager.notify)
        on_failure.callback(device.shutdown, open_timeout_s)
        if layout.device.type != "cpu":
            _test(device, layout, pool)
            manager.coordinator.skip_jobs(SELF_TEST_JOBS)
        on_failure.pop_all()
    return EngineParts(manager, device, pool)


def open_session(
    settings: Settings | Path | None,
    namespace: Namespace,
    layout: "KVLayout",
    *,
    open_timeout_s: float = 60.0,
) -> EngineSession:
    """``open_parts`` for an engine that gives kvtier the tokens of its requests. Raises as that does."""
    parts = open_parts(settings, namespace, layout, open_timeout_s=open_timeout_s)
    return EngineSession(*parts, namespace.tokens_per_block * namespace.block_size_factor)


def _test(device: Device, layout: "KVLayout", pool: Pool) -> None:
    from kvtier_core.transfer.selftest import self_test  # noqa: PLC0415 - brings in torch

    try:
        report = self_test(device, layout, pool)
    except SelfTestError as error:
        raise UnsupportedModelError(f"kvtier can't serve this engine: {error}") from None
    _log.info("%s passed kvtier's self-test: %s", layout.device, report.describe())
