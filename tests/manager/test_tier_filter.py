"""Which tiers a request may use (C27), from the engine's call and from the request's parameters."""

import pytest

from kvtier_core.manager.tier_filter import resolve_filters
from kvtier_core.values import RequestInfo

TIERS = ["disk", "far"]


def params(**said: object) -> dict[str, object]:
    return {"kvtier": said}


def test_c27_without_a_word_all_tiers_are_allowed():
    assert resolve_filters({}, None, None, TIERS) == (None, None)
    assert resolve_filters({"kvtier": None}, None, None, TIERS) == (None, None)
    assert resolve_filters(params(), None, None, TIERS) == (None, None)


def test_c27_arguments_and_parameters_narrow_one_another():
    far, disk = frozenset({"far"}), frozenset({"disk"})
    assert resolve_filters(params(load_tiers=["far"]), None, ["disk"], TIERS) == (far, disk)
    assert resolve_filters(params(store_tiers=TIERS), None, ["disk"], TIERS) == (None, disk)
    assert resolve_filters(params(store_tiers=["far"]), None, ["disk"], TIERS) == (None, frozenset())
    assert resolve_filters(params(load_tiers=[]), None, None, TIERS) == (frozenset(), None)


def test_c27_an_unknown_tier_is_refused_with_those_there_are_and_the_nearest():
    match = r"store_tiers names 'dusk', but the enabled tiers are 'disk', 'far'; did you mean 'disk'\?"
    with pytest.raises(ValueError, match=match):
        resolve_filters({}, None, ["far", "dusk"], TIERS)
    with pytest.raises(ValueError, match=match):
        resolve_filters(params(store_tiers=["far", "dusk"]), None, None, TIERS)


def test_c27_without_any_tier_every_name_is_refused():
    with pytest.raises(ValueError, match="the enabled tiers are none"):
        resolve_filters({}, ["disk"], None, [])


@pytest.mark.parametrize("nonsense", ["disk", 7, True, [["disk"]], [None], b"disk", [7]])
def test_c27_what_is_no_list_of_names_is_refused(nonsense):
    with pytest.raises(ValueError, match="load_tiers"):
        resolve_filters(params(load_tiers=nonsense), None, None, TIERS)
    with pytest.raises(ValueError, match="load_tiers"):
        resolve_filters({}, nonsense, None, TIERS)


@pytest.mark.parametrize("nonsense", ["load_tiers", ["load_tiers"], 7])
def test_c27_parameters_of_the_wrong_shape_are_refused(nonsense):
    with pytest.raises(ValueError, match="must be a mapping with 'load_tiers' and 'store_tiers'"):
        resolve_filters({"kvtier": nonsense}, None, None, TIERS)


def test_c27_a_misspelt_parameter_is_refused():
    with pytest.raises(ValueError, match="has no 'load_tier': it takes 'load_tiers' and 'store_tiers'"):
        resolve_filters(params(load_tier=["disk"]), None, None, TIERS)


def test_c27_a_request_stores_to_and_loads_from_what_its_parameters_allow(make_bench):
    bench = make_bench(["one", "two"])
    bench.manager.new_request(RequestInfo(request_id="r", params=params(store_tiers=["two"])))
    bench.store("r", 1)
    bench.settle()
    assert [tier.blocks[tier.namespace] != {} for tier in bench.tiers.values()] == [False, True]
    bench.evict_all()
    bench.manager.new_request(RequestInfo(request_id="s"), load_tiers=["one"])
    assert bench.load("s", 1) == []
    bench.manager.new_request(RequestInfo(request_id="t"), load_tiers=["two"])
    assert bench.load("t", 1) == [True]


def test_c27_a_refused_request_leaves_nothing_behind(make_bench):
    bench = make_bench()
    with pytest.raises(ValueError, match="enabled tiers"):
        bench.manager.new_request(RequestInfo(request_id="r"), load_tiers=["none"])
    bench.new("r")
