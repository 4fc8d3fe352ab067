"""Which bytes of a row each worker has, and whose turn it is to write them. Needs vLLM's types, and no engine."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_core.transfer import Direction, GroupTransfer
from tests.vllm.engines import needs_vllm
from tests.vllm.facts_of import GROUP

pytestmark = needs_vllm


def part(rank, *groups, factor=1):
    from kvtier_vllm.parts import Part

    return Part(groups, factor, rank)


def caches(*pages_of_groups):
    """vLLM's description of groups with a tensor of three blocks for each page."""
    import torch

    sizes = [size for pages in pages_of_groups for size in pages]
    tensors = [SimpleNamespace(tensor=torch.zeros(3, size, dtype=torch.int8)) for size in sizes]
    numbers = iter(range(len(sizes)))
    refs = [
        [SimpleNamespace(tensor_idx=next(numbers), page_size_bytes=size) for size in pages]
        for pages in pages_of_groups
    ]
    described: Any = SimpleNamespace(tensors=tensors, group_data_refs=refs)
    return described


def test_v11_a_stage_without_a_group_leaves_it_out_and_the_others_keep_their_place():
    groups = [replace(GROUP, parts=(48, 0)), replace(GROUP, parts=(16, 32))]
    layout = part(1, *groups, factor=2).make_layout(caches([], [16, 16]))
    assert layout.payload_bytes == (64,)
    assert layout.row_offsets == (32,)
    given = [GroupTransfer(block_ids=[1], rows=[1], group=group) for group in (0, 1)]
    (chosen,) = part(1, *groups).choose(Direction.LOAD, given)
    assert chosen.group == 0
    assert [item.group for item in part(0, *groups).choose(Direction.STORE, given)] == [0, 1]


def test_v11_a_worker_that_has_not_what_it_told_the_others_is_stopped():
    with pytest.raises(AssertionError, match="not what it told"):
        part(0, replace(GROUP, parts=(48, 16))).make_layout(caches([16, 16]))


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("first_slot", [0, 2])
def test_c43_workers_take_turns_to_write_what_they_hold_alike_and_read_all_of_it(factor, first_slot):
    first_slot = min(first_slot, factor - 1)
    rows = [7, 4, 5, 9, 2]
    blocks = list(range(100, 100 + factor * len(rows) - first_slot - (factor > 1)))
    given = GroupTransfer(block_ids=blocks, rows=rows, first_slot=first_slot)
    group = replace(GROUP, parts=(8, 8), copies=2)
    both = [part(rank, group, factor=factor) for rank in (0, 1)]

    def places(item):
        slots = range(item.first_slot, item.first_slot + len(item.block_ids))
        return {
            (item.rows[slot // factor], slot % factor): block
            for slot, block in zip(slots, item.block_ids, strict=True)
        }

    written = [places(item) for worker in both for item in worker.choose(Direction.STORE, [given])]
    assert {row for row, _ in written[0]} == {4, 2}
    assert {row for row, _ in written[1]} == {7, 5, 9}
    assert written[0] | written[1] == places(given)
    assert all(worker.choose(Direction.LOAD, [given]) == [given] for worker in both)
