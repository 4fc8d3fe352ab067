"""A toy engine over a session: its KV is a function of the tokens, so that wrong bytes show."""

import threading

import torch

from kvtier_core.keys import RequestIdentity
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.session import EngineSession
from kvtier_core.transfer import KVLayout

TOKENS = 4
LAYERS = 3
PATIENCE_S = 20.0
NOBODY = RequestIdentity()


def namespace_of(layout: KVLayout, *layers: str) -> Namespace:
    """The namespace of a toy with these layers, all in the one group of *layout*."""
    return Namespace(
        model="toy",
        kv_dtype="float32",
        tokens_per_block=TOKENS,
        groups=(GroupSpec(layers=layers, block_bytes=layout.payload_bytes[0]),),
        layout="toy",
        weights_digest="w",
    )


class Toy:
    """A toy engine: its KV is a function of the tokens, so that wrong bytes show."""

    def __init__(self, session: EngineSession, kv: list[torch.Tensor], gate: threading.Event) -> None:
        self.session = session
        self.kv = kv  # LAYERS tensors of (blocks, TOKENS, 8)
        self.gate = gate
        """Device stores wait for this event."""

    def compute(self, tokens: list[int], block_ids: list[int], begin: int = 0) -> None:
        for position in range(begin, len(tokens)):
            block, slot = block_ids[position // TOKENS], position % TOKENS
            for layer, tensor in enumerate(self.kv):
                tensor[block, slot] = torch.arange(8) + 100 * tokens[position] + layer + position / 1000

    def holds(self, tokens: list[int], block_ids: list[int], count: int) -> bool:
        for position in range(count):
            block, slot = block_ids[position // TOKENS], position % TOKENS
            for layer, tensor in enumerate(self.kv):
                expected = torch.arange(8) + 100 * tokens[position] + layer + position / 1000
                if not torch.equal(tensor[block, slot], expected):
                    return False
        return True

    def wipe(self) -> None:
        for tensor in self.kv:
            tensor.zero_()

    def run(self, request_id: str, tokens: list[int], identity: RequestIdentity = NOBODY) -> int:
        """A whole request; the tokens that did not have to be computed."""
        session, block_ids = self.session, list(range(-(-len(tokens) // TOKENS)))
        session.begin(request_id, tokens, identity)
        session.load(request_id, session.wait_matched(request_id, PATIENCE_S), block_ids)
        loaded = session.wait_loaded(request_id, PATIENCE_S)
        assert self.holds(tokens, block_ids, loaded), "wrong bytes"
        self.compute(tokens, block_ids, loaded)
        session.computed(request_id, len(tokens), block_ids)
        session.end(request_id)
        assert session.wait_stored(request_id, PATIENCE_S)
        self.wipe()
        return loaded

    def evict_pool(self) -> None:
        """Push everything out of the pool."""
        rows = self.session.stats()["pool"]["rows"]
        for round_ in range(rows):
            self.run(f"evict-{round_}", [10_000 + round_ * TOKENS + i for i in range(TOKENS + 1)])
            assert self.session.flush(PATIENCE_S)
