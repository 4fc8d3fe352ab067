"""The tier a configuration names ``disk``: blocks in extents below a root, and what can go wrong when it opens.

Decides what the core is told. How blocks lie on the disk is up to ``extents``; threads, batches and
deadlines are the core's.
"""

import errno
from collections.abc import Sequence

from kvtier_core import TierOpenError
from kvtier_core.tier import (
    BlockTier,
    Entry,
    EvictionPolicy,
    OffloadKey,
    Sealer,
    TierContext,
    TierInfo,
    TierSettings,
    format_size,
    make_policy,
)
from kvtier_disk.extents.bounds import Bounds, extents_to_keep_open, least_capacity
from kvtier_disk.extents.contents import Contents
from kvtier_disk.extents.full_disk import join
from kvtier_disk.extents.membership import Membership
from kvtier_disk.extents.page_cache import available_bytes
from kvtier_disk.extents.place import (
    NOT_WRITABLE,
    RootRefusedError,
    check_local,
    check_namespace,
    open_root,
    served_only,
)
from kvtier_disk.extents.root import Root
from kvtier_disk.extents.statements import IndexDamagedError
from kvtier_disk.extents.store import BlockStore, Opened, Outcome
from kvtier_disk.extents.upkeep import Upkeep
from kvtier_disk.files_tier import FilesTier
from kvtier_disk.folder import Folder
from kvtier_disk.settings import DEFAULT_CAPACITY, DiskSettings

_MAX_OPEN = 128
"""Extents kept open at a time, two file descriptors each: a quarter of the usual limit of 1,024 files."""
_CACHED_AT_END_BYTES, _CACHED_AT_END_S = 1 << 30, 1.0
"""A tier that closes leaves no more than that in the page cache, nor than a quarter of the available memory, and reads
no longer. About as much is in the pool, which ends as well."""
_POLICY_SIZE = 1_000_000
"""Blocks that a policy is made for where rows and capacity don't say."""


class DiskTier(BlockTier):
    """Blocks in slots of large files below ``root``; the whole root is kept within ``capacity`` (16 GiB if unset)."""

    Settings = DiskSettings
    info = TierInfo(
        medium="disk",
        persistent=True,
        bounded_by="tier",
        ttl_by="tier",
        default_capacity=DEFAULT_CAPACITY,
        store_batch=16,
        load_batch=4,
    )

    settings: DiskSettings

    @classmethod
    def for_settings(cls, settings: TierSettings) -> type[BlockTier]:
        """``FilesTier`` where ``layout = "files"``."""
        return FilesTier if isinstance(settings, DiskSettings) and settings.layout == "files" else cls

    def __init__(self, settings: DiskSettings, context: TierContext) -> None:
        """Keep both; no I/O. Raises ``ConfigError`` for an unknown policy."""
        super().__init__(settings, context)
        self.stores_nothing = settings.read_only
        self.follow_interval = settings.refresh
        capacity = context.capacity_bytes
        self._bounds = Bounds(
            capacity=capacity,
            min_free=settings.min_free,
            extent_bytes=settings.extent_size,
            ttl=settings.ttl,
        )
        blocks = _POLICY_SIZE if capacity is None else max(1, capacity // context.row_bytes)
        policy: EvictionPolicy[Entry] = make_policy(settings.policy, blocks, context.policies)
        self._contents = Contents(policy)
        self._root = Root(
            Folder(settings.root.absolute(), shared=settings.allow_writable_by_others),
            capacity=capacity,
            max_open=min(_MAX_OPEN, extents_to_keep_open()),
            warn=self._warn,
        )
        self._store: BlockStore | None = None
        self._upkeep: Upkeep | None = None
        self._was_removed = False

    # Life.

    def open(self) -> None:
        """Open the root, its index and the namespace. Raises ``TierOpenError``."""
        try:
            self._open()
        except RootRefusedError as error:
            raise TierOpenError(f"tier {self.context.name!r} (kvtier-disk): {error}") from error
        except IndexDamagedError as error:
            raise TierOpenError(
                f"tier {self.context.name!r} (kvtier-disk): {error.strerror}: {error.filename}; it is made anew where "
                f"root can be written, or by kvtier disk rebuild {self.settings.root}"
            ) from error
        except OSError as error:
            raise TierOpenError(
                f"tier {self.context.name!r} (kvtier-disk): can't write below root {str(self.settings.root)!r}: "
                f"{error.strerror or error}; set root to a directory on a writable local disk"
            ) from error

    def _open(self) -> None:
        context, root = self.context, self._root
        check_namespace(context.namespace)
        open_root(root.folder, layout="extents", read_only=self.settings.read_only)
        check_local(root.path)
        if (fewer := extents_to_keep_open()) < _MAX_OPEN:
            self._warn(
                f"at most {fewer} extents stay open, and not {_MAX_OPEN}: a quarter of the files that this process may"
                " open is for this tier. Raise that limit (ulimit -n)"
            )
        least = least_capacity(context.row_bytes, root.journal_bytes)
        if self._bounds.capacity is not None and self._bounds.capacity < least:
            raise RootRefusedError(
                f"a capacity of {format_size(self._bounds.capacity)} has no room for one block and the index: "
                f"set it to {-(-least // 1024)}KiB at least"
            )
        member, refusal = self._join()
        opened = Opened(member=member, contents=self._contents)
        upkeep = Upkeep(
            root,
            self._bounds,
            context.description,
            may_write=not self.settings.read_only,
            report_stored=context.report_stored,
            report_evicted=context.report_evicted,
        )
        store = BlockStore(
            opened,
            Sealer(context.namespace),
            upkeep.make_room,
            upkeep.forget_extents,
            report_stored=context.report_stored,
            report_evicted=context.report_evicted,
            ttl=self._bounds.ttl,
        )
        store.refusal = refusal
        upkeep.attach(store)
        self._store, self._upkeep = store, upkeep
        upkeep.start()
        self._heed_refusal()

    def _join(self) -> tuple[Membership, OSError | None]:
        """Take part in the root; where nothing can be written, only look in, and say why."""
        context, root = self.context, self._root
        refusal = OSError(errno.EROFS, "the tier is configured read_only")
        if not self.settings.read_only:
            try:
                return join(
                    root, self._bounds, context.namespace, context.row_bytes, context.description
                ), None
            except OSError as error:
                refusal = error
        try:
            member = root.look_in(context.namespace, context.row_bytes)
        except IndexDamagedError as damage:
            if refusal.errno in NOT_WRITABLE:
                raise
            raise refusal from damage  # why it could not be made, or made anew, tells more
        if member is None and self.settings.read_only:
            raise RootRefusedError(
                f"root {str(root.path)!r} holds no index, and the tier is configured read_only: name a root that others"
                " fill"
            )
        if member is None:
            raise refusal
        if not self.settings.read_only and refusal.errno in NOT_WRITABLE:
            root.warn_once("unwritable", served_only(root.path, refusal))
        elif not self.settings.read_only:
            self._warn(
                f"can't write below {root.path}: {refusal.strerror or refusal}. Its blocks are served; stores fail as "
                "long as that lasts"
            )
        return member, refusal

    def close(self) -> None:
        """Close what is open; claims that are left are freed. Raises ``OSError``."""
        store, self._store = self._store, None
        upkeep, self._upkeep = self._upkeep, None
        if upkeep is not None:
            upkeep.end()
        if store is not None:
            most_bytes = min(_CACHED_AT_END_BYTES, available_bytes() // 4)
            store.opened.files.leave_in_cache(most_bytes, _CACHED_AT_END_S)
            self._root.leave(store.opened.member, remove=self._was_removed)

    # Blocks.

    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Which of *keys* are stored, from memory."""
        return [place is not None for place in self._contents.find(keys)]

    def store(self, key: OffloadKey, block: memoryview) -> None:
        """Store one block, synced. Raises ``OSError``, such as ``ENOSPC``, and then it is not there."""
        (outcome,) = self.store_many([key], [block])
        if isinstance(outcome, Exception):
            raise outcome

    def store_many(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Sequence[Outcome]:
        """Store blocks in neighbouring slots with as few writes as can be, and one sync."""
        outcomes = self._opened().store(keys, blocks)
        self._kept.heed(outcomes)
        self._heed_refusal()
        return outcomes

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        """Read one block. Raises ``OSError``."""
        (outcome,) = self.load_many([key], [into])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def load_many(self, keys: Sequence[OffloadKey], intos: Sequence[memoryview]) -> Sequence[Outcome]:
        """Read blocks, neighbouring ones together."""
        return self._opened().load(keys, intos)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Free the slots of these blocks. Raises ``OSError``."""
        self._opened().delete(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks were used."""
        self._contents.use(keys)

    def arrange(self, chain: int, keys: Sequence[OffloadKey], depths: Sequence[int]) -> None:
        """These blocks belong to one request."""
        self._contents.arrange(chain, keys, depths)

    def follow(self) -> None:
        """Learn what other processes changed, and keep root and index in order. Raises ``OSError``."""
        self._kept.follow()
        self._heed_refusal()

    def remove_namespace(self) -> None:
        """Remove the namespace's extents and its directory. Raises ``OSError``."""
        self._kept.remove_namespace()
        self._was_removed = True

    # Within.

    def _opened(self) -> BlockStore:
        if self._store is None:
            raise OSError(errno.EBADF, "the tier is not open")
        return self._store

    @property
    def _kept(self) -> Upkeep:
        self._opened()
        assert self._upkeep is not None, "open without upkeep"
        return self._upkeep

    def _heed_refusal(self) -> None:
        """Take no stores while nothing may be written. A full disk is tried: other processes may make room."""
        refusal = self._opened().refusal
        self.stores_nothing = refusal is not None and refusal.errno in NOT_WRITABLE

    def _warn(self, text: str) -> None:
        self.context.log.warning("tier %r (kvtier-disk): %s", self.context.name, text)
