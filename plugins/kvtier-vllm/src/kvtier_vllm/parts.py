"""One worker's part of the rows: which groups it has, where its bytes are, and which rows it writes.

A pipeline's stage may have no layer of a group. What several workers hold alike is in a row once: each stores its share
of the rows, and loads from all of them. In the canonical layout the workers share a row's slots. Decides nothing about
blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from vllm.v1.kv_offload.base import CanonicalKVCaches

from kvtier_core.transfer import Direction, GroupTransfer, KVGroup, KVLayout
from kvtier_vllm.canonical import find_fragments
from kvtier_vllm.facts import GroupFacts


class Part:
    """That of the worker *rank* in an engine with these groups."""

    def __init__(
        self, groups: Sequence[GroupFacts], blocks_per_chunk: int, rank: int, *, is_canonical: bool = False
    ) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.rank = rank
        self._is_canonical = is_canonical
        self._groups = {index: group for index, group in enumerate(groups) if group.parts[rank]}
        """By their number in vLLM's transfers; in the layout they follow one another."""
        self.indices = tuple(self._groups)
        """These numbers, by the group's place in the layout."""

    def make_layout(self, kv_caches: CanonicalKVCaches) -> KVLayout:
        """The layout of vLLM's tensors: of each layer the bytes that are its page's, without padding."""
        factor = self.blocks_per_chunk
        layout = KVLayout(
            *(self._make_group(kv_caches, index) for index in self._groups),
            block_size_factor=factor,
            row_offsets=[
                0 if self._is_canonical else factor * group.offset(self.rank)
                for group in self._groups.values()
            ],
        )
        told = [group.parts[self.rank] for group in self._groups.values()]
        assert [group.block_bytes for group in layout.groups] == told, (
            "this worker's part is not what it told the others"
        )
        return layout

    def _make_group(self, kv_caches: CanonicalKVCaches, index: int) -> KVGroup:
        refs, tensors = kv_caches.group_data_refs[index], kv_caches.tensors
        if not self._is_canonical:
            return KVGroup([tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes] for ref in refs])
        fragments = list(find_fragments(refs))
        return KVGroup(
            [tensors[each.tensor].tensor[:, each.begin : each.begin + each.size] for each in fragments],
            page_offsets=[each.place for each in fragments],
            slot_bytes=self._groups[index].block_bytes,
        )

    def choose(self, direction: Direction, transfers: Iterable[GroupTransfer]) -> list[GroupTransfer]:
        """What of a transfer this worker has to copy, with the groups' numbers in its layout."""
        numbers = {index: number for number, index in enumerate(self._groups)}
        mine = [item for item in transfers if item.group in numbers]
        if direction is Direction.STORE:
            mine = [self._take_turn(item, self._groups[item.group].copies) for item in mine]
        return [replace(item, group=numbers[item.group]) for item in mine]

    def _take_turn(self, transfer: GroupTransfer, copies: int) -> GroupTransfer:
        """The rows that this one of the *copies* workers writes, with their blocks."""
        if copies == 1:
            return transfer
        turn, rows = self.rank % copies, transfer.rows
        slots = enumerate(transfer.block_ids, transfer.first_slot)
        blocks = [block for slot, block in slots if rows[slot // self.blocks_per_chunk] % copies == turn]
        has_first = len(rows) > 0 and rows[0] % copies == turn
        return replace(
            transfer,
            block_ids=blocks,
            rows=[row for row in rows if row % copies == turn],
            first_slot=transfer.first_slot if has_first else 0,
        )
