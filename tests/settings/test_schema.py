import json
import re

import pytest

from kvtier.main import main
from kvtier.schema import make_schema
from kvtier_core.settings import PoolSettings
from kvtier_core.settings.model import TopSettings
from kvtier_core.tier import TierSettings
from kvtier_core.tier_settings import TierLimits
from kvtier_disk.settings import DiskSettings
from kvtier_fsspec.settings import FsspecSettings
from kvtier_memory.tier import MemorySettings

jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture
def check(install_tier):
    install_tier("fake")
    schema, problems = make_schema()
    assert not [problem for problem in problems if "'fake'" in problem]
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid


def _cold(**settings):
    return {"tiers": {"cold": {"type": "fake", "root": "/", **settings}}}


@pytest.mark.parametrize(
    "right",
    [
        {},
        {"on_reset": "pool", "lookup_order": ["a"], "blocked_plugins": ["x"]},
        {"pool": {"capacity": "8GiB", "max_cascade": 0.2}},
        {"pool": {"capacity": 1 << 30}},
        _cold(),
        _cold(
            limits={"load_timeout": "2s"}, accounts=[{"user": "me"}], named={"a": {"auth": "x"}}, chunk="4KiB"
        ),
        _cold(pause=None, enabled=False, capacity="1GiB", ttl=3600),
        {"tiers": {"d": {"type": "disk", "root": "/x"}, "m": {"type": "memory", "latency": "2ms"}}},
    ],
)
def test_c53_the_schema_accepts_what_is_right(check, right):
    assert check(right)


@pytest.mark.parametrize(
    "wrong",
    [
        {"onreset": "pool"},
        {"on_reset": "everything"},
        {"pool": {"capcity": "8GiB"}},
        {"pool": {"block_size": 0}},
        {"pool": {"capacity": True}},
        {"tiers": {"cold": {"type": "fake"}}},
        {"tiers": {"cold": {"root": "/"}}},
        {"tiers": {"cold": {"type": "unknown", "root": "/"}}},
        {"tiers": {"NVMe2": {"type": "fake", "root": "/"}}},
        {"tiers": {"d": {"type": "disk", "root": "/x", "latency": 1}}},
        _cold(rot="/"),
        _cold(limits={"load_timout": "2s"}),
        _cold(accounts=[{"usr": 1, "user": 2}]),
    ],
)
def test_c53_the_schema_refuses_what_is_wrong(check, wrong):
    assert not check(wrong)


def test_c53_every_setting_is_described_in_the_schema(install_tier):
    install_tier("fake")
    schema, _ = make_schema()
    for name in TopSettings.model_fields:
        assert schema["properties"][name]["description"]
    pool = schema["properties"]["pool"]["properties"]
    assert pool["capacity"]["description"] == "Bytes of host memory."
    assert "description" not in schema


MODELS = [TopSettings, PoolSettings, TierSettings, TierLimits, DiskSettings, FsspecSettings, MemorySettings]


@pytest.mark.parametrize("model", MODELS)
def test_every_setting_is_described_in_one_sentence(model):
    for name, field in model.model_fields.items():
        text = field.description or ""
        assert re.fullmatch(r"[A-Z][^\n]{10,120}\.", text), name
        assert ". " not in text, f"{name} takes more than one sentence"


def test_an_operator_of_a_disk_tier_has_at_most_40_settings():
    schema, _ = make_schema()
    tier = schema["$defs"]["tier.disk"]["properties"]
    limits = schema["$defs"]["tier.disk.TierLimits"]["properties"]
    pool = schema["properties"]["pool"]["properties"]
    assert len(limits) == 8
    assert len(schema["properties"]) + len(pool) + len(tier) + len(limits) <= 40


def test_c50_a_tier_type_that_cannot_be_loaded_is_left_out_and_told(install_tier, capsys):
    install_tier("fake")
    install_tier("broken", source="raise ImportError('libfoo')")
    assert main(["config", "--schema"]) == 0
    out, err = capsys.readouterr()
    schema = json.loads(out)
    assert "tier.fake" in schema["$defs"]
    assert "tier.broken" not in schema["$defs"]
    assert "kvtier: warning: tier type 'broken' is left out" in err
    assert "libfoo" in err


def test_c50_blocked_plugins_are_not_in_the_schema(install_tier):
    install_tier("fake", source="1/0")
    schema, problems = make_schema({"kvtier-fake"})
    assert "tier.fake" not in schema["$defs"]
    assert not [problem for problem in problems if "'fake'" in problem]
