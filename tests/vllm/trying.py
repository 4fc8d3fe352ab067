"""How one feature of vLLM's servers is tried, in engines of its own. Decides what counts as served."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm.architectures import apart
from tests.vllm.asks import Answers, generate
from tests.vllm.engine_program import Engine
from tests.vllm.engines import connector, disk, engine_options
from tests.vllm.models import save_tiny_model
from tests.vllm.served import Served

Options = Mapping[str, Any]
_CHANGES_NO_TOKEN = (
    "data_parallel_size",
    "nodes",
    "pipeline_parallel_size",
    "speculative_config",
    "tensor_parallel_size",
)
"""Options without which vLLM has to say the same: the answers are compared with those."""


def fixed(**options: Any) -> Callable[[Path], Options]:
    """Options that need no files. ``connector`` are those of the connector."""
    return lambda directory: options


class Feature(NamedTuple):
    """One to try: how it is turned on, and what is asked then. Everything it needs is made in a directory."""

    options: Callable[[Path], Options] = fixed()
    ask: Callable[[Any, Path], Answers] = generate
    model: Callable[[Path], Path] = save_tiny_model
    processes: bool = False
    """Whether scheduler and workers have processes of their own, also where tensor parallelism does not need them."""
    environment: Mapping[str, str] = {}
    """Of an engine with a pipeline."""
    beside: Callable[[Path], Options] | None = None
    """Another connector, in vLLM's ``MultiConnector`` behind kvtier's."""
    between: Callable[[Path], Options] | None = None
    """Options of an engine that comes before the restart, answers the same, and is not given what the first stored."""
    later: Callable[[Path], Options] = fixed()
    """Options that the engine after the restart has otherwise."""
    like_for_like: bool = False
    """Whether it is compared with the same options, and later answers with those after vLLM's own prefix cache: kernels
    round otherwise there, or the answers tell of the options."""
    refused: str = ""
    """What the refusal names, where it is refused."""


class Outcome(NamedTuple):
    """How many answers there were, all of them right, and the tokens that came from kvtier, not computed."""

    answers: int
    hits: int
    after_restart: int


def together(*features: Feature) -> Feature:
    """All of them turned on in one engine. Where two ask or have a model of their own, the later one's is taken."""

    def options(directory: Path) -> Options:
        return {name: value for each in features for name, value in each.options(directory).items()}

    def last(field: str) -> Any:
        default = Feature._field_defaults[field]
        return next(
            (own for each in reversed(features) if (own := getattr(each, field)) is not default), default
        )

    fields = {field: last(field) for field in Feature._fields}
    return Feature(**{**fields, "options": options})


def try_out(feature: Feature, directory: Path) -> Outcome:
    """What becomes of a feature, with all it needs in *directory*, which is empty. Raises ``AssertionError``."""
    model = apart(feature.model, directory / "model")
    options = {"num_gpu_blocks_override": 200, **apart(feature.options, directory)}
    transfer = connector(disk(directory / "root", pool="32MiB"), **options.pop("connector", {}))
    if feature.beside is not None:
        both = {"connectors": [transfer, feature.beside(directory)]}
        transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": both}
    with_kvtier = engine_options(model, transfer, **options)
    if feature.refused:
        apart(_start, feature, with_kvtier, directory)
        raise AssertionError("it was not refused")
    alone = {
        name: value
        for name, value in options.items()
        if feature.like_for_like or name not in _CHANGES_NO_TOKEN
    }
    computed, cached = apart(_ask_alone, feature, directory, engine_options(model, **alone))
    assert len({str(answer) for answer in computed}) > 1, f"the answers say nothing: {computed}"
    assert feature.like_for_like or cached == computed, f"vLLM alone says {computed}, then {cached}"
    given, hits = apart(_ask_with_kvtier, feature, directory, with_kvtier)
    if feature.between is not None:
        changed = {**with_kvtier, **apart(feature.between, directory)}
        others, foreign = apart(_ask_again, feature, directory, changed)
        assert not foreign, f"{foreign} tokens came from another engine's blocks"
        given.append(others)
    later = apart(feature.later, directory)
    last = cached
    if later and feature.like_for_like:
        _, last = apart(_ask_alone, feature, directory, engine_options(model, **{**alone, **later}))
    again, after_restart = apart(_ask_again, feature, directory, {**with_kvtier, **later})
    assert after_restart, "nothing came from the disk after a restart"
    answers = [*given, again]
    right = [computed, *[cached] * (len(given) - 1), last]
    assert answers == right, f"{answers} and not {right}"
    return Outcome(sum(map(len, answers)), hits, after_restart)


def _start(feature: Feature, options: Options, directory: Path) -> Engine | Served:
    if "data_parallel_size" in options:
        return Served(directory, dict(options))
    if feature.processes or options.get("tensor_parallel_size", 1) > 1:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    if "pipeline_parallel_size" in options:
        os.environ.update(feature.environment)
    return Engine(dict(options))


def _ask_alone(feature: Feature, directory: Path, options: Options) -> tuple[Answers, Answers]:
    """The answers that vLLM computes, and those it gives after its own prefix cache."""
    engine = _start(feature, options, directory)
    answers = feature.ask(engine, directory), feature.ask(engine, directory)
    engine.close()
    return answers


def _ask_with_kvtier(feature: Feature, directory: Path, options: Options) -> tuple[list[Answers], int]:
    """The answers computed, from the pool and from disk; the tokens that came from kvtier, of the least of the two."""
    engine = _start(feature, options, directory)
    answers = [feature.ask(engine, directory)]
    settle(engine)
    hits = []
    for connector_too in (False, True):
        before = count_hits(engine)
        assert engine.reset(connector=connector_too)
        answers.append(feature.ask(engine, directory))
        hits.append(count_hits(engine) - before)
    assert all(hits), f"tokens from pool and disk: {hits}"
    engine.close()
    return answers, min(hits)


def _ask_again(feature: Feature, directory: Path, options: Options) -> tuple[Answers, int]:
    """The answers of a new engine, and the tokens that came from disk."""
    engine = _start(feature, options, directory)
    answers = feature.ask(engine, directory)
    hits = count_hits(engine)
    engine.close()
    return answers, hits


def count_hits(engine: Engine | Served) -> int:
    """The tokens that were not computed because kvtier had them."""
    return sum(int(each.get("vllm:external_prefix_cache_hits", 0)) for each in engine.metrics_of_each())


def settle(engine: Engine | Served) -> None:
    """Step until the disk has all that each pool was given."""
    _step(engine)  # vLLM stores, and tells of it, in the steps after
    while not all(map(_is_stored, engine.metrics_of_each())):
        _step(engine)


def _is_stored(metrics: Mapping[str, float]) -> bool:
    on_device = metrics.get("vllm:kvtier_device_stored_blocks", 0)
    stored = sum(value for name, value in metrics.items() if "kvtier_tier_stored_blocks" in name)
    return 0 < on_device <= stored


def _step(engine: Engine | Served) -> None:
    if engine.options.get("runner") == "pooling":
        engine.llm.embed([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
    else:
        engine.generate([[1, 2, 3]] * engine.options.get("data_parallel_size", 1))
