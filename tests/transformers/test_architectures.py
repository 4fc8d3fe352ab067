"""Every architecture: the same answers from the pool and from disk, or a refusal that names what is in the way."""

from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.docs.pages import update_or_compare
from tests.transformers.architectures import REFUSED, SERVED, try_out
from tests.vllm.architectures import MODELS as IN_VLLM

PAGE = Path(__file__).parents[2] / "docs/reference/models.md"


def skip_unknown(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {model_type}")


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # GPT-BigCode before 5
@pytest.mark.parametrize("name", SERVED)
def test_c40_answers_are_the_models_own(name, tmp_path):
    model_type, settings = SERVED[name]
    skip_unknown(model_type)
    assert try_out(model_type, settings, tmp_path) == ("served", "")


@pytest.mark.parametrize("name", REFUSED)
def test_c40_what_keeps_something_else_is_refused_by_name(name, tmp_path):
    model_type, settings, named = REFUSED[name]
    skip_unknown(model_type)
    outcome, why = try_out(model_type, settings, tmp_path)
    assert outcome == "refused"
    assert (
        named in why or int(transformers.__version__.split(".")[0]) < 5
    )  # which has other words for its layers


def test_the_page_of_models_lists_them():
    rows = [f"| {name} | `{model_type}` | served |" for name, (model_type, _) in SERVED.items()]
    rows += [
        f"| {name} | `{model_type}` | refused: {named} |" for name, (model_type, _, named) in REFUSED.items()
    ]
    in_vllm = [
        f"| {name} | `{model.type}` | {f'refused: {model.refused}' if model.refused else 'served'} |"
        for name, model in IN_VLLM.items()
    ]
    text = f"""# Models that were tried

`nox -s models` makes a tiny random model of each row and tries it. A model that is not in the table is decided by the
same rule: its layers are read when the engine opens.

## In transformers

Each model is compared with transformers' own cache: computed, loaded from the pool, and loaded from disk by another
engine. Served means the same 12 greedy tokens, and first logits within 1e-3. A batch of two prompts, one with padding,
has the same tokens as well.

| model | `model_type` | |
|---|---|---|
{chr(10).join(rows)}

## In vLLM

Each model is compared with vLLM 0.32 without a connector, on a CPU: computed, loaded from the pool, and loaded from
disk by another engine. Served means the same 8 greedy tokens, and hits in both. After a load these are the tokens that
vLLM's own prefix cache gives. vLLM turns that cache off for latent attention on a CPU without AMX, where its kernels
round cached and new tokens differently. To try the copies, the test turns it on.

| model | `model_type` | |
|---|---|---|
{chr(10).join(in_vllm)}
"""
    update_or_compare(PAGE, text)
