"""What production servers turn on, tried in real vLLM with tiny models: served with right answers, or refused by name.

``python -m tests.vllm.features --json`` tries all, in vLLM's interpreter. A feature is *served* when all answers are
those of vLLM without a connector, and, once the device has forgotten them, the blocks come from the pool, from disk,
and in another engine from disk. ``--page`` writes docs/reference/vllm.md from the same run.
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
from tests.vllm.architectures import MODELS, apart, make, prepare
from tests.vllm.engine_program import Engine
from tests.vllm.engines import BLOCK, connector, disk, engine_options, prompt
from tests.vllm.models import (
    save_adapter,
    save_hybrid_model,
    save_tiny_model,
    save_with_tokenizer,
    until_settled,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "vllm.md"
Answers = list[Any]
Options = Mapping[str, Any]
_CHANGES_NO_TOKEN = ("speculative_config", "pipeline_parallel_size", "tensor_parallel_size")
"""Options without which vLLM has to say the same: the answers are compared with those."""


def _fixed(**options: Any) -> Callable[[Path], Options]:
    """Options that need no files. ``connector`` are those of the connector."""
    return lambda directory: options


def _prompts() -> list[list[int]]:
    return [prompt(seed, blocks=4) for seed in (1, 2)]


def _generate(engine: Engine, directory: Path) -> Answers:
    del directory
    return [item["tokens"] for item in engine.generate(_prompts(), max_tokens=2 * BLOCK)]


def _one_by_one(engine: Engine, directory: Path) -> Answers:
    """So that no kernel rounds by who else asks, and a few tokens alone, so that no rounding adds up."""
    del directory
    return [engine.generate([each])[0]["tokens"] for each in _prompts()]


def _with_adapters(engine: Engine, directory: Path) -> Answers:
    """The answers of two adapters and of the model alone."""
    answers = _generate(engine, directory)
    for number in (1, 2):
        path = str(directory / f"adapter-{number}")
        given = {"name": f"adapter-{number}", "number": number, "path": path}
        answers += [item["tokens"] for item in engine.generate(_prompts(), adapter=given)]
    return answers


def _sampled(engine: Engine, **sampling: Any) -> Answers:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=BLOCK, ignore_eos=True, detokenize=False, **sampling)
    outputs = engine.llm.generate([{"prompt_token_ids": each} for each in _prompts()], params, use_tqdm=False)
    return [[list(said.token_ids) for said in output.outputs] for output in outputs]


def _several_samples(engine: Engine, directory: Path) -> Answers:
    del directory
    return _sampled(engine, n=3, temperature=1.0, seed=1)


def _by_priority(engine: Engine, directory: Path) -> Answers:
    del directory
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=BLOCK, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": each} for each in _prompts()]
    outputs = engine.llm.generate(given, params, use_tqdm=False, priority=[1, 0])
    return [list(output.outputs[0].token_ids) for output in outputs]


def _by_embeddings(engine: Engine, directory: Path) -> Answers:
    """The prompts as the vectors that the model has for their tokens."""
    import torch
    from safetensors.torch import load_file
    from vllm import SamplingParams

    vectors = load_file(directory / "model" / "model.safetensors")["model.embed_tokens.weight"]
    params = SamplingParams(temperature=0, max_tokens=BLOCK, ignore_eos=True, detokenize=False)
    given = [{"prompt_embeds": vectors[torch.tensor(each)]} for each in _prompts()]
    outputs = engine.llm.generate(given, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _pooled(engine: Engine, directory: Path) -> Answers:
    """The prompts' embeddings, to three digits."""
    del directory
    outputs = engine.llm.embed([{"prompt_token_ids": each} for each in _prompts()], use_tqdm=False)
    return [[round(number, 3) for number in output.outputs.embedding] for output in outputs]


def _in_beams(engine: Engine, directory: Path) -> Answers:
    del directory
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    outputs = engine.llm.beam_search([{"prompt_token_ids": each} for each in _prompts()], params)
    return [[list(beam.tokens)[-8:] for beam in output.sequences] for output in outputs]


def _structured(engine: Engine, directory: Path) -> Answers:
    """Ten digits each."""
    del directory
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(
        temperature=0, max_tokens=10, structured_outputs=StructuredOutputsParams(regex="[0-9]{10}")
    )
    outputs = engine.llm.generate([{"prompt_token_ids": each} for each in _prompts()], params, use_tqdm=False)
    said = [output.outputs[0].text.replace(" ", "") for output in outputs]
    assert all(text.isdigit() for text in said), said
    return said


def _storing_files(directory: Path) -> Options:
    """vLLM's example of a connector, which writes every prompt to a directory."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory / "files")},
    }


def _latent(directory: Path) -> Path:
    make(MODELS["DeepSeek V2, latent attention"], directory)
    return directory


def _save_adapters(directory: Path) -> Options:
    for number in (1, 2):
        save_adapter(directory / f"adapter-{number}", seed=number)
        until_settled(directory / f"adapter-{number}")
    return {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


class Feature(NamedTuple):
    """One to try: how it is turned on, and what is asked then. Everything it needs is made in a directory."""

    options: Callable[[Path], Options] = _fixed()
    ask: Callable[[Engine, Path], Answers] = _generate
    model: Callable[[Path], Path] = save_tiny_model
    processes: bool = False
    """Whether scheduler and workers have processes of their own."""
    environment: Mapping[str, str] = {}
    """Of an engine with a pipeline."""
    beside: Callable[[Path], Options] | None = None
    """Another connector, in vLLM's ``MultiConnector`` behind kvtier's."""
    rounds_otherwise: bool = False
    """Whether vLLM's kernels round otherwise with several workers and after cached tokens: then it is compared with as
    many workers, and later answers with those after vLLM's own prefix cache."""
    refused: str = ""
    """What the refusal names, where it is refused."""


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
        _fixed(pipeline_parallel_size=2),
        model=model,
        processes=True,
        environment={"VLLM_PP_LAYER_PARTITION": of_layers},
    )


def _save_layers(count: int) -> Callable[[Path], Path]:
    return partial(save_tiny_model, num_hidden_layers=count)


VLLM = "0.32"
FEATURES: dict[str, Feature] = {
    "plain": Feature(),
    "pipeline 2 + 2": _stages("2,2", _save_layers(4)),
    "pipeline 3 + 2": _stages("3,2", _save_layers(5)),
    "pipeline, a stage without full attention": _stages("1,3", save_hybrid_model),
    "tensor parallel 2": Feature(_fixed(tensor_parallel_size=2), processes=True),
    "latent attention, tensor parallel 2": Feature(
        _fixed(tensor_parallel_size=2, prefix_caching_of_mla=True),
        _one_by_one,
        model=_latent,
        processes=True,
        rounds_otherwise=True,
    ),
    "speculation: ngram": _speculating("ngram", prompt_lookup_max=2, prompt_lookup_min=1),
    "speculation: draft model": _speculating("draft_model", drafters.save_same),
    "speculation: EAGLE": _speculating("eagle", drafters.save_eagle),
    "speculation: EAGLE3": _speculating("eagle3", drafters.save_eagle3),
    "speculation: Medusa": _speculating("medusa", drafters.save_medusa),
    "speculation: MTP": _speculating("mtp", num_speculative_tokens=1)._replace(model=drafters.save_ernie),
    "LoRA, two adapters": Feature(_save_adapters, _with_adapters),
    "three samples of a prompt": Feature(ask=_several_samples),
    "priorities": Feature(_fixed(scheduling_policy="priority"), _by_priority),
    "prompt embeddings": Feature(_fixed(enable_prompt_embeds=True), _by_embeddings),
    "pooling": Feature(
        _fixed(runner="pooling", convert="embed", enable_prefix_caching=True, skip_tokenizer_init=False),
        _pooled,
        save_with_tokenizer,
    ),
    "beams": Feature(_fixed(skip_tokenizer_init=False), _in_beams, save_with_tokenizer),
    "structured output": Feature(_fixed(skip_tokenizer_init=False), _structured, save_with_tokenizer),
    "chunks of a prompt": Feature(_fixed(max_num_batched_tokens=2 * BLOCK)),
    "asynchronous scheduling": Feature(_fixed(asynchronous=True)),
    "blocks joined by four": Feature(_fixed(connector={"blocks_per_chunk": 4})),
    "generated tokens": Feature(_fixed(connector={"offload_prompt_only": False})),
    "sliding windows": Feature(model=save_hybrid_model),
    "MultiConnector": Feature(beside=_storing_files),
    "speculation: synthetic acceptance": _speculating(
        "draft_model",
        drafters.save_same,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=[0.5, 0.25, 0.125],
    )._replace(refused="rejection_sample_method = 'synthetic'"),
    "speculation: extracted hidden states": Feature(
        _fixed(
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
            }
        ),
        refused="method = 'extract_hidden_states'",
    ),
    "sliding windows in joined blocks": Feature(
        _fixed(connector={"blocks_per_chunk": 2}), model=save_hybrid_model, refused="blocks_per_chunk = 2"
    ),
    "a hash that is not cryptographic": Feature(
        _fixed(prefix_caching_hash_algo="xxhash"), refused="'xxhash' is not cryptographic"
    ),
}
"""By what people call it."""


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
        apart(_start, feature, with_kvtier)
        raise AssertionError("it was not refused")
    alone = {
        name: value
        for name, value in options.items()
        if feature.rounds_otherwise or name not in _CHANGES_NO_TOKEN
    }
    computed, cached = apart(_ask_alone, feature, directory, engine_options(model, **alone))
    assert len({str(answer) for answer in computed}) > 1, f"the answers say nothing: {computed}"
    assert feature.rounds_otherwise or cached == computed, f"vLLM alone says {computed}, then {cached}"
    given, hits = apart(_ask_with_kvtier, feature, directory, with_kvtier)
    again, after_restart = apart(_ask_after_restart, feature, directory, with_kvtier)
    answers = [*given, again]
    right = [computed, *[cached] * (len(answers) - 1)]
    assert answers == right, f"{answers} and not {right}"
    return Outcome(sum(map(len, answers)), hits, after_restart)


def _start(feature: Feature, options: Options) -> Engine:
    if feature.processes:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    has_stages = "pipeline_parallel_size" in options
    if has_stages:
        os.environ.update(feature.environment)
    engine = Engine(dict(options))
    if has_stages:
        engine.llm.collective_rpc(_complete_stage)
    return engine


def _complete_stage(worker: Any) -> None:
    """Make what vLLM's runner for CPUs makes only when it compiles: a place for what the stage before computed."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


def _ask_alone(feature: Feature, directory: Path, options: Options) -> tuple[Answers, Answers]:
    """The answers that vLLM computes, and those it gives after its own prefix cache."""
    engine = _start(feature, options)
    answers = feature.ask(engine, directory), feature.ask(engine, directory)
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
        _step(engine)  # vLLM stores, and tells of it, in the steps after
        stored = {"vllm:kvtier_device_stored_blocks": 0.0, **engine.metrics()}


def _step(engine: Engine) -> None:
    if engine.options.get("runner") == "pooling":
        engine.llm.embed([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
    else:
        engine.generate([[1, 2, 3]])


_BY_CONFIGURATION = """
## Checked by vLLM's configuration alone

No engine ran with these. Tests make vLLM's own configuration of each and see that kvtier accepts or refuses it.

| feature | outcome |
|---|---|
| decode context parallelism | served |
| data parallelism over several hosts, each engine on one | served |
| `runai_streamer` on a local model | served |
| prefill context parallelism | refused |
| an engine whose workers are on several hosts | refused |
| weights from elsewhere, with a tier that outlives the engine | refused; served with `kvtier_identity` |
"""


def describe(report: Mapping[str, Any]) -> str:
    """The page about a run that found no fault."""
    served = "".join(
        f"| {name} | {found['answers']} | {found['hits']} | {found['after_restart']} |\n"
        for name, found in report["served"].items()
    )
    refused = "".join(f"| {name} | {said} |\n" for name, said in report["refused"].items())
    tried = len(report["served"]) + len(report["refused"])
    return f"""# What vLLM's servers turn on

Made by `nox -s features -- --page`: real vLLM {VLLM} on a CPU, tiny random models, a pool and a disk. It tried
{tried} features: {report["wrong"]} gave wrong answers, {report["faults"]} another fault.

## Served

*Answers* were compared with vLLM without a connector, and all are the same. The columns behind are prompt tokens that
vLLM did not compute because kvtier had them: while the engine ran (the smaller number of those from the pool and from
disk), and in a new engine from disk.

| feature | answers | tokens from kvtier | after a restart |
|---|---|---|---|
{served}
## Refused

The engine does not start, and this is what it says.

| feature | message |
|---|---|
{refused}{_BY_CONFIGURATION}"""


def main(arguments: list[str] | None = None) -> int:
    """Try all, or those named; the exit status says whether an answer was wrong, or something else was a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.features", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} once all is tried")
    parser.add_argument("names", nargs="*", help="features of the table; all of them without")
    given = parser.parse_args(arguments)
    prepare()
    report: dict[str, Any] = {"served": {}, "refused": {}, "wrong": 0, "faults": 0}
    for name in given.names or FEATURES:
        with tempfile.TemporaryDirectory(prefix="kvtier-feature-") as directory:
            try:
                outcome = try_out(FEATURES[name], Path(directory))
            except UnsupportedModelError as error:
                is_expected = bool(FEATURES[name].refused) and FEATURES[name].refused in str(error)
                report["refused"][name] = str(error)
                report["faults"] += not is_expected
                said = f"refused{'' if is_expected else ' AND THAT IS A FAULT'}: {error}"
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
    if given.page:
        PAGE.write_text(describe(report))
    if given.json:
        sys.stdout.write(f"{json.dumps(report)}\n")
    return 1 if report["wrong"] or report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
