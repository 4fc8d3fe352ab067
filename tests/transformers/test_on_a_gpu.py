"""An engine whose KV is on the simulated GPU: the model's own answers, and a device that copies wrong is refused."""

from contextlib import ExitStack

import pytest
import torch

from kvtier_core import UnsupportedModelError
from kvtier_core.transfer import SELF_TEST_JOBS, Direction
from kvtier_transformers import Engine, load
from kvtier_transformers.namespace import namespace_for
from kvtier_transformers.support import device_objections
from tests.coordinator.mutate import changed
from tests.transfer.simgpu.mutants import MUTANTS
from tests.transformers.on_a_gpu import kv_on_a_gpu
from tests.transformers.test_batches import PROMPTS, generate, pad
from tests.transformers.test_engine import check
from tests.transformers.tiny import device_kv, save_model, tiny_model, tokens, write_settings

pytestmark = pytest.mark.timeout(300)
_BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
_EARLY_STORES = _BY_NAME["a store does not wait for compute"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(save_model(tiny_model(), tmp_path_factory.mktemp("model"))).model


@pytest.fixture
def open_engine(model, tmp_path):
    def open_engine(**options):
        return Engine.open(model, max_tokens=200, config=write_settings(tmp_path), chunk_tokens=40, **options)

    return open_engine


def with_mistake(mutant):
    return changed(f"kvtier_core.transfer.{mutant.place}", mutant.old, mutant.new)


def test_i17_c40_answers_are_the_models_own_from_the_pool_and_from_disk(model, open_engine):
    prompt = tokens(100)
    with kv_on_a_gpu():
        for sources in (({}, {"pool": 96}), ({"disk": 96}, {"pool": 96})):
            with open_engine() as engine:
                control = engine._session._pool.control
                assert control.get_last_finished(0, Direction.STORE) == SELF_TEST_JOBS
                given = [engine.generate(prompt, max_tokens=12) for _ in sources]
                assert engine.flush()
                assert control.get_last_finished(0, Direction.LOAD) > SELF_TEST_JOBS
            assert [generation.hits_by_tier for generation in given] == list(sources)
            for generation in given:
                check(model, prompt, generation)


def test_i17_c40_a_batch_is_restored(model, open_engine):
    ids, mask = pad(PROMPTS)
    right = generate(model, ids, mask).tolist()
    with kv_on_a_gpu(1), open_engine() as engine:
        for columns in (0, 108):
            with engine.cache_for(ids, attention_mask=mask) as prompt:
                assert prompt.hit_tokens == columns
                output = generate(model, ids, mask, prompt)
                prompt.store(output)
            assert output.tolist() == right


@pytest.mark.parametrize("name", [_EARLY_STORES.name, "rows are off by one"])
def test_i17_c44_a_device_that_copies_wrong_is_refused(open_engine, name):
    wrong = pytest.raises(
        UnsupportedModelError, match="can't serve this engine: cuda:0 .worker 0. did not pass"
    )
    with kv_on_a_gpu(), with_mistake(_BY_NAME[name]), wrong:
        open_engine(canary=False)


def test_i17_c40_stores_that_do_not_wait_for_compute_give_other_answers(model, open_engine):
    """Once the device was tested: these tests see what such a device would do."""
    prompts = [tokens(100, seed=seed) for seed in range(3)]
    with kv_on_a_gpu(), ExitStack() as mistakes, open_engine() as engine:
        mistakes.enter_context(with_mistake(_EARLY_STORES))
        logits = [
            [engine.generate(prompt, max_tokens=1).first_logits for _ in range(2)] for prompt in prompts
        ]
    assert not all(torch.allclose(computed, loaded, atol=1e-4) for computed, loaded in logits)


def test_i17_an_accelerator_is_told_in_the_log_and_a_cpu_is_not(open_engine, caplog):
    with open_engine():
        assert not caplog.text
    with kv_on_a_gpu(), open_engine():
        assert "the KV of LlamaForCausalLM is on cuda:0, which passed kvtier's self-test" in caplog.text


@pytest.mark.parametrize("names", [["cpu"], ["cuda:1"], ["xpu:0"]])
def test_i17_a_cpu_and_accelerators_with_streams_are_served(names):
    assert not list(device_objections({torch.device(name) for name in names}))


@pytest.mark.parametrize(
    ("names", "objection"),
    [
        (["cpu", "cuda:0"], "it is on cpu and cuda:0: load all of it onto one device"),
        (["cuda:1", "cuda:0"], "it is on cuda:0 and cuda:1: load all of it onto one device"),
        (["mps:0"], "it is on mps:0, and kvtier copies from accelerators with streams"),
    ],
)
def test_i17_other_places_are_refused_by_name(names, objection):
    (said,) = device_objections({torch.device(name) for name in names})
    assert said.startswith(objection)


def test_i17_c02_what_an_accelerator_computed_is_not_loaded_elsewhere(model):
    kv = device_kv(model)
    here = namespace_for(model, kv)
    kv.tensors = [tensor.to("meta") for tensor in kv.tensors]
    assert namespace_for(model, kv).name != here.name
