"""Every architecture: the same answers from the pool and from disk, or a refusal that names what is in the way."""

import re

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models import PAGE
from tests.transformers.architectures import REFUSED, SERVED, try_out
from tests.vllm.architectures import MODELS as IN_VLLM


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


def test_the_page_of_models_is_of_a_run_of_all_of_them():
    tables = re.findall(r"^\|---\|---\|---\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    rows = [f"| {name} | `{model_type}` | served |" for name, (model_type, _) in SERVED.items()]
    rows += [
        f"| {name} | `{model_type}` | refused: {named} |" for name, (model_type, _, named) in REFUSED.items()
    ]
    in_vllm = [
        f"| {name} | `{model.type}` | {f'refused: {model.refused}' if model.refused else 'served'} |"
        for name, model in IN_VLLM.items()
    ]
    assert [table.splitlines() for table in tables] == [rows, in_vllm]
