"""How layers merge and how names map to variables, against plain oracles."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.settings.layers import Merged, read_layers, variable_for

names = st.from_regex(r"[a-c][a-c0-9]{0,2}(_[a-c0-9]{1,2})?", fullmatch=True)
values = st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
tables = st.recursive(
    st.dictionaries(names, values, max_size=3),
    lambda inner: st.dictionaries(names, values | inner, max_size=3),
    max_leaves=6,
)


def _merge(weak: Any, strong: Any) -> Any:
    """The rule, said once more in the plainest way: tables merge, anything else is replaced."""
    if not isinstance(weak, dict) or not isinstance(strong, dict):
        return strong
    both = dict(weak)
    for name, value in strong.items():
        both[name] = _merge(weak[name], value) if name in weak else value
    return both


def _leaves(table, path=()):
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


@given(layers=st.lists(tables, min_size=1, max_size=3))
def test_c53_layers_merge_like_nested_tables(layers):
    merged = Merged()
    expected: dict[str, Any] = {}
    for number, layer in enumerate(layers):
        for name, value in layer.items():
            merged.put((name,), value, f"layer {number}")
        expected = _merge(expected, layer)
    assert merged.table(()) == expected


@given(layers=st.lists(tables, min_size=1, max_size=3))
def test_c53_the_source_of_a_value_is_the_last_layer_that_gave_it(layers):
    merged = Merged()
    for number, layer in enumerate(layers):
        for name, value in layer.items():
            merged.put((name,), value, f"layer {number}")
    for path, value in _leaves(merged.table(())):
        if value == {}:
            continue  # an empty table says nothing, so nobody needs to know who said it
        source = merged.source_of(path)
        assert source is not None
        number = int(source.removeprefix("layer "))
        assert (path, value) in list(_leaves(layers[number]))
        for later in layers[number + 1 :]:
            assert path not in dict(_leaves(later))


@given(path=st.lists(names, min_size=1, max_size=4))
def test_c53_every_name_has_one_variable_and_every_variable_one_name(path):
    variable = variable_for(tuple(path))
    layers = read_layers(None, None, {variable: "x"})
    assert [item.path for item in layers.variables] == [tuple(path)]
