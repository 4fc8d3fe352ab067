import functools
from typing import Any, cast

import pluggy
import pytest
from pydantic import ConfigDict, Field, ValidationError

from kvtier_core import PluginError, check_tier_class
from kvtier_core.engine import Namespace
from kvtier_core.hookspecs import PROJECT, REQUIRED_HOOKS
from kvtier_core.tier import BlockTier, Threads, TierHookSpecs, TierInfo, TierSettings, hookimpl


class Block(BlockTier):
    info = TierInfo(medium="fake")

    def open(self): ...
    def contains(self, keys):
        return [False for _ in keys]

    def store(self, key, block): ...
    def load(self, key, into):
        return False

    def delete(self, keys): ...
    def close(self): ...


class Hooks:
    Settings = TierSettings
    info = TierInfo(medium="fake", bounded_by="tier")

    def __init__(self, settings, context): ...

    @hookimpl
    def lookup(self, job): ...
    @hookimpl
    def submit_store(self, job): ...
    @hookimpl
    def submit_load(self, job): ...
    @hookimpl
    def get_finished_jobs(self):
        return []


def _refused(cls):
    with pytest.raises(PluginError) as caught:
        check_tier_class(cls, "kvtier-fake 1.0")
    message = str(caught.value)
    assert message.startswith("kvtier-fake 1.0: ")
    assert cls.__name__ in message
    return message


def _make(base, **members):
    return type(base.__name__, (base,), members)


@pytest.mark.parametrize("cls", [Block, Hooks])
def test_c51_a_right_class_is_accepted(cls):
    check_tier_class(cls)


def test_c51_without_an_origin_the_class_is_named_by_its_module():
    with pytest.raises(
        PluginError, match=r"test_tier_check.*\.Block is not a tier type of kvtier\.tiers\.v1"
    ):
        check_tier_class(_make(Block, info=None, __module__=__name__))


def test_c51_every_hook_can_be_implemented():
    members = {}
    for name, spec in vars(TierHookSpecs).items():
        if hasattr(spec, "kvtier_spec"):
            arguments = ", ".join(spec.__code__.co_varnames[: spec.__code__.co_argcount])
            scope: dict[str, Any] = {}
            exec(f"def {name}({arguments}): ...", scope)
            members[name] = hookimpl(scope[name])
    assert set(REQUIRED_HOOKS) < set(members)
    check_tier_class(_make(Hooks, **members))


def test_c51_what_is_accepted_pluggy_accepts_and_calls():
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(TierHookSpecs)
    manager.register(Hooks(None, None))
    manager.check_pending()
    assert manager.hook.get_finished_jobs() == []


async def _coroutine(self, job): ...
async def _async_generator(self, job):
    yield


def _generator(self, job):
    yield


def _keyword_only(self, *, job): ...
def _default(self, job=None): ...
def _surplus(self, job, extra): ...
def _stars(self, *args): ...
def _double_stars(self, job, **kwargs): ...
def _other_name(self, work): ...
def _no_arguments(): ...


BAD_SHAPES = [
    (_coroutine, "is a coroutine function"),
    (_async_generator, "is an asynchronous generator function"),
    (_generator, "is a generator function"),
    (_keyword_only, "takes 'job' by keyword only"),
    (_default, "gives 'job' a default"),
    (_surplus, "has the surplus argument 'extra'"),
    (_stars, r"takes *args"),
    (_double_stars, "takes **kwargs"),
    (_other_name, "has the surplus argument 'work'"),
    (_other_name, "lacks the argument 'job'"),
    (_no_arguments, "takes no 'self'"),
]


@pytest.mark.parametrize(("function", "problem"), BAD_SHAPES)
def test_c51_a_hook_of_the_wrong_shape_is_refused(function, problem):
    message = _refused(_make(Hooks, submit_load=hookimpl(function)))
    assert f"submit_load {problem}" in message
    assert "submit_load(self, job)" in message


@pytest.mark.parametrize("options", [{"wrapper": True}, {"hookwrapper": True}])
def test_c51_a_lone_wrapper_is_refused(options):
    def lookup(self, job):
        yield

    assert "lookup is a wrapper" in _refused(_make(Hooks, lookup=hookimpl(**options)(lookup)))


def test_c51_a_misspelt_hook_is_refused_with_the_nearest():
    def on_requst_finished(self, request): ...

    message = _refused(_make(Hooks, on_requst_finished=hookimpl(on_requst_finished)))
    assert "on_requst_finished: no such hook" in message
    assert "did you mean 'on_request_finished'?" in message


@pytest.mark.parametrize("hook", REQUIRED_HOOKS)
def test_c51_a_missing_required_hook_is_refused(hook):
    members = {
        name: member for name, member in vars(Hooks).items() if name != hook and not name.startswith("__")
    }
    members["__init__"] = Hooks.__init__
    message = _refused(type("Partial", (), members))
    assert f"{hook}: missing and required; expected @hookimpl {hook}(self" in message
    assert message.count("\n") == 1


def test_c51_an_override_that_lost_its_marker_is_refused():
    def lookup(self, job): ...

    message = _refused(_make(Hooks, lookup=lookup))
    assert "lookup overrides a hook of Hooks but lost its marker" in message


def test_c51_a_hook_without_any_marker_is_refused():
    def reset(self, namespace, description): ...

    assert "reset is named like a hook but has no marker" in _refused(_make(Hooks, reset=reset))


def test_c51_another_projects_marker_does_not_count():
    def lookup(self, job): ...

    marked = pluggy.HookimplMarker("other")(lookup)
    assert "lookup" in _refused(_make(Hooks, lookup=marked))


def test_c51_a_hook_may_be_implemented_under_another_name():
    def stop(self, timeout_s): ...

    check_tier_class(_make(Hooks, stop=hookimpl(specname="shutdown")(stop)))


def test_c51_static_and_decorated_hooks_are_understood():
    def get_finished_jobs():
        return []

    def lookup(self, job): ...

    @functools.wraps(lookup)
    def traced(*args, **kwargs):
        return lookup(*args, **kwargs)

    check_tier_class(
        _make(Hooks, get_finished_jobs=staticmethod(hookimpl(get_finished_jobs)), lookup=hookimpl(traced))
    )


def test_c51_a_block_tier_with_a_missing_method_is_refused():
    class Partial(BlockTier):
        info = TierInfo(medium="fake")

        def open(self): ...

    message = _refused(Partial)
    for expected in (
        "store(self, key, block)",
        "load(self, key, into)",
        "contains(self, keys)",
        "close(self)",
    ):
        assert expected in message
    assert "open" not in message


@pytest.mark.parametrize(
    ("method", "function", "problem"),
    [
        ("load", lambda self, key: False, "load lacks the argument 'into'"),
        ("load", lambda self, into, key: False, "load has its arguments in another order (into, key)"),
        ("delete", _coroutine, "delete is a coroutine function"),
        ("contains", 3, "contains is not a function"),
    ],
)
def test_c51_a_block_tier_method_of_the_wrong_shape_is_refused(method, function, problem):
    assert problem in _refused(_make(Block, **{method: function}))


def test_c52_half_a_batch_interface_is_refused():
    def store_many(self, keys, blocks): ...

    message = _refused(_make(Block, store_many=store_many))
    assert "has store_many but not load_many" in message
    assert "load_many(self, keys, intos)" in message


def test_c55_a_blocking_tier_has_other_ways_to_say_what_it_holds():
    with pytest.raises(PluginError, match=r"info\.reports_contents, but nothing reports: write follow"):
        check_tier_class(_make(Block, info=TierInfo(medium="fake", reports_contents=True)))
    check_tier_class(_make(Hooks, info=TierInfo(medium="fake", bounded_by="tier", reports_contents=True)))


def test_c52_a_persistent_tier_bounded_by_the_core_needs_scan():
    info = TierInfo(medium="fake", persistent=True)
    assert "scan: missing" in _refused(_make(Block, info=info))
    check_tier_class(_make(Block, info=TierInfo(medium="fake", persistent=True, bounded_by="tier")))

    def scan(self):
        yield from ()

    check_tier_class(_make(Block, info=info, scan=scan))

    def picky(self, limit):
        yield from ()

    assert "scan has the surplus argument 'limit'; expected scan(self)" in _refused(
        _make(Block, info=info, scan=picky)
    )


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        (None, "info must be a kvtier_core.tier.TierInfo"),
        ({"medium": "disk"}, "info must be a kvtier_core.tier.TierInfo"),
        (TierInfo(medium=""), "info.medium is empty"),
        (TierInfo(medium="x", bounded_by=cast("Any", "nobody")), "info.bounded_by must be 'core', 'tier' or"),
        (
            TierInfo(medium="x", ttl_by=cast("Any", "redis")),
            "info.ttl_by must be 'core' or 'tier', not 'redis'",
        ),
        (TierInfo(medium="x", ttl_by="tier"), "the core ends the blocks of a tier that it bounds"),
        (
            TierInfo(medium="x", bounded_by="storage", default_capacity=1 << 30),
            "info.default_capacity is set",
        ),
    ],
)
def test_c51_a_wrong_info_is_refused(info, problem):
    assert problem in _refused(_make(Block, info=info))


def test_i21_c55_the_core_bounds_no_tier_on_the_hook_specs():
    message = _refused(_make(Hooks, info=TierInfo(medium="fake")))
    assert "the core can't evict from a tier on the hook specs: set it to 'tier'" in message
    check_tier_class(_make(Hooks, info=TierInfo(medium="fake", bounded_by="storage")))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("scn", "scan"),
        ("store_mny", "store_many"),
        ("hold", "holds"),
        ("touched", "touch"),
        ("mark_as_used", "mark_used"),
        ("removenamespace", "remove_namespace"),
    ],
)
def test_i21_c51_a_misspelt_optional_method_is_refused_with_the_nearest(name, meant):
    def method(self): ...

    message = _refused(_make(_make(Block, **{name: method})))
    assert f"{name}: the interface has no such method; did you mean {meant!r}?" in message
    check_tier_class(_make(Block, **{f"_{name}": method}))


def test_i21_c51_a_misspelt_hook_without_its_marker_is_refused_with_the_nearest():
    def discrd(self, keys): ...

    assert "discrd: the interface has no such method; did you mean 'discard'?" in _refused(
        _make(Hooks, discrd=discrd)
    )


@pytest.mark.parametrize("transient", [OSError, ("OSError",), (OSError, 3), [OSError]])
def test_i21_c52_what_is_no_tuple_of_exceptions_is_refused(transient):
    assert "transient must be a tuple of exception classes" in _refused(_make(Block, transient=transient))


def test_c51_a_constructor_that_takes_other_arguments_is_refused():
    def constructor(self, settings): ...

    assert "can't be built as cls(settings, context)" in _refused(_make(Block, __init__=constructor))


class Redefining(TierSettings):
    capacity: int = 5


class OfMany(TierSettings):
    threads: int = 1000


class OfNone(TierSettings):
    threads: Threads = 0


class Lax(TierSettings):
    model_config = ConfigDict(extra="ignore")


class Aliased(TierSettings):
    root: str = Field(alias="path")


class Shouting(TierSettings):
    ROOT: str = ""


class Doubled(TierSettings):
    a__b: str = ""


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (Redefining, "Settings redefines 'capacity'"),
        (OfMany, "Settings redefines 'threads': only its default may be another, as in threads: Threads = 1"),
        (OfNone, "Settings redefines 'threads': only its default may be another, as in threads: Threads = 1"),
        (Lax, "model_config changes 'extra'"),
        (Aliased, "Settings.root has an alias"),
        (Shouting, "Settings.ROOT: a setting's name is lower case"),
        (Doubled, "Settings.a__b: a setting's name is lower case"),
        (dict, "Settings must be a subclass of kvtier_core.tier.TierSettings"),
        (None, "Settings must be a subclass of kvtier_core.tier.TierSettings"),
    ],
)
def test_c53_wrong_settings_are_refused(settings, problem):
    assert problem in _refused(_make(Block, Settings=settings))


class OfOne(TierSettings):
    threads: Threads = 1


def test_c55_a_type_gives_another_default_for_threads():
    check_tier_class(_make(Block, Settings=OfOne))
    assert OfOne(type="one").threads == 1
    assert OfOne(type="one", threads=7).threads == 7
    with pytest.raises(ValidationError, match="less than or equal to 256"):
        OfOne(type="one", threads=257)


def test_c51_all_problems_are_told_at_once():
    message = _refused(_make(Hooks, info=None, Settings=None, lookup=hookimpl(_coroutine)))
    assert message.count("\n  - ") == 3


def test_c51_a_class_that_is_something_else_entirely_is_refused():
    message = _refused(Namespace)
    for hook in REQUIRED_HOOKS:
        assert hook in message


def test_b20_a_forgotten_base_class_is_what_is_told():
    class Forgot:
        Settings = TierSettings
        info = TierInfo(medium="fake")

        def __init__(self, settings, context): ...
        def open(self): ...
        def contains(self, keys): ...
        def store(self, key, block): ...
        def load(self, key, into): ...
        def delete(self, keys): ...
        def close(self): ...

    message = _refused(Forgot)
    assert "does not subclass BlockTier: begin it with class Forgot(kvtier_core.tier.BlockTier)" in message
    assert "hookimpl" not in message
    assert "lookup" not in message
