"""kvtier for llama.cpp: a GGUF model whose prompts' KV lives on in kvtier's tiers."""

from kvtier_llamacpp.engine import Engine
from kvtier_llamacpp.errors import LlamaError
from kvtier_llamacpp.model import Model

__all__ = ["Engine", "LlamaError", "Model"]
