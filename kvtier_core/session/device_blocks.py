"""Which device block and which row each block of a request's KV groups travels between. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.prompts import PromptBlock
from kvtier_core.transfer.plan import GroupTransfer
from kvtier_core.values import PreparedTransfer

BlockIds = Sequence[int] | Mapping[int, Sequence[int]]
"""The device blocks of a request, in order; of several KV groups, by the group's index in the namespace."""


class DeviceBlocks:
    """The cached KV groups of an engine: *shapes*, and their *indices* in the namespace."""

    def __init__(self, shapes: Sequence[GroupShape], indices: Sequence[int]) -> None:
        self._shapes = shapes
        self._indices = indices

    def by_group(self, block_ids: BlockIds, num_tokens: int, complaint: str) -> list[Sequence[int]]:
        """The device blocks of each group. Raises ``ValueError`` when they are not enough for *num_tokens*.

        *complaint* is the message, with ``{needed}`` and ``{given}``.
        """
        if not isinstance(block_ids, Mapping):
            if len(self._indices) > 1:
                raise ValueError(
                    f"the model has KV groups {self._indices}: name the device blocks of each by its index"
                )
            block_ids = {self._indices[0]: block_ids}
        ids = []
        for index, shape in zip(self._indices, self._shapes, strict=True):
            given, needed = block_ids.get(index, ()), num_tokens // shape.tokens_per_block
            if len(given) < needed:
                of_group = f" of KV group {index}" if len(self._indices) > 1 else ""
                raise ValueError(complaint.format(needed=needed, given=len(given)) + of_group)
            ids.append(given)
        return ids

    def transfers(
        self, prepared: PreparedTransfer, blocks: Sequence[PromptBlock], ids: Sequence[Sequence[int]]
    ) -> list[GroupTransfer]:
        """The device transfer of those of *blocks* that have rows."""
        rows = dict(zip(prepared.keys, prepared.rows, strict=True))
        parts: list[GroupTransfer] = []
        for group in range(len(self._shapes)):
            mine = [block for block in blocks if block.group == group and block.key in rows]
            if mine:
                block_ids = [ids[group][block.number] for block in mine]
                parts.append(
                    GroupTransfer(block_ids=block_ids, rows=[rows[block.key] for block in mine], group=group)
                )
        return parts

    def hits_of(self, prepared: PreparedTransfer, blocks: Sequence[PromptBlock]) -> dict[str, int]:
        """Tokens by where they come from, by the blocks of the first group alone. *prepared* loads *blocks*.

        The first block of a window stands for all tokens before it as well.
        """
        counts: Counter[str] = Counter()
        begin = 0
        for block, source in zip(blocks, prepared.sources, strict=True):
            if block.group == 0:
                counts[source] += block.end - begin
                begin = block.end
        return dict(counts)

    def has(self, block: PromptBlock, loaded_tokens: int, ids: Sequence[Sequence[int]]) -> bool:
        """Whether the device holds *block*: of a window, neither what was not loaded nor what the engine gave up."""
        shape = self._shapes[block.group]
        if shape.window is None:
            return True
        was_loaded = block.number in shape.needed(loaded_tokens)
        return ids[block.group][block.number] >= 0 and (block.end > loaded_tokens or was_loaded)
