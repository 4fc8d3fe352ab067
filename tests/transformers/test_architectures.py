"""Every architecture: the same answers from the pool and from disk, or a refusal that names what is in the way."""

from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.docs.pages import update_or_compare
from tests.transformers.architectures import REFUSED, SERVED, try_out

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
    text = f"""# Models that the transformers engine was tried with

A test makes a tiny random model of each row and compares it with transformers' own cache: computed, loaded from the
pool, and loaded from disk by another engine. Served means the same 12 greedy tokens, and first logits within 1e-3. A
model that is not in the table is decided by the same rule: its layers are read when the engine opens.

| model | `model_type` | |
|---|---|---|
{chr(10).join(rows)}
"""
    update_or_compare(PAGE, text)
