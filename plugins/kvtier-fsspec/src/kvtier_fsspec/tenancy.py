"""An engine's stay in its namespace: the sign that it is in use, and the room that unused namespaces give up.

Decides when signs are written and what is said of faults. Knows nothing of how blocks lie in a namespace.
"""

import contextlib

from kvtier_core.tier import TierContext, is_of_one_process
from kvtier_fsspec import description
from kvtier_fsspec.faults import StorageError
from kvtier_fsspec.places import Place
from kvtier_fsspec.unused import UnusedNamespaces


class Tenancy:
    """From ``begin`` to ``end``, or until the namespace is removed. Safe from any thread."""

    def __init__(self, place: Place, context: TierContext, shown_url: str) -> None:
        """No I/O."""
        self._place = place
        self._context = context
        self._shown_url = shown_url
        self._unused = UnusedNamespaces(place, context.namespace, context.capacity_bytes, context.log)
        self._signs = False
        self._has_just_signed = False
        self._told = ""

    def begin(self) -> bool:
        """Show that the storage can be written and read; false if it can only be read. Raises ``StorageError``.

        Cost: two requests.
        """
        self._signs = True
        try:
            self._sign(in_use=True)
            self._has_just_signed = True
        except StorageError as error:
            self._signs = False
            if not error.may_not_write or self._place.read(self._path, 1) is None:
                raise
            self._context.log.warning(
                "tier %r (kvtier-fsspec): %s can't be written (%s): what others store there is loaded, and nothing is "
                "stored or deleted. To store, allow writing and deleting, and start again",
                self._context.name,
                self._shown_url,
                error,
            )
        return self._signs

    def renew(self, needed: int) -> None:
        """Say that the namespace is in use, learn which others are not, and make room among those.

        The first call, right after ``begin``, does not say it again. A fault is told once. Cost: two requests and one
        for each namespace below the URL; more where one has newly come out of use.
        """
        if not self._signs:
            return
        try:
            if not self._has_just_signed:
                self._sign(in_use=True)
            self._has_just_signed = False
            self._unused.learn()
            self.make_room(needed)
        except StorageError as error:
            if str(error) != self._told:
                self._told = str(error)
                self._context.log.warning(
                    "tier %r (kvtier-fsspec): can't look after the namespaces below %s (%s): those that nobody uses "
                    "don't all count within capacity. It is tried again every minute; allow listing, reading, writing "
                    "and deleting there",
                    self._context.name,
                    self._shown_url,
                    error,
                )

    def make_room(self, needed: int) -> None:
        """Remove what nobody uses until *needed* bytes of ours fit beside it. Raises ``StorageError``."""
        self._unused.make_room(needed)

    def removed(self) -> None:
        """The namespace is about to be removed: from now on nothing is written there."""
        self._signs = False

    def end(self) -> None:
        """A namespace that nobody else can have is out of use from now on."""
        if self._signs and is_of_one_process(self._context.description):
            with contextlib.suppress(StorageError):  # then it is out of use an hour from now
                self._sign(in_use=False)
        self._signs = False

    def _sign(self, *, in_use: bool) -> None:
        text = description.text_of(self._context.description, in_use=in_use)
        self._place.write(self._path, text)
        self._place.read(self._path, len(text))

    @property
    def _path(self) -> str:
        return f"{self._context.namespace}/{description.NAME}"
