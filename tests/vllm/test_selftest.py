"""Every worker tests its device before vLLM serves a request; and a copy that fails later."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm.engines import EngineError, connector, disk, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]
_REFUSED = (
    r"UnsupportedModelError: kvtier-vllm can't serve this engine: cpu \(worker 0\) did not pass kvtier's self-test: "
    r"in round 1 of 7, "
)
_TELLING = {"VLLM_LOGGING_CONFIG_PATH": str(Path(__file__).with_name("logging.json"))}


def _bad(kind: str) -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parent), "BAD_DEVICE": kind}


@pytest.mark.parametrize("workers", [1, 2])
def test_each_worker_of_a_real_engine_passes_and_the_answers_are_right(start, tmp_path, plain, workers):
    options: dict[str, Any] = {"tensor_parallel_size": workers, "processes": 2 * workers}
    engine = start(connector(disk(tmp_path)), environment=_TELLING, **options)
    passed = re.findall(
        r"worker (\d) on cpu passed kvtier's self-test: stores .* took \d+\.\d\d s", engine.log()
    )
    assert sorted(passed) == [str(worker) for worker in range(workers)]
    wanted = prompt(1)
    assert engine.store(wanted) == plain.generate(wanted)
    assert engine.call("reset")
    assert engine.generate(wanted) == plain.generate(wanted)
    assert engine.call("metrics")["vllm:external_prefix_cache_hits"] > 0
    assert engine.close() == 0


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("lies", r".*byte 3 of block \d+'s page in tensor 1 of KV group 0"),
        ("fails", r"a store failed: OSError: the bus is on fire"),
    ],
)
def test_a_device_that_copies_wrong_stops_a_real_engine_at_its_start(start, tmp_path, kind, what):
    with pytest.raises(EngineError) as raised:
        start(connector(disk(tmp_path), spec_module_path="bad_device_spec"), environment=_bad(kind))
    assert re.search(f"{_REFUSED}{what}", str(raised.value))
    assert not list(tmp_path.iterdir()), "a tier was opened"


def _refuse_misread(start, root, parts, **options):
    """A worker that misreads a page of so many *parts* is refused before a tier is opened."""
    environment = {"PYTHONPATH": str(Path(__file__).parent), "PARTS": str(parts)}
    with pytest.raises(EngineError) as raised:
        start(
            connector(disk(root, pool="64MiB"), spec_module_path="misreading_spec"),
            environment=environment,
            **options,
        )
    assert re.search(
        rf"{_REFUSED}after a load, byte 0 of block \d+'s page in tensor 0 of KV group 0", str(raised.value)
    )
    assert not list(root.iterdir()), "a tier was opened"


@pytest.mark.parametrize("parts", [2, 4], ids=["K and V", "two heads"])
def test_i17_c05_a_worker_that_misreads_one_layer_is_refused_at_its_start(start, tmp_path, parts):
    _refuse_misread(start, tmp_path, parts)


@pytest.mark.real_model
@pytest.mark.parametrize("parts", [2, 6], ids=["K and V", "two heads"])
def test_i17_c05_smollm2_is_refused_at_its_start_where_one_layer_is_misread(start, tmp_path, smollm2, parts):
    _refuse_misread(start, tmp_path, parts, model=smollm2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_that_fails_ends_offloading_and_the_engine_goes_on(start, tmp_path, plain, workers):
    settings = connector(disk(tmp_path), spec_module_path="bad_device_spec")
    options: dict[str, Any] = {"tensor_parallel_size": workers, "processes": 2 * workers}
    engine = start(settings, environment=_bad("store"), **options)
    for seed in (1, 2, 1):
        wanted = prompt(seed)
        assert engine.store(wanted) == plain.generate(wanted)
        assert engine.call("reset")  # of the device's cache alone: what is not offloaded is computed
    metrics = engine.call("metrics")
    assert metrics.get("vllm:external_prefix_cache_hits", 0) == 0
    assert metrics.get('vllm:kvtier_tier_stored_blocks{"tier": "disk"}', 0) == 0
    assert engine.close() == 0
    errors = [line for line in engine.log().splitlines() if "the bus is on fire" in line]
    assert len(errors) == 1, errors
    assert re.search(
        rf"worker {workers - 1}: a device store failed \(OSError: the bus is on fire\): nothing is offloaded or loaded "
        "any more, and the engine goes on without. Start it again to offload; if this comes again",
        errors[0],
    )


def test_a_load_that_fails_stops_the_engine_and_the_log_says_what_to_do(start, tmp_path):
    settings = connector(disk(tmp_path), spec_module_path="bad_device_spec")
    engine = start(settings, environment=_bad("load"))
    wanted = prompt(1)
    engine.store(wanted)
    assert engine.call("reset")
    with pytest.raises(EngineError):
        engine.generate(wanted)
    assert re.search(
        r"worker 0: a device load failed \(OSError: the bus is on fire\): vLLM can't compute these blocks instead, and "
        "stops. Start it again; if this comes again, run it without kvtier and report this line",
        engine.log(),
    )


@pytest.mark.filterwarnings("ignore")  # what vLLM imports may warn
@pytest.mark.parametrize(
    ("device", "is_served"),
    [("cpu", True), ("cuda:1", True), ("xpu:0", True), ("meta", False), ("mps", False)],
)
def test_devices_that_kvtier_can_not_copy_from_are_refused_by_name(device, is_served):
    from kvtier_core import UnsupportedModelError
    from kvtier_vllm.spec import _check_device

    tensor = SimpleNamespace(device=torch.device(device))
    kv_caches: Any = SimpleNamespace(tensors=[SimpleNamespace(tensor=tensor)])
    if is_served:
        assert _check_device(kv_caches) == torch.device(device).type
    else:
        with pytest.raises(UnsupportedModelError, match=f"KV on {device}:.*Run this engine without kvtier"):
            _check_device(kv_caches)
