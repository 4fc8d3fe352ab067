"""The signs of life below a root: which processes at work live, and what dead ones had claimed.

Decides who is dead; the kernel does by dropping their locks (``lock``).
"""

from contextlib import suppress
from pathlib import Path

from kvtier_disk.extents.index import Index
from kvtier_disk.extents.lock import LifeSign, is_alive
from kvtier_disk.extents.membership import Membership
from kvtier_disk.folder import Folder


class SignsOfLife:
    """A locked file in *folder* for every process at work. Every method raises ``OSError``."""

    def __init__(self, folder: Folder) -> None:
        """No I/O."""
        self.folder = folder

    def make(self) -> LifeSign:
        """This process's own."""
        return LifeSign(self.folder)

    def anybody(self) -> bool:
        """Whether any process is at work."""
        with suppress(FileNotFoundError), self.folder.opened() as handle:
            return any(is_alive(self.folder, entry.name) for entry in handle.entries())
        return False

    def reap(self, index: Index, member: Membership | None = None) -> None:
        """Free what dead processes had claimed; *member* lives, whatever its lock says."""
        owners = dict(index.owners())
        if member is not None and owners.pop(member.owner, None) is None:
            index.restore_owner(member.owner, member.lock, member.namespace.id)
        for owner, lock in owners.items():
            name = Path(lock).name
            if not is_alive(self.folder, name):
                index.remove_owner(owner)
                self._remove(name)

    def sweep(self, index: Index) -> None:
        """Remove those of processes that died before they were entered. Call it while the root is kept ``exclusively``.

        Else one that is being made, and not locked yet, would look dead.
        """
        entered = {lock for _, lock in index.owners()}
        with suppress(FileNotFoundError), self.folder.opened() as handle:
            for name in [entry.name for entry in handle.entries() if entry.name not in entered]:
                if not is_alive(self.folder, name):
                    self._remove(name)

    def _remove(self, name: str) -> None:
        with (
            suppress(FileNotFoundError, IsADirectoryError),
            self.folder.opened() as handle,
        ):  # that is somebody's
            handle.unlink(name)
