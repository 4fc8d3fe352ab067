"""What one process has of a root: its namespace, the index, its files and its sign of life. Decides nothing."""

from dataclasses import dataclass

from kvtier_disk.extents.extent_files import ExtentFiles
from kvtier_disk.extents.index import Index
from kvtier_disk.extents.lock import LifeSign
from kvtier_disk.extents.tables import Namespace


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What a process has of a root that it takes part in, or only looks into: ``owner`` is nobody then."""

    namespace: Namespace
    index: Index
    owner: int
    life_sign: LifeSign | None
    files: ExtentFiles

    @property
    def lock(self) -> str:
        """The name of the sign of life."""
        return "" if self.life_sign is None else self.life_sign.name

    def end(self) -> None:
        """Close the index and the files, and give up the sign of life."""
        self.files.close()
        self.index.database.close()
        if self.life_sign is not None:
            self.life_sign.end()
