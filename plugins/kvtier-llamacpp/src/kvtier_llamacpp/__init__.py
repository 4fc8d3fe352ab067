"""kvtier for llama.cpp: a GGUF model whose prompts' KV lives on in kvtier's tiers."""

from kvtier_llamacpp.engine import Engine, Generation
from kvtier_llamacpp.errors import LlamaError

__all__ = ["Engine", "Generation", "LlamaError"]
