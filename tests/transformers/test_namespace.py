import copy
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvtier_transformers.namespace import namespace_for
from tests.transformers.tiny import BLOCK, device_kv, tiny_model


def namespace(model, *, tokens_per_block=BLOCK, **options):
    return namespace_for(model, device_kv(model, tokens_per_block=tokens_per_block), **options)


def saved(directory, *, seed=0, **options):
    """A model loaded from *directory*, saved there before unless it is there already."""
    if not directory.exists():
        tiny_model(seed=seed).save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, **options)


def test_c02_the_same_model_has_the_same_namespace_again(tmp_path):
    assert namespace(saved(tmp_path / "m")).name == namespace(saved(tmp_path / "m")).name


def test_c02_the_same_model_elsewhere_has_the_same_namespace(tmp_path):
    here = namespace(saved(tmp_path / "m"))
    shutil.move(tmp_path / "m", tmp_path / "other" / "m")
    assert namespace(saved(tmp_path / "other" / "m")).name == here.name


def test_k1_o1_the_resolved_dtype_counts_not_the_setting(tmp_path):
    half = namespace(saved(tmp_path / "m", dtype=torch.float16))
    brain = namespace(saved(tmp_path / "m", dtype=torch.bfloat16))
    assert (half.kv_dtype, brain.kv_dtype) == ("float16", "bfloat16")
    assert half.groups == brain.groups  # the same sizes: only the dtype tells them apart
    assert half.name != brain.name

    saved(tmp_path / "m", dtype=torch.float16).save_pretrained(tmp_path / "halved" / "m")
    automatic = saved(tmp_path / "halved" / "m", dtype="auto")
    explicit = saved(tmp_path / "halved" / "m", dtype=torch.float16)
    assert automatic.dtype == torch.float16
    assert namespace(automatic).name == namespace(explicit).name


def test_k1_o2_changed_weights_under_the_same_path_miss(tmp_path):
    first = namespace(saved(tmp_path / "m", seed=1))
    shutil.rmtree(tmp_path / "m")
    second = namespace(saved(tmp_path / "m", seed=2))
    assert first.model == second.model == "m"
    assert first.name != second.name


def test_k1_o2_one_changed_byte_in_the_middle_misses_unless_edges_are_trusted(tmp_path):
    model = saved(tmp_path / "m")
    weights = tmp_path / "big.safetensors"
    weights.write_bytes(bytes(3 << 20))
    edges, full = (namespace(model, files=[weights], edges=edges).name for edges in (True, False))
    raw = bytearray(3 << 20)
    raw[len(raw) // 2] = 1
    weights.write_bytes(raw)
    assert namespace(model, files=[weights], edges=True).name == edges
    assert namespace(model, files=[weights]).name != full


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors.index.json", "modeling_own.py", "sub/w.pt"]
)
def test_c02_every_file_of_the_models_directory_counts(tmp_path, name):
    model = saved(tmp_path / "m")
    (tmp_path / "m" / name).parent.mkdir(exist_ok=True)
    names = set()
    for content in (b"one", b"two"):
        (tmp_path / "m" / name).write_bytes(content)
        names.add(namespace(model).name)
    assert len(names) == 2


def test_k1_o2_another_revision_of_a_hub_model_misses():
    names = set()
    for commit in ("a" * 40, "b" * 40):
        model = tiny_model()
        model.name_or_path = model.config.name_or_path = "org/model"
        model.config._commit_hash = commit
        space = namespace(model)
        assert (space.model, space.revision) == ("org/model", commit)
        assert space.name == namespace(model).name
        names.add(space.name)
    assert len(names) == 2


def test_c02_unknown_weights_are_reused_by_nobody():
    model = tiny_model()
    assert namespace(model).name != namespace(model).name
    assert namespace(model, files=[]).name != namespace(model, files=[]).name


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("rms_norm_eps", 1e-3),
        ("num_hidden_layers", 1),
        ("hidden_act", "gelu"),
        ("sliding_window", 64),
        ("later", 1),
    ],
)
def test_c02_a_setting_overridden_at_load_time_misses(tmp_path, setting, value):
    plain = saved(tmp_path / "m")
    changed = copy.deepcopy(plain)
    setattr(changed.config, setting, value)
    assert namespace(plain).name != namespace(changed).name


def test_c02_rotary_positions_overridden_at_load_time_miss(tmp_path):
    plain = saved(tmp_path / "m")
    changed = copy.deepcopy(plain)
    if hasattr(changed.config, "rope_parameters"):
        changed.config.rope_parameters = {**changed.config.rope_parameters, "rope_theta": 5.0}
    else:
        changed.config.rope_theta = 5.0
    assert namespace(plain).name != namespace(changed).name


def test_c02_block_size_counts_and_the_description_can_be_read(tmp_path):
    model = saved(tmp_path / "m")
    assert namespace(model, tokens_per_block=8).name != namespace(model).name
    description = namespace(model).describe()
    assert description["kv_dtype"] == "float32"
    assert description["tokens_per_block"] == BLOCK
    assert description["groups"][0]["layers"] == ("model.layers.0.self_attn", "model.layers.1.self_attn")


@pytest.mark.parametrize("edges", [False, True])
def test_c02_weights_changed_in_memory_are_other_weights(tmp_path, edges):
    plain, changed = saved(tmp_path / "m"), saved(tmp_path / "m")
    assert namespace(plain, edges=edges).name == namespace(changed, edges=edges).name
    changed.model.layers[1].mlp.down_proj.weight.data.mul_(1.01)
    assert namespace(plain, edges=edges).name != namespace(changed, edges=edges).name


def test_c02_one_item_changed_in_memory_counts(tmp_path):
    plain, changed = saved(tmp_path / "m"), saved(tmp_path / "m")
    changed.model.embed_tokens.weight.data[5, 3] += 1
    assert namespace(plain).name != namespace(changed).name


def test_c02_another_model_of_that_name_in_another_directory_is_not_the_one_loaded(tmp_path, monkeypatch):
    """A relative path means another directory once the process has gone elsewhere."""
    loaded = []
    for place, seed in (("here", 1), ("there", 2)):
        (tmp_path / place).mkdir()
        tiny_model(seed=seed).save_pretrained(tmp_path / place / "m")
        monkeypatch.chdir(tmp_path / place)
        loaded.append(AutoModelForCausalLM.from_pretrained("m", local_files_only=True))
    here, there = loaded
    assert namespace(here).name != namespace(there).name
