"""A bucket by way of obstore: objects below one URL, read, written, listed and removed.

Decides how a URL and its options become a client, how long a request may take, and what absence is. Knows nothing of
blocks. Every method raises ``StorageError`` for a fault, and none of them does for an object that is not there.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from fsspec.asyn import get_loop

from kvtier_fsspec import description
from kvtier_fsspec.connection import Connection
from kvtier_fsspec.faults import says_no_bucket
from kvtier_fsspec.many import Requests
from kvtier_fsspec.publishing import Found
from kvtier_fsspec.settings import FsspecSettings

_S3 = frozenset({"s3", "s3a"})
_S3FS_NAMES = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "anon": "skip_signature",
    "region_name": "region",
}
"""The names that other Python clients use for S3, in ``storage_options`` and its ``client_kwargs``."""
_ENDPOINT = re.compile(r"https?://[^\s/]+(/\S*)?")
_DEPTH = 2
"""Slashes in a path of ours: namespace, folder, name."""
_CONNECT_S = 5.0
_PART_BYTES = 256 << 10
"""Of an answer, copied at a time: they are still in the processor's cache, and few enough calls."""
_RETRIES = 4
"""After the first try, with pauses from 0.1 s on that double and vary: some 1.5 s if nothing listens."""

_client_pid: int | None = None
"""The process that has made a client: the library's threads don't survive a fork."""


class Bucket:
    """One URL with its options. Safe from any thread."""

    def __init__(self, settings: FsspecSettings) -> None:
        """No I/O."""
        self._settings = settings
        # Two tries that last as long as they may, and a load is not late yet.
        self._longest = timedelta(seconds=settings.limits.load_timeout / 2)
        self._connection = Connection(settings.url, settings.storage_options, self._make)
        self._requests = Requests(settings.parallel_requests)

    @property
    def shown_url(self) -> str:
        """The URL without its secrets."""
        return self._connection.shown_url

    def close(self) -> None:
        """Give up the client. Twice is fine."""
        self._connection.close()

    def write(self, path: str, content: bytes | Sequence[memoryview | bytes]) -> None:
        """Write one object, visible whole or not at all, in one request; replaces one of that name."""
        import obstore  # noqa: PLC0415 - only buckets need it

        self._connection.call(lambda store: obstore.put(store, path, content, use_multipart=False))

    def write_new(self, path: str, content: bytes) -> bool:
        """Write one object unless there is one of that name; whether it was written.

        A service that does not know the condition writes it in any case, or refuses.
        """
        import obstore  # noqa: PLC0415 - as above

        def work(store: Any) -> bool:  # noqa: ANN401 - obstore's
            try:
                obstore.put(store, path, content, mode="create", use_multipart=False)
            except FileExistsError:
                return False
            return True

        return self._connection.call(work)

    def read(self, path: str, most: int) -> bytes | None:
        """The first *most* bytes of an object; ``None`` if there is none."""
        found = bytearray()
        if self.read_range(path, 0, most, found.extend) is None:
            return None
        return bytes(found)

    def read_range(
        self, path: str, begin: int, count: int, take: Callable[[memoryview], object]
    ) -> int | None:
        """Hand *count* bytes of an object to *take*, part after part as they come, fewer at its end.

        Returns how many came; ``None`` if there is no such object.
        """
        import obstore  # noqa: PLC0415 - as above

        def work(store: Any) -> int | None:  # noqa: ANN401 - obstore's
            came = 0
            try:
                answer = obstore.get(store, path, options={"range": (begin, begin + count)})
                for part in answer.stream(min_chunk_size=_PART_BYTES):
                    take(memoryview(part))
                    came += len(part)
            except FileNotFoundError as error:
                if says_no_bucket(error):
                    raise
                return None
            return came

        return self._connection.call(work)

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | Exception | None]:
        """The bytes of many (path, begin, count), together; a ``StorageError`` for each that failed."""
        import obstore  # noqa: PLC0415 - as above

        def work(store: Any) -> list[bytes | Exception | None]:  # noqa: ANN401 - obstore's
            async def one(wanted: tuple[str, int, int]) -> bytes:
                path, begin, count = wanted
                return bytes(await obstore.get_range_async(store, path, start=begin, length=count))

            found = self._requests.gather(get_loop(), one, ranges)
            return [None if _is_absence(outcome) else outcome for outcome in found]

        return self._connection.call_each(work)

    def below(self, folder: str, after: str = "") -> Iterator[Found]:
        """Every object below *folder* whose name there comes behind *after*, in order. One request per 1,000."""
        import obstore  # noqa: PLC0415 - as above

        offset = f"{folder}/{after}" if after else None
        for part in self._connection.call_iter(
            lambda store: iter(obstore.list(store, folder, offset=offset))
        ):
            for item in part:
                yield Found(item["path"], item["size"], item["last_modified"].timestamp())

    def namespaces(self) -> list[str]:
        """As ``Place.namespaces``."""
        import obstore  # noqa: PLC0415 - as above

        found = self._connection.call(obstore.list_with_delimiter)
        return [str(folder).rstrip("/") for folder in found["common_prefixes"]]

    def heads(self, paths: Sequence[str], most: int) -> list[object]:
        """As ``Place.heads``."""
        return list(self.read_ranges([(path, 0, most) for path in paths]))

    def objects(self, namespace: str) -> Iterator[Found]:
        """As ``Place.objects``; not what lies deeper, which may be another tier's."""
        return (found for found in self.below(namespace) if found.path.count("/") == _DEPTH)

    def remove(self, found: Sequence[str]) -> None:
        """As ``Place.remove``; 1,000 a request where the service can."""
        import obstore  # noqa: PLC0415 - as above

        def work(store: Any) -> None:  # noqa: ANN401 - obstore's
            try:
                obstore.delete(store, list(found))
            except FileNotFoundError as error:
                if says_no_bucket(error):
                    raise
                for path in found:  # where the service removes one by one, that ended at the first absent one
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(store, path)

        if found:
            self._connection.call(work)

    def remove_rest(self, namespace: str, found: Sequence[str]) -> None:
        """As ``Place.remove_rest``; buckets have no folders."""
        self.remove([*found, f"{namespace}/{description.NAME}"])

    def _make(self) -> tuple[Any]:
        from obstore.store import from_url  # noqa: PLC0415 - as above

        global _client_pid  # noqa: PLW0603 - of the process, as the library's threads are
        _client_pid = _client_pid or os.getpid()
        if _client_pid != os.getpid():
            raise OSError(
                "a forked process can't use a bucket: its client has no threads there. Spawn processes"
            )
        url, config, client = _arguments(self._settings.url, self._settings.storage_options)
        arguments: dict[str, Any] = {
            "config": config,
            "client_options": {"timeout": self._longest, **client},
            "retry_config": {"max_retries": _RETRIES, "retry_timeout": self._longest},
        }
        provider = _credentials(url, config)
        if provider is not None:
            arguments["credential_provider"] = provider
        return (from_url(url, **arguments),)


def _arguments(url: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """URL, configuration and client options for obstore. Raises ``ValueError`` for what can't be meant."""
    protocol, _, rest = url.partition("://")
    config = {
        name: value for name, value in options.items() if name not in ("client_kwargs", "client_options")
    }
    if protocol in _S3:
        config |= options.get("client_kwargs", {})
        config = {_S3FS_NAMES.get(name, name): value for name, value in config.items()}
        config.setdefault("region", "us-east-1")
        # A digest of each body takes 70 % of a store's processor time. Over TLS it adds nothing, and a block
        # proves itself when it is read.
        config.setdefault("unsigned_payload", True)
    client = {"connect_timeout": timedelta(seconds=_CONNECT_S), **options.get("client_options", {})}
    endpoint = config.get("endpoint")
    if endpoint is not None:
        if not _ENDPOINT.fullmatch(str(endpoint)):
            raise ValueError("the endpoint is no URL such as http://storage.example:9000")
        client.setdefault("allow_http", urlsplit(str(endpoint)).scheme == "http")
    return f"{'gs' if protocol == 'gcs' else protocol}://{rest}", config, client


def _credentials(url: str, config: Mapping[str, Any]) -> Any:  # noqa: ANN401 - obstore's
    """Where S3's credentials come from if the options name none: boto3 finds them in more places than obstore."""
    if urlsplit(url).scheme not in _S3 or {"access_key_id", "skip_signature"} & config.keys():
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - only where it is needed
    except ImportError:
        return None
    try:
        return Boto3CredentialProvider()
    except ValueError:  # its words are about itself
        raise PermissionError("no credentials, neither in storage_options nor where boto3 looks") from None


def _is_absence(outcome: object) -> bool:
    return isinstance(outcome, FileNotFoundError) and not says_no_bucket(outcome)
