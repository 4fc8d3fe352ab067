"""Those that ``objectstore.py`` compares: our tier, and obstore and s3fs with one object a block.

Each stores from the rows of a pool and loads into them. Decides how each is driven.
"""

import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from disk_ours import load_all, store_all

from kvtier_fsspec import FsspecTier
from kvtier_testing.bench.rows import NAMESPACE, Measured, Rows, timed
from kvtier_testing.driving import TierDriver
from tests.tiers.seaweed import BUCKET, SeaweedFS


def drive(url: str, options: Mapping[str, object], threads: int, *, row_bytes: int) -> TierDriver:
    """Our tier, open."""
    settings = FsspecTier.Settings.model_validate(
        {"type": "fsspec", "url": url, "storage_options": options, "threads": threads}
    )
    driver = TierDriver(
        FsspecTier.for_settings(settings),
        settings,
        row_bytes=row_bytes,
        namespace=NAMESPACE,
        capacity_bytes=1 << 40,
    )
    driver.poll_s = 1.0  # the tier wakes its host
    return driver


class Ours:
    """The tier behind the core's port. Proofs are made before a store and checked after a load, which is not timed."""

    name = "ours"

    def __init__(self, server: SeaweedFS, threads: int) -> None:
        self._server = server
        self._threads = threads
        self._driver: TierDriver | None = None

    def _opened(self, rows: Rows) -> TierDriver:
        if self._driver is None:
            url = f"s3://{BUCKET}/{secrets.token_hex(4)}"
            self._driver = drive(url, self._server.options, self._threads, row_bytes=rows.row_bytes)
        return self._driver

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        driver, keys = self._opened(rows), rows.keys(number)
        rows.seal(keys)
        return timed(lambda: store_all(driver, rows, keys))

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        driver, keys = self._opened(rows), rows.keys(number)
        rows.wipe()
        measured = timed(lambda: load_all(driver, rows, keys))
        rows.check(keys)
        return measured

    def clear(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Shut it down."""
        if self._driver is not None:
            self._driver.shutdown()


class Obstore:
    """Threads with one put or get each."""

    name = "obstore"

    def __init__(self, server: SeaweedFS, threads: int) -> None:
        import obstore  # noqa: PLC0415 - the benchmark alone needs it

        self._obstore = obstore
        options: Any = server.options
        self._store: Any = obstore.store.from_url(
            f"s3://{BUCKET}/raw-{secrets.token_hex(4)}",
            access_key_id=options["key"],
            secret_access_key=options["secret"],
            endpoint=options["endpoint_url"],
            region=options["client_kwargs"]["region_name"],
            client_options={"allow_http": True},
        )
        self._pool = ThreadPoolExecutor(threads)

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        keys = rows.keys(number)
        rows.seal(keys)

        def put(index: int) -> None:
            self._obstore.put(self._store, keys[index].hex(), rows.view(index), use_multipart=False)

        return timed(lambda: list(self._pool.map(put, range(rows.count))))

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        keys = rows.keys(number)
        rows.wipe()

        def get(index: int) -> None:
            rows.view(index)[:] = self._obstore.get(self._store, keys[index].hex()).bytes()

        measured = timed(lambda: list(self._pool.map(get, range(rows.count))))
        rows.check(keys)
        return measured

    def clear(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Shut it down."""
        self._pool.shutdown()


class S3fs:
    """Its own batches on its event loop."""

    name = "s3fs"

    @staticmethod
    def is_there() -> bool:
        """Whether it is installed."""
        return find_spec("s3fs") is not None

    def __init__(self, server: SeaweedFS, threads: int) -> None:
        import fsspec  # noqa: PLC0415 - as above

        self._root = f"{BUCKET}/s3fs-{secrets.token_hex(4)}"
        self._threads = threads
        self._fs: Any = fsspec.filesystem("s3", **server.options, skip_instance_cache=True)

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        keys = rows.keys(number)
        rows.seal(keys)

        def put() -> None:
            content = {f"{self._root}/{key.hex()}": bytes(rows.view(index)) for index, key in enumerate(keys)}
            self._fs.pipe(content, batch_size=self._threads)

        return timed(put)

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        keys = rows.keys(number)
        rows.wipe()

        def get() -> None:
            paths = [f"{self._root}/{key.hex()}" for key in keys]
            found = self._fs.cat(paths, batch_size=self._threads)
            for index, path in enumerate(paths):
                rows.view(index)[:] = found[path]

        measured = timed(get)
        rows.check(keys)
        return measured

    def clear(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
