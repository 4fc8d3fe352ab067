"""Block hashes and keys (C01, K1): the same in every process, different for whatever must not be shared."""

import os
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.keys import (
    MultimodalInput,
    RequestIdentity,
    get_offload_block_hash,
    get_offload_group_idx,
    hash_blocks,
    make_offload_key,
)

NOBODY = RequestIdentity()
TOKENS = list(range(1, 65))

PRINT_HASHES = """
from kvtier_core.keys import MultimodalInput, RequestIdentity, hash_blocks
image = MultimodalInput(start=3, length=20, digest="cat")
identity = RequestIdentity(salt="tenant", lora="adapter", multimodal=(image,))
for who in (RequestIdentity(), identity):
    print(*(h.hex() for h in hash_blocks(range(1, 65), 16, who)))
"""


def hashes_of_another_process(hash_seed: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    done = subprocess.run(
        [sys.executable, "-c", PRINT_HASHES], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_c01_k1_o3_three_interpreters_give_the_same_keys():
    outputs = [hashes_of_another_process(seed) for seed in (None, "0", "12345")]
    assert len(outputs[0].split()) == 8
    assert outputs[0] == outputs[1] == outputs[2]


def test_c01_the_hash_is_pinned():
    """A change of these values strands every block stored before: it needs a new algorithm name."""
    plain = hash_blocks(TOKENS, 16, NOBODY)
    assert plain[0].hex() == "753aae09dd2d9caa50ccbf91dd19116e2a76cef81ecdd87ab957adfe3bc4c925"
    assert plain[3].hex() == "27dd282175a0a805668cb4e4b79563fc748276402eebb18c598ef75e2dd0ae84"


def test_c01_a_hash_covers_its_whole_prefix():
    other = [99, *TOKENS[1:]]
    pairs = zip(hash_blocks(TOKENS, 16, NOBODY), hash_blocks(other, 16, NOBODY), strict=True)
    assert all(one != two for one, two in pairs)


def test_c01_a_common_prefix_has_common_hashes():
    one = hash_blocks(TOKENS, 16, NOBODY)
    two = hash_blocks([*TOKENS[:32], *range(900, 932)], 16, NOBODY)
    assert one[:2] == two[:2]
    assert one[2] != two[2]


def test_c01_a_partial_block_has_no_hash():
    assert len(hash_blocks(TOKENS[:31], 16, NOBODY)) == 1
    assert hash_blocks(TOKENS[:15], 16, NOBODY) == []


def test_c01_the_block_size_is_part_of_the_hash():
    assert hash_blocks(TOKENS[:32], 32, NOBODY)[0] not in hash_blocks(TOKENS[:32], 16, NOBODY)


@given(
    tokens=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60),
    size=st.integers(1, 7),
    cut=st.integers(0, 60),
    start=st.integers(0, 40),
    length=st.integers(1, 20),
)
def test_c01_hashing_in_pieces_equals_hashing_at_once(tokens, size, cut, start, length):
    image = MultimodalInput(start=start, length=length, digest="cat")
    for who in (NOBODY, RequestIdentity(salt="s", multimodal=(image,))):
        whole = hash_blocks(tokens, size, who)
        first = whole[: min(cut, len(whole))]
        rest = hash_blocks(
            tokens[len(first) * size :],
            size,
            who,
            parent=first[-1] if first else None,
            first_block=len(first),
        )
        assert first + rest == whole


def test_c01_lists_tuples_and_arrays_hash_alike():
    expected = hash_blocks(TOKENS, 16, NOBODY)
    assert hash_blocks(tuple(TOKENS), 16, NOBODY) == expected
    array: Any = np.array(TOKENS, dtype=np.int32)
    assert hash_blocks(array, 16, NOBODY) == expected
    assert hash_blocks(range(1, 65), 16, NOBODY) == expected


def test_c01_a_block_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="tokens_per_block"):
        hash_blocks(TOKENS, 0, NOBODY)


# -- who may share


def test_k1_o4_five_identities_five_keys():
    identities = [
        RequestIdentity(salt="A"),
        RequestIdentity(salt="B"),
        NOBODY,
        RequestIdentity(lora="1"),
        RequestIdentity(lora="2"),
    ]
    for block in range(4):
        assert len({hash_blocks(TOKENS, 16, who)[block] for who in identities}) == 5


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (RequestIdentity(salt=""), NOBODY),
        (RequestIdentity(salt="x"), RequestIdentity(lora="x")),
        (RequestIdentity(salt="ab", lora="c"), RequestIdentity(salt="a", lora="bc")),
        (RequestIdentity(salt="a\x00"), RequestIdentity(salt="a")),
        (RequestIdentity(salt="ä"), RequestIdentity(salt="a\u0308")),
    ],
)
def test_k1_o4_no_two_identities_run_into_one_another(one, two):
    assert hash_blocks(TOKENS, 16, one)[0] != hash_blocks(TOKENS, 16, two)[0]


# -- multimodal inputs


def with_images(*images: tuple[int, int, str]) -> list[bytes]:
    inputs = tuple(MultimodalInput(start=s, length=n, digest=digest) for s, n, digest in images)
    return hash_blocks(TOKENS, 16, RequestIdentity(multimodal=inputs))


def test_c01_multimodal_inputs_separate_blocks_from_their_first_block_on():
    cat, dog, none = with_images((20, 8, "cat")), with_images((20, 8, "dog")), with_images()
    assert cat[0] == dog[0] == none[0]
    assert len({cat[1], dog[1], none[1]}) == 3
    assert len({cat[3], dog[3], none[3]}) == 3


def test_c01_an_input_over_two_blocks_counts_in_both():
    over = with_images((10, 20, "cat"))
    plain = hash_blocks(TOKENS[16:], 16, NOBODY, parent=over[0], first_block=1)
    assert over[0] != with_images()[0]
    assert over[1] != plain[0]


def test_c01_an_input_that_ends_at_a_block_does_not_count_in_the_next():
    ends = with_images((0, 16, "cat"))
    unmarked = hash_blocks(TOKENS[16:], 16, NOBODY, parent=ends[0], first_block=1)
    assert ends[1:] == unmarked


def test_c01_where_an_input_starts_counts():
    assert with_images((3, 4, "cat"))[0] != with_images((4, 4, "cat"))[0]


def test_b14_how_long_an_input_is_counts_in_every_block_it_stands_in():
    short, long = with_images((3, 20, "cat")), with_images((3, 21, "cat"))
    assert all(one != other for one, other in zip(short, long, strict=True))


def test_c01_the_order_of_two_inputs_counts():
    assert with_images((0, 4, "cat"), (4, 4, "dog"))[0] != with_images((0, 4, "dog"), (4, 4, "cat"))[0]


# -- keys


@pytest.mark.parametrize("group", [0, 1, 2**32 - 1])
def test_k12_o1_a_key_is_the_hash_and_the_group_big_endian(group):
    key = make_offload_key(b"h" * 32, group)
    assert key == b"h" * 32 + group.to_bytes(4, "big")
    assert get_offload_block_hash(key) == b"h" * 32
    assert get_offload_group_idx(key) == group


@pytest.mark.parametrize("group", [-1, 2**32])
def test_k12_o1_a_group_that_does_not_fit_is_refused(group):
    with pytest.raises(struct.error):
        make_offload_key(b"h" * 32, group)
