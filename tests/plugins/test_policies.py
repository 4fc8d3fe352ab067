import logging
import sys

import pytest

from kvtier_core import ConfigError, PluginError, load_settings
from kvtier_core.engine import GroupSpec, Namespace, open_session
from kvtier_core.plugins import load_policy
from kvtier_core.policies import LRU, CheckedPolicy, Entry
from kvtier_memory import MemoryTier
from kvtier_testing.driving import TierDriver
from kvtier_testing.rows import similar_keys
from tests.policies.every import FROM_PLUGINS

MRU = """
class MRU:
    capacities = []

    def __init__(self, capacity):
        self.capacities.append(capacity)
        self.entries = []

    def insert(self, entries): self.entries += entries
    def release(self, entries): ...
    def remove(self, entries):
        self.entries = [entry for entry in self.entries if entry not in entries]
    def evict(self, n, keep):
        newest = [entry for entry in reversed(self.entries) if entry.key not in keep and not entry.pins][:n]
        self.remove(newest)
        return newest
"""


@pytest.fixture
def install_policy(site):
    def install(name="mru", *, source=MRU, distribution="kvtier-mru", target="MRU"):
        module = distribution.replace("-", "_") + "_module"
        site.install(distribution, {"kvtier.policies.v1": {name: f"{module}:{target}"}}, {module: source})

    return install


def _config(tmp_path, text):
    file = tmp_path / "kvtier.toml"
    file.write_text(text)
    return file


def test_c14_a_plugins_policy_is_found_by_name_and_imported_only_then(install_policy):
    install_policy()
    assert load_policy("lru")(3).evict(1, frozenset()) == []
    assert "kvtier_mru_module" not in sys.modules
    policy = load_policy("mru")(7)
    a, b, c = entries = [Entry.of(key) for key in similar_keys(3)]
    policy.insert(entries)
    assert policy.evict(2, {b.key}) == [c, a]
    assert sys.modules["kvtier_mru_module"].MRU.capacities == [1, 7]


@pytest.mark.needs_torch
def test_c14_the_pool_and_a_tier_use_the_plugins_policy_that_the_settings_name(
    install_policy, install_tier, tmp_path
):
    import torch

    from kvtier_core.transfer import KVLayout

    install_policy()
    install_tier("fake", source="from kvtier_memory import MemoryTier as Tier")
    text = (
        "[pool]\npolicy = 'mru'\ncapacity = '20KiB'\nprefault = false\n"
        "[tiers.cold]\ntype = 'fake'\npolicy = 'mru'\ncapacity = '12KiB'\n"
    )
    settings = load_settings(file=_config(tmp_path, text), environ={})
    assert set(settings.policies) == {"mru"}
    layout = KVLayout([torch.zeros(4, 16, 8)])
    namespace = Namespace(
        model="toy",
        kv_dtype="float32",
        tokens_per_block=16,
        groups=(GroupSpec(layers=("0",), block_bytes=layout.payload_bytes[0]),),
        layout="toy",
    )
    with open_session(settings, namespace, layout):
        capacities = sys.modules["kvtier_mru_module"].MRU.capacities
        assert {5, 3} <= set(capacities), "rows of the pool, blocks of the tier"


def test_c14_a_blocking_tier_evicts_by_a_plugins_policy(install_policy):
    from kvtier_testing.rows import RowMaker

    install_policy()
    policies = {"mru": load_policy("mru")}
    maker = RowMaker("kit-namespace", 4000)
    keys = similar_keys(3)
    settings = MemoryTier.Settings(type="memory", policy="mru", threads=1)
    with TierDriver(
        MemoryTier,
        settings,
        row_bytes=maker.row_bytes,
        capacity_bytes=2 * maker.row_bytes,
        policies=policies,
    ) as tier:
        for key in keys:
            assert tier.store({key: maker.make(key)}).error is None
        assert tier.lookup(keys) == [True, False, True]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("self.entries[:n]", "gave a block that is in use"),
        ("[entry for entry in self.entries if not entry.pins][:n]", "gave a block that was to be kept"),
        ("self.entries[2:][:n - 1]", "was asked for 2 blocks, and gave 1"),
        ("self.entries[2:3] * n", "was asked for 2 blocks, and gave 1"),
    ],
)
def test_c13_c30_a_policy_that_gives_out_what_it_must_not_is_named_before_a_byte_is_lost(
    install_policy, answer, problem
):
    install_policy(
        source=MRU.replace("return newest", f"return {answer}").replace("self.remove(newest)", "...")
    )
    policy = load_policy("mru")(4)
    held, kept, *others = entries = [Entry.of(key) for key in similar_keys(4)]
    held.pins = 1
    policy.insert(entries)
    with pytest.raises(PluginError, match=rf"'mru' of kvtier-mru 1\.0.* {problem}"):
        policy.evict(2, {kept.key})
    assert len(others) == 2


def test_k10_o2_a_builtin_name_wins_and_the_collision_is_an_error_in_the_log(install_policy, caplog):
    install_policy("lru", source="raise ImportError")
    with caplog.at_level(logging.ERROR, "kvtier"):
        assert isinstance(load_policy("lru")(1), LRU)
    assert "'lru' is built in; the one of that name from kvtier-mru 1.0" in caplog.text


def test_k10_o2_two_distributions_with_one_policy_are_an_error_naming_both(install_policy):
    install_policy()
    install_policy(distribution="other-mru")
    with pytest.raises(PluginError, match=r"'mru' is offered by kvtier-mru 1\.0 .* and other-mru 1\.0"):
        load_policy("mru")


@pytest.mark.parametrize(
    ("source", "target", "problem"),
    [
        ("raise ImportError('no')", "MRU", "can't be imported .*ImportError: no"),
        ("MRU = 3", "MRU", "which can't be called with a capacity"),
        ("class MRU: ...", "MRU", "with a capacity of 1 raised TypeError"),
        (
            MRU.replace("def release(self, entries)", "def relaese(self, entries)"),
            "MRU",
            r"release: missing; expected release\(self, entries\)",
        ),
        (
            MRU.replace("def insert(self, entries): self.entries += entries", "def insert(self): ..."),
            "MRU",
            r"insert lacks the argument 'entries'",
        ),
        (
            MRU.replace("def evict(self, n, keep)", "async def evict(self, n, keep)"),
            "MRU",
            "evict is a coroutine",
        ),
    ],
)
def test_k10_o3_a_broken_policy_is_refused_with_what_is_wrong(install_policy, source, target, problem):
    install_policy(source=source, target=target)
    with pytest.raises(PluginError, match=rf"(?s)eviction policy 'mru' of kvtier-mru 1\.0.*{problem}"):
        load_policy("mru")


@pytest.mark.parametrize("table", ["[pool]", "[tiers.cold]\ntype = 'fake'\nroot = '/'"])
def test_k9_o3_an_unknown_policy_names_the_nearest_at_settings_load(
    install_policy, install_tier, tmp_path, table
):
    install_policy()
    install_tier("fake")
    with pytest.raises(
        ConfigError,
        match=r"policy \(file:.*unknown eviction policy 'mra'; did you mean 'mru'\?.*lru, mru, s3fifo",
    ):
        load_settings(file=_config(tmp_path, f"{table}\npolicy = 'mra'\n"), environ={})


@pytest.mark.parametrize("name", FROM_PLUGINS)
def test_c14_our_policies_are_found_by_their_entry_points(name):
    policy = load_policy(name)(4)
    assert isinstance(policy, CheckedPolicy)
    entries = [Entry.of(key) for key in similar_keys(2)]
    policy.insert(entries)
    assert set(policy.evict(2, frozenset())) == set(entries)


def test_c14_a_policy_of_ours_that_is_not_installed_names_its_package(monkeypatch):
    monkeypatch.setattr("kvtier_core.plugins.loading.find_offers", lambda _group, _blocked: [])
    with pytest.raises(
        PluginError, match="eviction policy 'arc' is not installed: pip install kvtier-policies"
    ):
        load_policy("arc")
