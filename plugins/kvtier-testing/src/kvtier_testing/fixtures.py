"""What the tests of a tier stand on: the fixtures a subclass provides, and those made of them."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from kvtier_core.blocktier import BlockTier
from kvtier_core.plugins import check_tier_class
from kvtier_core.values import TierContext, TierInfo
from kvtier_testing.calling import PATIENCE_S
from kvtier_testing.direct import DirectTier
from kvtier_testing.driving import TierDriver
from kvtier_testing.lent import LentRows, lent_rows
from kvtier_testing.rows import RowMaker

OpenTier = Callable[..., TierDriver]
OpenDirect = Callable[..., DirectTier]

_WATCH_S = 0.25

NAMESPACE = "kit-namespace"
"""Where a test stores, unless its class has ``spaces`` of its own."""


class Spaces:
    """Names of the namespaces that one test uses. Call it: ``spaces("other")`` is the same name each time."""

    def __init__(self, prefix: str = "kit") -> None:
        self._prefix = prefix
        self.used: set[str] = set()
        """Those that were asked for."""

    def __call__(self, name: str = "namespace") -> str:  # noqa: D102 - see the class
        self.used.add(whole := f"{self._prefix}-{name}")
        return whole


class TierFixtures:
    """Fixtures of every tier test, and what a subclass may set.

    ``payload_bytes`` is the size of the blocks they use; ``full_rounds`` how often blocks are stored into a full tier:
    fewer do for one whose every call crosses a network. ``least_blocks`` is a capacity, in blocks, with which a tier
    that bounds itself works. ``patience_s`` is how long any call may take. ``is_in_use`` says that the storage has
    blocks of others: no small ``capacity`` or ``ttl`` is tried then, for which a tier may remove them.
    """

    payload_bytes = 5000
    full_rounds = 50
    least_blocks = 10
    patience_s = PATIENCE_S
    is_in_use = False

    def watch_for_late_writes(self) -> None:
        """Give a write that comes late the time to come. Nothing waits for the end of this time."""
        time.sleep(_WATCH_S)

    # What a subclass provides, and what is made of it.

    @pytest.fixture
    def tier_class(self) -> type[Any]:
        """The tier to test."""
        raise NotImplementedError("define the fixture tier_class: it returns the tier to test")

    @pytest.fixture
    def tier_settings(self) -> Mapping[str, object]:
        """The tier's own settings, of a storage that is empty when a test begins: all tests use the same keys."""
        return {}

    @pytest.fixture
    def unusable_settings(self) -> Mapping[str, object] | None:
        """Settings of its own with which the tier can't open, such as a port where nobody listens."""
        return None

    @pytest.fixture
    def info(self, tier_class: type[Any]) -> TierInfo:
        """What the tier says about itself."""
        check_tier_class(tier_class)  # what is wrong with the class, in words, before anything fails for it
        info: TierInfo = tier_class.info
        return info

    @pytest.fixture
    def spaces(self) -> Spaces:
        """The test's namespaces."""
        return Spaces()

    @pytest.fixture
    def maker(self, spaces: Spaces) -> RowMaker:
        """Rows of the namespace that tiers are opened with."""
        return RowMaker(spaces(), self.payload_bytes)

    @pytest.fixture
    def pool_rows(self, maker: RowMaker) -> Iterator[LentRows]:
        """The pool whose rows the tiers of one test read and fill. No other row may be written."""
        with lent_rows(maker.row_bytes) as rows:
            yield rows
            rows.check()

    @pytest.fixture
    def open_tier(
        self,
        tier_class: type[Any],
        info: TierInfo,
        tier_settings: Mapping[str, object],
        maker: RowMaker,
        pool_rows: LentRows,
    ) -> Iterator[OpenTier]:
        """Opens the tier: ``open_tier(capacity_blocks=None, namespace=..., **core_settings)``; shut down at the end."""
        with ExitStack() as stack:

            def open_one(
                cls: type[Any] = tier_class,
                *,
                capacity_blocks: int | None = None,
                namespace: str = maker.namespace,
                **settings: object,
            ) -> TierDriver:
                is_small = capacity_blocks is not None or "ttl" in settings
                if self.is_in_use and is_small and (info.persistent or info.shared):
                    pytest.skip("others use this storage: for a small capacity or ttl their blocks would go")
                made = cls.Settings.model_validate({**tier_settings, "type": "kit", **settings})
                driver = TierDriver(
                    cls,
                    made,
                    row_bytes=maker.row_bytes,
                    namespace=namespace,
                    capacity_bytes=made.capacity
                    if capacity_blocks is None
                    else capacity_blocks * maker.row_bytes,
                    rows=pool_rows,
                    patience_s=self.patience_s,
                )
                return stack.enter_context(driver)

            yield open_one

    @pytest.fixture
    def make_direct(
        self,
        tier_class: type[Any],
        info: TierInfo,
        tier_settings: Mapping[str, object],
        maker: RowMaker,
        pool_rows: LentRows,
    ) -> OpenDirect:
        """Makes the tier without the core around it: ``make_direct(namespace=..., **settings)``. Not open."""
        if not issubclass(tier_class, BlockTier):
            pytest.skip("this tier is on the hook specs, and has none of these methods")

        def make(namespace: str = maker.namespace, **settings: object) -> DirectTier:
            values = {**tier_settings, "type": "kit", **settings}
            made = tier_class.Settings.model_validate(values)
            context = TierContext(
                name="kit",
                namespace=namespace,
                description={"model": "kit", "namespace": namespace},
                row_bytes=maker.row_bytes,
                capacity_bytes=info.resolve_capacity(made.capacity),
            )
            return DirectTier(tier_class, made, context, pool_rows, self.patience_s)

        return make

    @pytest.fixture
    def open_direct(self, make_direct: OpenDirect, maker: RowMaker) -> Iterator[OpenDirect]:
        """Opens the tier without the core around it; closed at the end."""
        with ExitStack() as stack:

            def open_one(namespace: str = maker.namespace) -> DirectTier:
                tier = make_direct(namespace)
                tier.open()
                stack.callback(_close, tier)
                return tier

            yield open_one


def _close(tier: DirectTier) -> None:
    if not tier.hangs:
        tier.close()
