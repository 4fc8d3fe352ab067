"""Which tiers a request may load from and store to (C27): what the engine and the request's own parameters say.

Each narrows what the other allows: the arguments of the engine's call, and
``kv_transfer_params={"kvtier": {"load_tiers": [...], "store_tiers": [...]}}``.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvtier_core.suggest import did_you_mean

_PARAMS = "kvtier"
_LOAD = "load_tiers"
_STORE = "store_tiers"

Filter = frozenset[str] | None
"""Names of the tiers allowed; ``None`` for all."""


def resolve_filters(
    params: Mapping[str, Any],
    load_tiers: Collection[str] | None,
    store_tiers: Collection[str] | None,
    known: Sequence[str],
) -> tuple[Filter, Filter]:
    """The tiers to load from and to store to.

    Raises ``ValueError`` for a tier that is not configured, and for anything else that can't be meant.
    """
    said = _read_params(params)
    return (
        _narrow(_check(_LOAD, load_tiers, known), _check(_LOAD, said.get(_LOAD), known)),
        _narrow(_check(_STORE, store_tiers, known), _check(_STORE, said.get(_STORE), known)),
    )


def _read_params(params: Mapping[str, Any]) -> Mapping[str, Any]:
    said = params.get(_PARAMS)
    if said is None:
        return {}
    if not isinstance(said, Mapping):
        raise ValueError(  # noqa: TRY004 - a request's own words, like every other mistake in them
            f"kv_transfer_params[{_PARAMS!r}] must be a mapping with {_LOAD!r} and {_STORE!r}, "
            f"not a {type(said).__name__}"
        )
    for name in said:
        if name not in (_LOAD, _STORE):
            raise ValueError(
                f"kv_transfer_params[{_PARAMS!r}] has no {name!r}: it takes {_LOAD!r} and {_STORE!r}"
            )
    return said


def _check(what: str, tiers: object, known: Sequence[str]) -> Filter:
    if tiers is None:
        return None
    # A string is a collection of strings too, and its letters are no tiers.
    if isinstance(tiers, str) or not isinstance(tiers, Collection):
        raise ValueError(f"{what} must be a list of tier names, not {tiers!r}")  # noqa: TRY004 - as above
    for name in tiers:
        if name not in known:
            raise ValueError(
                f"{what} names {name!r}, but the enabled tiers are {', '.join(map(repr, known)) or 'none'}"
                f"{did_you_mean(str(name), known)}"
            )
    return frozenset(tiers)


def _narrow(one: Filter, other: Filter) -> Filter:
    if one is None or other is None:
        return other if one is None else one
    return one & other
