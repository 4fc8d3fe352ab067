"""What keeping namespaces asks of a storage, and how fsspec's file systems do it.

Paths are below the URL. Every method raises ``StorageError`` for a fault. Decides nothing about the names of blocks.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from fsspec import AbstractFileSystem

from kvtier_fsspec import description
from kvtier_fsspec.connection import Connection
from kvtier_fsspec.many import Requests
from kvtier_fsspec.publishing import Found, Publisher, folders_in, remove_each


class Place(Protocol):
    """A storage with a folder for each namespace. Safe from any thread."""

    def write(self, path: str, content: bytes) -> None:
        """Write one object, replacing one of that name."""
        ...

    def read(self, path: str, most: int) -> bytes | None:
        """The first *most* bytes of an object; ``None`` if there is none."""
        ...

    def namespaces(self) -> list[str]:
        """The names of the folders below the URL."""
        ...

    def heads(self, paths: Sequence[str], most: int) -> list[object]:
        """The first *most* bytes of each object; anything else for one that can't be read."""
        ...

    def objects(self, namespace: str) -> Iterator[Found]:
        """Every object in the folders of a namespace."""
        ...

    def remove(self, found: Sequence[str]) -> None:
        """Remove objects, by the paths that ``objects`` gave; absent ones are fine."""
        ...

    def remove_rest(self, namespace: str, found: Sequence[str]) -> None:
        """Remove these objects, the namespace's description, and its folders as far as nothing is in them."""
        ...


class FileSystemPlace:
    """A file system of fsspec's."""

    def __init__(self, connection: Connection, publisher: Publisher, requests: Requests) -> None:
        """No I/O."""
        self._connection = connection
        self._publisher = publisher
        self._requests = requests

    def write(self, path: str, content: bytes) -> None:
        """As ``Place.write``."""
        self._connection.call(lambda fs, root: self._publisher.put(fs, f"{root}/{path}", content))

    def read(self, path: str, most: int) -> bytes | None:
        """As ``Place.read``."""

        def work(fs: AbstractFileSystem, root: str) -> bytes | None:
            try:
                content: bytes = fs.cat_file(f"{root}/{path}", start=0, end=most)
            except FileNotFoundError:
                return None
            return content

        return self._connection.call(work)

    def namespaces(self) -> list[str]:
        """As ``Place.namespaces``."""
        folders = self._connection.call(folders_in)
        return [folder.rstrip("/").rpartition("/")[2] for folder in folders]

    def heads(self, paths: Sequence[str], most: int) -> list[object]:
        """As ``Place.heads``."""
        return self._connection.call(
            lambda fs, root: self._requests.call_each(
                fs, "cat_file", [f"{root}/{path}" for path in paths], start=0, end=most
            )
        )

    def objects(self, namespace: str) -> Iterator[Found]:
        """As ``Place.objects``."""
        return self._connection.call_iter(lambda fs, root: self._publisher.entries(fs, f"{root}/{namespace}"))

    def remove(self, found: Sequence[str]) -> None:
        """As ``Place.remove``."""
        self._connection.call(lambda fs, _root: remove_each(fs, found, self._requests))

    def remove_rest(self, namespace: str, found: Sequence[str]) -> None:
        """As ``Place.remove_rest``."""

        def work(fs: AbstractFileSystem, root: str) -> None:
            folder = f"{root}/{namespace}"
            remove_each(fs, [*found, f"{folder}/{description.NAME}"], self._requests)
            self._publisher.remove_empty(fs, folder)

        self._connection.call(work)
