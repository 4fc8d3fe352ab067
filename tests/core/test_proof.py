"""Self-proving rows (C03): any doubt about a row's bytes is seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.proof import PROOF_BYTES, ROW_ALIGNMENT, Sealer, row_bytes_for

KEY = make_offload_key(b"k" * 32, 0)
PAYLOAD = 5000


def sealed(payload_bytes: int = PAYLOAD, namespace: str = "ns", key: OffloadKey = KEY) -> bytearray:
    """A row whose payload is a pattern, sealed."""
    row = bytearray(b"\xff" * row_bytes_for(payload_bytes))
    row[:payload_bytes] = bytes(i * 7 % 251 for i in range(payload_bytes))
    Sealer(namespace).seal(key, memoryview(row), payload_bytes)
    return row


def holds(
    row: bytes | bytearray, payload_bytes: int = PAYLOAD, namespace: str = "ns", key: OffloadKey = KEY
) -> bool:
    """Whether the row's proof holds."""
    return Sealer(namespace).check(key, memoryview(row), payload_bytes)


def test_c03_a_sealed_row_holds():
    assert holds(sealed())


@pytest.mark.parametrize(
    "payload", [0, 1, ROW_ALIGNMENT - PROOF_BYTES, ROW_ALIGNMENT - PROOF_BYTES + 1, 3 * ROW_ALIGNMENT]
)
def test_c03_rows_are_whole_pages_with_room_for_the_proof(payload):
    size = row_bytes_for(payload)
    assert size % ROW_ALIGNMENT == 0
    assert payload + PROOF_BYTES <= size < payload + PROOF_BYTES + ROW_ALIGNMENT
    assert holds(sealed(payload), payload)


def test_c03_sealing_keeps_the_payload_and_zeroes_the_padding():
    row = sealed()
    assert row[:PAYLOAD] == bytes(i * 7 % 251 for i in range(PAYLOAD))
    assert not any(row[PAYLOAD:-PROOF_BYTES])


@pytest.mark.parametrize("position", range(1, PROOF_BYTES + 1))
def test_c03_every_byte_of_the_proof_counts(position):
    row = sealed()
    row[-position] ^= 1
    assert not holds(row)


@pytest.mark.parametrize("position", [0, 1, PAYLOAD // 2, PAYLOAD - 1, PAYLOAD, -PROOF_BYTES - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_c03_a_flipped_bit_of_payload_or_padding_is_seen(position, bit):
    row = sealed()
    row[position] ^= 1 << bit
    assert not holds(row)


@given(position=st.integers(0, row_bytes_for(PAYLOAD) - 1), flip=st.integers(1, 255))
def test_c03_a_change_anywhere_is_seen(position, flip):
    row = sealed()
    row[position] ^= flip
    assert not holds(row)


@pytest.mark.parametrize("length", [0, 1, PROOF_BYTES, PAYLOAD, PAYLOAD + PROOF_BYTES, 4096, 8191])
def test_c03_a_truncated_row_is_seen(length):
    assert not holds(sealed()[:length])


def test_c03_a_row_whose_rest_was_never_written_is_seen():
    row = sealed()
    row[4096:] = bytes(4096)
    assert not holds(row)


def test_c03_a_longer_row_is_seen():
    assert not holds(sealed() + bytes(ROW_ALIGNMENT))


def test_c03_an_empty_row_is_seen():
    assert not holds(bytes(row_bytes_for(PAYLOAD)))


def test_c03_another_namespace_is_seen():
    assert not holds(sealed(namespace="other"))


@pytest.mark.parametrize("key", [make_offload_key(b"x" * 32, 0), make_offload_key(b"k" * 32, 1)])
def test_c03_k12_o1_another_block_or_group_is_seen(key):
    assert not holds(sealed(key=key))


def test_c03_another_payload_size_is_seen():
    assert not holds(sealed(PAYLOAD), PAYLOAD - 1)
    assert not holds(sealed(PAYLOAD - 1), PAYLOAD)


def test_c03_two_blocks_swapped_are_seen():
    other = make_offload_key(b"x" * 32, 0)
    one, two = sealed(), sealed(key=other)
    assert not holds(two)
    assert not holds(one, key=other)


def test_c03_bytes_that_changed_before_the_proof_arrived_are_seen():
    row, late = sealed(), sealed()
    late[100] ^= 1
    Sealer("ns").seal(KEY, memoryview(late), PAYLOAD)
    row[-PROOF_BYTES:] = late[-PROOF_BYTES:]
    assert not holds(row)
