"""LMCache inside vLLM's process on a CPU: LMCache as it is, with a copy of whole blocks for a CPU's KV, which it lacks.

vLLM imports it by name, from the connector's options (``benchmarks/peers_ways.py``).
"""

from typing import Any
from unittest.mock import patch

import torch
from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

BLOCK = 128


class Blocks(GPUConnectorInterface):
    """Copies a chunk's blocks, layer after layer, as they lie in vLLM's cache."""

    def __init__(self, layers, token_elements):
        self._layers, self._token_elements = layers, token_elements

    def get_shape(self, num_tokens):
        return torch.Size([2, self._layers, num_tokens, self._token_elements])

    def to_gpu(self, memory_obj, start, end, **kwargs):
        for page, kept in self._pairs(memory_obj, start, end, **kwargs):
            page.copy_(kept)

    def from_gpu(self, memory_obj, start, end, **kwargs):
        for page, kept in self._pairs(memory_obj, start, end, **kwargs):
            kept.copy_(page)

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
        for each in zip(memory_objs, starts, ends, strict=False):
            self.to_gpu(*each, **kwargs)

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for each in zip(memory_objs, starts, ends, strict=False):
            self.from_gpu(*each, **kwargs)

    def _pairs(self, memory, start, end, *, kvcaches, slot_mapping, **_):
        """Each page of vLLM's cache with its place in LMCache's memory."""
        assert start % BLOCK == end % BLOCK == 0, (start, end)
        blocks = (slot_mapping[start:end:BLOCK] // BLOCK).tolist()
        kept = memory.tensor.view(-1).view(len(kvcaches), len(blocks), -1)
        for layer, cache in enumerate(kvcaches):
            axis = 1 if cache.shape[0] == 2 else 0  # keys and values, then blocks, or the other way
            for index, block in enumerate(blocks):
                page = cache.select(axis, block)
                yield page, kept[layer, index].view(page.shape)


def _make(_config, metadata, *_arguments, **_options):
    layers, _, _, heads, head_size = metadata.kv_shape
    return Blocks(layers, heads * head_size)


class LMCacheConnectorV1(LMCacheConnectorV1Dynamic):
    """LMCache's connector, with ``Blocks`` in place of its copies for GPUs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with patch("lmcache.v1.gpu_connector.CreateGPUConnector", _make):
            super().__init__(*arguments, **options)
