r"""Block hashes and offload keys (contract C01): what a block is called, in every process alike.

The hash is SHA-256, chained: a block's hash covers its own tokens, its parent's hash and so the whole
prefix, and what separates requests (tenant salt, LoRA adapter, multimodal inputs). Nothing depends on
``PYTHONHASHSEED``, the machine's byte order or the process.

Format (version 1): ``root = sha256(b"kvtier-hash-1" + field(salt) + field(lora))`` where
``field(None) = b"\x00"`` and ``field(text) = b"\x01" + u32be(len) + utf8``; then
``hash_i = sha256(hash_{i-1} + u32be(n) + tokens as i64be + extras)`` where extras are, for every multimodal
input that overlaps the block, ``u64be(offset of its start relative to the block, two's complement) + u64be(length) +
field(digest)``.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np

OffloadKey = NewType("OffloadKey", bytes)
"""A block hash followed by the KV group's index as 4 bytes, big-endian."""

HASH_ALGORITHM = "kvtier-sha256-chain-1"

_GROUP = struct.Struct(">I")


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Join a block hash and a group index. Raises ``struct.error`` when the index is not a 32-bit unsigned."""
    return OffloadKey(block_hash + _GROUP.pack(group_idx))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """The block hash inside *key*."""
    return key[: -_GROUP.size]


def get_offload_group_idx(key: OffloadKey) -> int:
    """The KV group's index inside *key*."""
    index: int = _GROUP.unpack(key[-_GROUP.size :])[0]
    return index


@dataclass(frozen=True, kw_only=True)
class MultimodalInput:
    """A non-text input whose placeholder tokens stand at ``[start, start + length)`` of the prompt."""

    start: int
    length: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class RequestIdentity:
    """Keeps requests with the same tokens apart. Equal identities may share blocks, others never do."""

    salt: str | None = None
    lora: str | None = None
    multimodal: tuple[MultimodalInput, ...] = ()


def _field(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    raw = text.encode()
    return b"\x01" + struct.pack(">I", len(raw)) + raw


def root_hash(identity: RequestIdentity) -> bytes:
    """The parent of a request's first block."""
    return hashlib.sha256(b"kvtier-hash-1" + _field(identity.salt) + _field(identity.lora)).digest()


def _extras(identity: RequestIdentity, begin: int, end: int) -> bytes:
    return b"".join(
        struct.pack(">qQ", item.start - begin, item.length) + _field(item.digest)
        for item in identity.multimodal
        if item.start < end and item.start + item.length > begin
    )


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as they are hashed. Anything numpy would have to round, cut or flatten is refused."""
    if len(token_ids) == 0:
        return b""
    try:
        tokens = np.asarray(token_ids)
    except ValueError:  # ragged
        tokens = np.empty((0, 0))
    kind = tokens.dtype.kind
    if tokens.ndim != 1 or kind not in "iu" or (kind == "u" and tokens.max() >= 1 << 63):
        raise ValueError("token ids must be a flat sequence of integers below 2**63")
    return tokens.astype(">i8").tobytes()


def hash_blocks(
    token_ids: Sequence[int],
    tokens_per_block: int,
    identity: RequestIdentity,
    *,
    parent: bytes | None = None,
    first_block: int = 0,
) -> list[bytes]:
    """Hash every whole block of *token_ids*; a partial last block has no hash.

    To go on where an earlier call stopped, pass the last hash as *parent*, the tokens after it, and how many
    blocks came before as *first_block* (multimodal positions count from the prompt's start). Raises ``ValueError`` when
    the tokens are not a flat sequence of integers.
    """
    if tokens_per_block < 1:
        raise ValueError(f"tokens_per_block must be at least 1, not {tokens_per_block}")
    previous = root_hash(identity) if parent is None else parent
    tokens = _token_bytes(token_ids)
    width = 8 * tokens_per_block
    head = struct.pack(">I", tokens_per_block)
    hashes: list[bytes] = []
    for index in range(len(token_ids) // tokens_per_block):
        digest = hashlib.sha256(previous + head + tokens[index * width : (index + 1) * width])
        if identity.multimodal:
            begin = (first_block + index) * tokens_per_block
            digest.update(_extras(identity, begin, begin + tokens_per_block))
        previous = digest.digest()
        hashes.append(previous)
    return hashes
