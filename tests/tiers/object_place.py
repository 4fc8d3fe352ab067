"""What the tests of the object-store tier stand on: a server, a proxy in front of it, and an independent look at it."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierContext
from kvtier_fsspec.object_tier import ObjectTier
from kvtier_fsspec.packs import PackName
from kvtier_testing.driving import PATIENCE_S
from kvtier_testing.fixtures import NAMESPACE, TierFixtures
from kvtier_testing.rows import similar_keys
from tests.tiers.fault_proxy import (
    Fault,
    FaultProxy,
    Request,
)
from tests.tiers.s3_server import client, options

KEYS = similar_keys(12)
A, B, C, D = KEYS[:4]
BUCKET = "bucket"


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up, "it never came"
        time.sleep(0.01)


def is_pack(request: Request) -> bool:
    return "/packs/" in request.path and "list-type" not in request.path


def everything(fault: Fault) -> Callable[[Request], Fault | None]:
    return lambda _request: fault


class Witness:
    """An independent look at what is below a URL, and damage to it."""

    def __init__(self, port: int, url: str) -> None:
        self._client = client(port)
        self._root = url.removeprefix(f"s3://{BUCKET}/")

    def close(self) -> None:
        self._client.close()

    def names(self, folder: str = f"{NAMESPACE}/packs") -> list[str]:
        prefix = f"{self._root}/{folder}/"
        answer = self._client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"].removeprefix(prefix) for item in answer.get("Contents", ())]

    def packs(self, namespace: str = NAMESPACE) -> list[str]:
        """Those with blocks in them."""
        return [name for name in self.names(f"{namespace}/packs") if PackName.read(name).blocks]

    def blocks(self) -> list[int]:
        """One entry for each block that there is."""
        return [number for name in self.packs() for number in range(PackName.read(name).blocks)]

    def get(self, path: str) -> bytes:
        content: bytes = self._client.get_object(Bucket=BUCKET, Key=f"{self._root}/{path}")["Body"].read()
        return content

    def put(self, path: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"{self._root}/{path}", Body=content)

    def remove(self, path: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=f"{self._root}/{path}")


class ObjectFixtures(TierFixtures):
    """Give it ``server_port`` of a server with a bucket named ``bucket``."""

    full_rounds = 4

    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return ObjectTier

    @pytest.fixture
    def url(self):
        return f"s3://{BUCKET}/{secrets.token_hex(8)}"

    @pytest.fixture
    def proxy(self, server_port):
        proxy = FaultProxy(server_port)
        yield proxy
        proxy.stop()

    @pytest.fixture
    def tier_settings(self, proxy, url):
        return {"url": url, "storage_options": options(proxy.port)}

    @pytest.fixture
    def witness(self, server_port, url):
        witness = Witness(server_port, url)
        yield witness
        witness.close()

    @pytest.fixture
    def quick(self, monkeypatch):
        """Engines look at the bucket all the time."""
        monkeypatch.setattr(ObjectTier, "follow_interval", 0.02)


def make_tier(
    settings: dict[str, Any],
    *,
    namespace: str = NAMESPACE,
    row_bytes: int = 8192,
    capacity: int | None = None,
) -> ObjectTier:
    """The tier without the core around it, open."""
    context = TierContext(
        name="far",
        namespace=namespace,
        row_bytes=row_bytes,
        description={"namespace": namespace},
        capacity_bytes=capacity,
    )
    tier = ObjectTier(ObjectTier.Settings.model_validate({"type": "fsspec", **settings}), context)
    tier.open()
    return tier


def load(tier: ObjectTier, key: OffloadKey) -> bytes | None:
    into = bytearray(tier.context.row_bytes)
    return bytes(into) if tier.load(key, memoryview(into)) else None
