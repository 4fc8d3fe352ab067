"""SmolLM2 as vLLM can load it: from the GGUF file of its package to a transformers directory in bf16."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from kvtier_transformers.gguf import GGUFFile
from kvtier_transformers.gguf_model import gguf_config, gguf_state_dict
from kvtier_transformers.models import find_smollm2


def save_smollm2(directory: Path) -> Path:
    """Write configuration and weights, no tokenizer, into *directory*."""
    file = GGUFFile(find_smollm2())
    config = gguf_config(file)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    weights = {
        name: weight.to(torch.bfloat16).contiguous() for name, weight in gguf_state_dict(file, config).items()
    }
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory
