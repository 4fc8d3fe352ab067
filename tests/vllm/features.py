"""What production servers turn on, tried in real vLLM with tiny models: served with right answers, or refused by name.

``python -m tests.vllm.features --json`` tries all, in vLLM's interpreter. A feature is *served* when all answers are
those of vLLM without a connector, and, once the device has forgotten them, the blocks come from the pool, from disk,
and in another engine from disk. ``--page`` writes the table of docs/reference/vllm.md from the same run.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvtier_core import UnsupportedModelError
from tests.vllm import drafters
from tests.vllm.architectures import apart, prepare
from tests.vllm.engine_program import Engine
from tests.vllm.engines import BLOCK, connector, disk, engine_options, prompt
from tests.vllm.models import save_hybrid_model, save_tiny_model

Answers = list[Any]
Options = Mapping[str, Any]
_CHANGES_NO_TOKEN = ("speculative_config", "pipeline_parallel_size", "tensor_parallel_size")
"""Options without which vLLM has to say the same: the answers are compared with those."""


def _none(directory: Path) -> Options:
    del directory
    return {}


def _generate(engine: Engine, directory: Path) -> Answers:
    del directory
    wanted = [prompt(seed, blocks=4) for seed in (1, 2)]
    return [item["tokens"] for item in engine.generate(wanted, max_tokens=2 * BLOCK)]


class Feature(NamedTuple):
    """One to try: how it is turned on, and what is asked then. Everything it needs is made in a directory."""

    options: Callable[[Path], Options] = _none
    ask: Callable[[Engine, Path], Answers] = _generate
    model: Callable[[Path], Path] = save_tiny_model
    processes: bool = False
    """Whether scheduler and workers have processes of their own."""
    environment: Mapping[str, str] = {}


class Outcome(NamedTuple):
    """How many answers there were, all of them right, and the tokens that came from kvtier, not computed."""

    answers: int
    hits: int
    after_restart: int


def _speculating(method: str, save: Callable[[Path, Path], Path] | None = None, **more: Any) -> Feature:
    """Three tokens are proposed, by a drafter that *save* makes for a model."""

    def options(directory: Path) -> Options:
        drafter = {} if save is None else {"model": str(save(directory / "drafter", directory / "model"))}
        return {
            "speculative_config": {"method": method, "num_speculative_tokens": 3, **drafter, **more},
        }

    return Feature(options)


def _stages(of_layers: str, model: Callable[[Path], Path]) -> Feature:
    """A pipeline of two stages with that many layers each."""
    return Feature(
        lambda directory: {"pipeline_parallel_size": 2},
        model=model,
        processes=True,
        environment={"VLLM_PP_LAYER_PARTITION": of_layers},
    )


def _save_layers(count: int) -> Callable[[Path], Path]:
    return partial(save_tiny_model, num_hidden_layers=count)


FEATURES: dict[str, Feature] = {
    "plain": Feature(),
    "speculation: ngram": _speculating("ngram", prompt_lookup_max=2, prompt_lookup_min=1),
    "speculation: draft model": _speculating("draft_model", drafters.save_same),
    "speculation: EAGLE": _speculating("eagle", drafters.save_eagle),
    "speculation: EAGLE3": _speculating("eagle3", drafters.save_eagle3),
    "speculation: Medusa": _speculating("medusa", drafters.save_medusa),
    "speculation: MTP": _speculating("mtp", num_speculative_tokens=1)._replace(model=drafters.save_ernie),
    "pipeline 2 + 2": _stages("2,2", _save_layers(4)),
    "pipeline 3 + 2": _stages("3,2", _save_layers(5)),
    "pipeline, a stage without full attention": _stages("1,3", save_hybrid_model),
    "tensor parallel 2": Feature(lambda directory: {"tensor_parallel_size": 2}, processes=True),
}
"""By what people call it."""


def try_out(feature: Feature, directory: Path) -> Outcome:
    """What becomes of a feature, with all it needs in *directory*, which is empty. Raises ``AssertionError``."""
    model = apart(feature.model, directory / "model")
    options = {"num_gpu_blocks_override": 200, **apart(feature.options, directory)}
    alone = {name: value for name, value in options.items() if name not in _CHANGES_NO_TOKEN}
    right = apart(_ask_alone, feature, directory, engine_options(model, **alone, enable_prefix_caching=False))
    assert len({str(answer) for answer in right}) > 1, f"the answers say nothing: {right}"
    with_kvtier = engine_options(model, connector(disk(directory / "root", pool="32MiB")), **options)
    given, hits = apart(_ask_with_kvtier, feature, directory, with_kvtier)
    again, after_restart = apart(_ask_after_restart, feature, directory, with_kvtier)
    wrong = [each for each in (*given, again) if each != right]
    assert not wrong, f"{wrong[0]} and not {right}"
    return Outcome(len(right) * (len(given) + 1), hits, after_restart)


def _start(feature: Feature, options: Options) -> Engine:
    several = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ.update(feature.environment, **several if feature.processes else {})
    engine = Engine(dict(options))
    if options.get("pipeline_parallel_size"):
        engine.llm.collective_rpc(_complete_stage)
    return engine


def _complete_stage(worker: Any) -> None:
    """Make what vLLM's runner for CPUs makes only when it compiles: a place for what the stage before computed."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


def _ask_alone(feature: Feature, directory: Path, options: Options) -> Answers:
    engine = _start(feature, options)
    answers = feature.ask(engine, directory)
    engine.close()
    return answers


def _ask_with_kvtier(feature: Feature, directory: Path, options: Options) -> tuple[list[Answers], int]:
    """The answers computed, from the pool and from disk; the tokens that came from kvtier, of the least of the two."""
    engine = _start(feature, options)
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


def _ask_after_restart(feature: Feature, directory: Path, options: Options) -> tuple[Answers, int]:
    engine = _start(feature, options)
    answers = feature.ask(engine, directory)
    hits = count_hits(engine)
    assert hits, "nothing came from the disk after a restart"
    engine.close()
    return answers, hits


def count_hits(engine: Engine) -> int:
    """The tokens that the engine did not compute because kvtier had them."""
    return int(engine.metrics().get("vllm:external_prefix_cache_hits", 0))


def settle(engine: Engine) -> None:
    """Step until the disk has all that the pool was given."""
    stored = {"vllm:kvtier_device_stored_blocks": 0.0}
    while not (on_device := stored["vllm:kvtier_device_stored_blocks"]) or on_device > sum(
        value for name, value in stored.items() if "kvtier_tier_stored_blocks" in name
    ):
        engine.generate([[1, 2, 3]])  # vLLM stores, and tells of it, in the steps after
        stored = {"vllm:kvtier_device_stored_blocks": 0.0, **engine.metrics()}


def main(arguments: list[str] | None = None) -> int:
    """Try all, or those named; the exit status says whether an answer was wrong, or something else was a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.features", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    parser.add_argument("names", nargs="*", help="features of the table; all of them without")
    given = parser.parse_args(arguments)
    prepare()
    report: dict[str, Any] = {"served": {}, "refused": {}, "wrong": 0, "faults": 0}
    for name in given.names or FEATURES:
        with tempfile.TemporaryDirectory(prefix="kvtier-feature-") as directory:
            try:
                outcome = try_out(FEATURES[name], Path(directory))
            except UnsupportedModelError as error:
                report["refused"][name] = str(error)
                said = f"refused {error}"
            except AssertionError as error:
                report["wrong"] += 1
                said = f"WRONG {error}"
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a fault
                report["faults"] += 1
                said = f"FAULT {type(error).__name__}: {error}"
            else:
                report["served"][name] = outcome._asdict()
                said = f"served {outcome}"
        sys.stderr.write(f"{name}: {said[:3000]}\n")
    if given.json:
        sys.stdout.write(f"{json.dumps(report)}\n")
    return 1 if report["wrong"] or report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
