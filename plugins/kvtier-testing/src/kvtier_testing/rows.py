"""Keys and rows to test with: keys that are easily mistaken for one another, rows that prove what they are."""

import hashlib
import random

from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.proof import Sealer, row_bytes_for


def similar_keys(count: int, *, group: int = 0, seed: int = 0) -> list[OffloadKey]:
    """*count* different keys that share all but the last 4 bytes of their block hash.

    A tier that cuts, rounds or case-folds names confuses them. At most 65,536.
    """
    prefix = hashlib.sha256(f"similar {seed}".encode()).digest()[:28]
    return [make_offload_key(prefix + index.to_bytes(4, "big"), group) for index in range(count)]


class RowMaker:
    """Rows of one namespace: random payload, zero padding, valid proof. The same arguments give the same row."""

    def __init__(self, namespace: str, payload_bytes: int) -> None:
        self._sealer = Sealer(namespace)
        self.namespace = namespace
        self.payload_bytes = payload_bytes
        self.row_bytes = row_bytes_for(payload_bytes)

    def make(self, key: OffloadKey, version: int = 0) -> bytes:
        """The row of *key*; another *version* has another payload."""
        row = bytearray(self.row_bytes)
        seed = f"{self.namespace} {key.hex()} {version}"
        row[: self.payload_bytes] = random.Random(seed).randbytes(self.payload_bytes)  # noqa: S311 - no secret
        with memoryview(row) as view:
            self._sealer.seal(key, view, self.payload_bytes)
        return bytes(row)

    def proves(self, key: OffloadKey, row: bytes) -> bool:
        """Whether *row* is a whole row of this namespace sealed under *key*."""
        return self._sealer.check(key, memoryview(row), self.payload_bytes)
