"""A tier of a configuration: its class and values, and how what was stored in it is removed.

Decides what counts as removed. Never touches a namespace that it is not given.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvtier_core.blocktier import BlockTier, SupportsRemoval, SupportsScan
from kvtier_core.errors import ConfigError
from kvtier_core.keys import OffloadKey
from kvtier_core.manager import TierBuild
from kvtier_core.manager.guard import text_of
from kvtier_core.plugins import class_of_tier
from kvtier_core.runtime import plan_tier
from kvtier_core.settings import Settings
from kvtier_core.settings.fields import find_secrets
from kvtier_core.suggest import did_you_mean
from kvtier_core.values import TierContext
from kvtier_testing.calling import CallThread
from kvtier_testing.driving import TierDriver
from kvtier_testing.rows import RowMaker, similar_keys


class ConfiguredTier:
    """One tier of a configuration. Raises ``ConfigError`` for a name that it has not."""

    def __init__(self, settings: Settings, name: str, patience_s: float) -> None:
        if name not in settings.tiers:
            known = ", ".join(settings.tiers) or "none"
            raise ConfigError(
                f"no tier {name!r} is configured{did_you_mean(name, settings.tiers)} (configured: {known})"
            )
        self.settings = settings
        self._patience_s = patience_s
        self.name = name
        table = dict(settings.tiers[name])
        self.values: Mapping[str, object] = {key: table[key] for key in table if key != "policy"}
        """Of its table in the configuration. Which blocks leave first is not tried, and may be a plugin's affair."""
        self.cls: type[Any] = class_of_tier(settings.tier_types[name], settings.tiers[name])
        self.secrets = find_secrets([type(settings.tiers[name])], table)

    def plan(self, row_bytes: int) -> TierBuild:
        """How an engine would build it. Raises ``ConfigError`` if it has no room for a block."""
        return plan_tier(self.settings, self.name, row_bytes)

    def try_to_store(self, maker: RowMaker) -> None:
        """Open it, store one block, and close it.

        Raises ``TierOpenError``, or ``ConfigError`` if it has no room for a block, or takes none.
        """
        plan = self.plan(maker.row_bytes)
        with TierDriver(
            self.cls,
            self.settings.tiers[self.name],
            row_bytes=maker.row_bytes,
            namespace=maker.namespace,
            capacity_bytes=plan.capacity_bytes,
            name=self.name,
            policies=self.settings.policies,
            patience_s=self._patience_s,
        ) as driver:
            (key,) = similar_keys(1)
            if driver.store({key: maker.make(key)}).missing:
                raise ConfigError(
                    f"tier {self.name!r} takes no blocks: it is full, or configured to store nothing (read_only); "
                    "check it where it may store"
                )

    def remove(self, namespaces: Iterable[str], row_bytes: int) -> dict[str, str]:
        """Remove all blocks of *namespaces*. Why that did not go, by namespace."""
        if not self.is_lasting:
            return {}
        left = {namespace: self._remove(namespace, row_bytes) for namespace in sorted(namespaces)}
        return {namespace: why for namespace, why in left.items() if why is not None}

    @property
    def is_lasting(self) -> bool:
        """Whether blocks outlive the instance that stored them."""
        return bool(self.cls.info.persistent or self.cls.info.shared)

    def delete(self, namespace: str, row_bytes: int, keys: Sequence[OffloadKey]) -> None:
        """Delete blocks, through an instance of its own, where the tier can. Raises what the tier raises."""
        if self.is_lasting and issubclass(self.cls, BlockTier):
            self._through_another(namespace, row_bytes, lambda tier: tier.delete(keys))

    def _remove(self, namespace: str, row_bytes: int) -> str | None:
        if not issubclass(self.cls, BlockTier):
            return "this tier type is on the hook specs, and can't remove a namespace"
        left: list[str] = []
        try:
            self._through_another(namespace, row_bytes, lambda tier: left.extend(_remove_all(tier)))
        except Exception as error:  # noqa: BLE001 - it is told, and what else there is to remove is removed
            return f"{type(error).__name__}: {text_of(error)}"
        return left[0] if left else None

    def _through_another(self, namespace: str, row_bytes: int, work: Callable[[BlockTier], None]) -> None:
        tier = self.make(namespace, row_bytes)

        def do() -> None:
            try:
                tier.open()
                work(tier)
            finally:
                tier.close()

        CallThread(self._patience_s).call("a tier that removes what was stored", do)

    def make(self, namespace: str, row_bytes: int) -> Any:  # noqa: ANN401 - a tier
        """An instance that is not open, without the core around it."""
        table = self.settings.tiers[self.name]
        context = TierContext(
            name=self.name,
            namespace=namespace,
            row_bytes=row_bytes,
            capacity_bytes=self.cls.info.resolve_capacity(table.capacity),
            policies=self.settings.policies,
        )
        return self.cls(table, context)


def _remove_all(tier: BlockTier) -> Iterator[str]:
    """Remove what the tier can; what it can't."""
    if isinstance(tier, SupportsRemoval):
        tier.remove_namespace()
    elif isinstance(tier, SupportsScan):
        tier.delete([block.key for block in tier.scan()])
        yield "its blocks are deleted; what describes it stays, because this tier type has no remove_namespace"
    else:
        yield "this tier type has no remove_namespace, and no scan"


def describe_left(left: Mapping[str, str], begin: str) -> Iterator[str]:
    """Lines about namespaces that could not be removed, by the reason. All their names have this *begin*."""
    for reason in sorted(set(left.values())):
        count = list(left.values()).count(reason)
        yield f"left behind: {count} namespaces, whose names begin with {begin}: {reason}"
