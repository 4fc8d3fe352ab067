"""``kvtier doctor`` on accelerators: a simulated GPU, one that lies, others, and none."""

import json
import re
from collections.abc import Iterator

import pytest
import torch

from kvtier import accelerators
from kvtier.main import main
from kvtier_core.transfer import KVLayout, selftest
from tests.transfer.kv import said_to_be_on_a_gpu
from tests.transfer.simgpu.gpu import GPU
from tests.transfer.simgpu.liars import OneBit

pytestmark = [pytest.mark.needs_torch]
_TIERS = "[tiers.cold]\ntype = 'memory'\ncapacity = '64MiB'\n"


def _layout_on(device: torch.device) -> KVLayout:
    tensors = [torch.zeros((8, 4096), dtype=torch.uint8) for _ in range(2)]
    layout = said_to_be_on_a_gpu(KVLayout(tensors))
    object.__setattr__(layout, "device", device)
    return layout


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    """Two GPUs, which are one; whatever they copy is checked by the self-test alone."""
    made = GPU(seed=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Simulated {index}")
    monkeypatch.setattr(accelerators, "_make_layout", _layout_on)
    with made.installed():
        yield made
    assert made.faults == []


@pytest.fixture
def doctor(tmp_path, capsys):
    """Runs the doctor; exit status, and what it printed."""

    def run(*arguments, config=_TIERS):
        file = tmp_path / "kvtier.toml"
        file.write_text(config)
        status = main(["doctor", "--config", str(file), *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_every_accelerator_is_shown_with_its_speed(gpu, doctor):
    status, out, _ = doctor()
    assert status == 0
    for index in (0, 1):
        assert re.search(
            rf"accelerator cuda:{index} \(Simulated {index}\): ok \(stores [\d.]+ GB/s, loads [\d.]+ GB/s, the pool is "
            r"pinned; the self-test took [\d.]+ s\)",
            out,
        )
    assert "all is well (1 tier)" in out


def test_a_pool_that_is_not_pinned_is_said_so(gpu, doctor):
    gpu.pins = False
    status, out, err = doctor()
    assert status == 0
    assert out.count("the pool is NOT pinned") == 2
    assert "CUDA refused to pin the pool" in err


def test_accelerators_are_tried_without_tiers(gpu, doctor):
    status, out, _ = doctor(config="")
    assert status == 0
    assert out.count("accelerator cuda:") == 2
    assert "no tier was tried: no tier is configured" in out


def test_a_gpu_that_copies_wrong_fails_the_examination(gpu, doctor, monkeypatch):
    monkeypatch.setattr(accelerators, "open_device", lambda layout, pool: OneBit(layout, pool, 0, gpu))
    status, out, _ = doctor("--json")
    assert status == 1
    found = json.loads(out)
    assert not found["ok"]
    assert [report["ok"] for report in found["accelerators"]] == [False, False]
    assert re.search(r"cuda:0 .*did not pass.*byte 4095 of block", found["accelerators"][0]["problem"])
    assert [report["ok"] for report in found["tiers"]] == [True]


def test_a_gpu_whose_driver_fails_is_reported_in_the_drivers_words(gpu, doctor, monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(accelerators, "_make_layout", fail)
    status, out, _ = doctor()
    assert status == 1
    assert "accelerator cuda:1 (Simulated 1): FAILED\n  why: RuntimeError: CUDA error: out of memory" in out


def test_an_accelerator_that_torch_does_not_call_cuda_is_tried_as_well(doctor, monkeypatch):
    monkeypatch.setattr(selftest, "_PRODUCTS", 1)
    monkeypatch.setattr(accelerators, "_make_layout", _layout_on)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    made = GPU(0, "xpu")
    with made.installed():
        status, out, _ = doctor()
    assert status == 0
    assert re.search(r"accelerator xpu:0 \(xpu\): ok \(stores .*the pool is NOT pinned", out)
    assert made.faults == []


def test_an_accelerator_without_streams_is_one_that_failed(doctor, monkeypatch):
    monkeypatch.setattr(accelerators, "_make_layout", _layout_on)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    status, out, _ = doctor()
    assert status == 1
    assert (
        "accelerator mps:0 (mps): FAILED\n  why: ValueError: KV on mps:0 can not be moved: torch has no"
        in out
    )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
def test_a_machine_without_any_shows_none(doctor):
    status, out, _ = doctor("--json")
    assert status == 0
    assert json.loads(out)["accelerators"] == []
    assert doctor(config="")[0] == 2
