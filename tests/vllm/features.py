"""What production servers turn on, tried in real vLLM with tiny models: served with right answers, or refused by name.

``python -m tests.vllm.features --json`` tries all, in vLLM's interpreter. A feature is *served* when all answers are
those of vLLM without a connector, and, once the device has forgotten them, the blocks come from the pool, from disk,
and in another engine from disk. ``--page`` writes the lines about what is tried to docs/reference/vllm.md, one by one,
and leaves the others.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from kvtier_core import UnsupportedModelError
from tests.vllm import asks, drafters
from tests.vllm.architectures import prepare, save_latent
from tests.vllm.engines import BLOCK
from tests.vllm.models import (
    save_adapter,
    save_hybrid_model,
    save_seeing_model,
    save_states_model,
    save_tiny_model,
    save_with_tokenizer,
    until_settled,
)
from tests.vllm.trying import Feature, Options, fixed, together, try_out

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "vllm.md"


def _storing_files(directory: Path) -> Options:
    """vLLM's example of a connector, which writes every prompt to a directory."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory / "files")},
    }


def _save_adapters(directory: Path) -> Options:
    for number in (1, 2):
        save_adapter(directory / f"adapter-{number}", seed=number)
        until_settled(directory / f"adapter-{number}")
    return {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


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
        fixed(pipeline_parallel_size=2),
        model=model,
        processes=True,
        environment={"VLLM_PP_LAYER_PARTITION": of_layers},
    )


def _canonical(
    stored_by: int, served_by: int, model: Callable[[Path], Path] = save_tiny_model, **more: Any
) -> Feature:
    """What so many workers stored serves another number of them after the restart."""
    options = {"tensor_parallel_size": stored_by, "connector": {"canonical_layout": True}, **more}
    later = fixed(tensor_parallel_size=served_by)
    return Feature(fixed(**options), model=model, later=later)


def _canonical_latent(stored_by: int, served_by: int) -> Feature:
    """Of one layer: vLLM on a CPU says other things with two workers than with one. Further layers would keep that."""
    model = partial(save_latent, num_hidden_layers=1)
    feature = _canonical(stored_by, served_by, model, prefix_caching_of_mla=True)
    return feature._replace(ask=asks.one_by_one, like_for_like=True)


def _save_layers(count: int) -> Callable[[Path], Path]:
    return partial(save_tiny_model, num_hidden_layers=count)


def _another_drafter(directory: Path) -> Options:
    drafter = save_tiny_model(directory / "another", seed=7)
    return {
        "speculative_config": {"method": "draft_model", "num_speculative_tokens": 3, "model": str(drafter)}
    }


VLLM = "0.32"
_ALONE: dict[str, Feature] = {
    "plain": Feature(),
    "pipeline 2 + 2": _stages("2,2", _save_layers(4)),
    "pipeline 3 + 2": _stages("3,2", _save_layers(5)),
    "pipeline 1 + 1": _stages("1,1", save_tiny_model),
    "pipeline, a stage without full attention": _stages("1,3", save_hybrid_model),
    "data parallel 2": Feature(fixed(data_parallel_size=2), model=save_with_tokenizer),
    "data parallel 2 on two nodes": Feature(fixed(data_parallel_size=2, nodes=2), model=save_with_tokenizer),
    "tensor parallel 2": Feature(fixed(tensor_parallel_size=2), processes=True),
    "latent attention": Feature(
        fixed(prefix_caching_of_mla=True), asks.one_by_one, model=save_latent, like_for_like=True
    ),
    "latent attention, tensor parallel 2": Feature(
        fixed(tensor_parallel_size=2, prefix_caching_of_mla=True),
        asks.one_by_one,
        model=save_latent,
        processes=True,
        like_for_like=True,
    ),
    "speculation: ngram": _speculating("ngram", prompt_lookup_max=2, prompt_lookup_min=1),
    "speculation: draft model": _speculating("draft_model", drafters.save_same),
    "speculation: draft model, exchanged for another": _speculating(
        "draft_model", drafters.save_same
    )._replace(between=_another_drafter),
    "speculation: draft model, its acceptance": _speculating("draft_model", drafters.save_same)._replace(
        ask=asks.with_acceptance, like_for_like=True
    ),
    "speculation: EAGLE": _speculating("eagle", drafters.save_eagle),
    "speculation: EAGLE3": _speculating("eagle3", drafters.save_eagle3),
    "speculation: Medusa": _speculating("medusa", drafters.save_medusa),
    "speculation: MTP": _speculating("mtp", num_speculative_tokens=1)._replace(model=drafters.save_ernie),
    "LoRA, two adapters": Feature(_save_adapters, asks.with_adapters),
    "LoRA, exchanged in place": Feature(_save_adapters, asks.with_an_adapter_exchanged_in_place),
    "three samples of a prompt": Feature(ask=asks.several_samples),
    "priorities": Feature(fixed(scheduling_policy="priority"), asks.by_priority),
    "prompt embeddings": Feature(fixed(enable_prompt_embeds=True), asks.by_embeddings),
    "images": Feature(
        fixed(skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1}),
        asks.about_images,
        save_seeing_model,
    ),
    "pooling": Feature(
        fixed(runner="pooling", convert="embed", enable_prefix_caching=True, skip_tokenizer_init=False),
        asks.pooled,
        save_with_tokenizer,
    ),
    "beams": Feature(fixed(skip_tokenizer_init=False), asks.in_beams, save_with_tokenizer),
    "structured output": Feature(fixed(skip_tokenizer_init=False), asks.structured, save_with_tokenizer),
    "chunks of a prompt": Feature(fixed(max_num_batched_tokens=2 * BLOCK)),
    "asynchronous scheduling": Feature(fixed(asynchronous=True)),
    "blocks joined by four": Feature(fixed(connector={"blocks_per_chunk": 4})),
    "generated tokens": Feature(fixed(connector={"offload_prompt_only": False})),
    "sliding windows": Feature(model=save_hybrid_model),
    "MultiConnector": Feature(beside=_storing_files),
    "canonical layout, tensor parallel 2, then 1": _canonical(2, 1),
    "canonical layout, tensor parallel 1, then 2": _canonical(1, 2),
    "canonical layout, sliding windows, tensor parallel 2, then 1": _canonical(2, 1, save_hybrid_model),
    "canonical layout, sliding windows, tensor parallel 1, then 2": _canonical(1, 2, save_hybrid_model),
    "canonical layout, latent attention, tensor parallel 2, then 1": _canonical_latent(2, 1),
    "canonical layout, latent attention, tensor parallel 1, then 2": _canonical_latent(1, 2),
}
"""Each by what people call it."""
_TOGETHER: dict[str, Feature] = {
    " + ".join(names): together(*map(_ALONE.__getitem__, names))
    for names in (
        ("speculation: ngram", "LoRA, two adapters"),
        ("speculation: ngram", "structured output"),
        ("speculation: EAGLE", "MultiConnector"),
        ("speculation: EAGLE3", "asynchronous scheduling", "generated tokens"),
        ("sliding windows", "MultiConnector", "three samples of a prompt"),
        ("speculation: draft model", "tensor parallel 2"),
        ("speculation: EAGLE", "tensor parallel 2"),
        ("pipeline 2 + 2", "tensor parallel 2"),
        ("pipeline 1 + 1", "latent attention"),
        ("LoRA, two adapters", "tensor parallel 2", "chunks of a prompt"),
    )
}
_TOGETHER["priorities + prefix hints"] = _ALONE["priorities"]._replace(ask=asks.with_hints)
_REFUSED: dict[str, Feature] = {
    "speculation: synthetic acceptance": _speculating(
        "draft_model",
        drafters.save_same,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=[0.5, 0.25, 0.125],
    )._replace(refused="rejection_sample_method = 'synthetic'"),
    "speculation: extracted hidden states": Feature(
        fixed(
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
            }
        ),
        refused="method = 'extract_hidden_states'",
    ),
    "speculation: draft model with a window": _speculating("draft_model", drafters.save_windowed)._replace(
        refused="'draft_model.model.layers.0.self_attn.attn' over the model's own KV"
    ),
    "sliding windows in joined blocks": Feature(
        fixed(connector={"blocks_per_chunk": 2}), model=save_hybrid_model, refused="blocks_per_chunk = 2"
    ),
    "canonical layout, states": Feature(
        fixed(max_num_batched_tokens=BLOCK, connector={"canonical_layout": True}),
        model=save_states_model,
        refused="canonical_layout with its layer",
    ),
    "a hash that is not cryptographic": Feature(
        fixed(prefix_caching_hash_algo="xxhash"), refused="'xxhash' is not cryptographic"
    ),
}
FEATURES = {**_ALONE, **_TOGETHER, **_REFUSED}


_BY_CONFIGURATION = """
## Checked by vLLM's configuration alone

No engine ran with these. Tests make vLLM's own configuration of each and see that kvtier accepts or refuses it.
Speculation with DFlash, DSpark and MLP speculators is accepted by vLLM's name for the method alone.

| feature | outcome |
|---|---|
| decode context parallelism | served |
| data parallelism over several hosts, each engine on one | served |
| `runai_streamer` on a local model | served |
| speculation: suffix | served |
| prefill context parallelism | refused |
| an engine whose workers are on several hosts | refused |
| weights from elsewhere, with a tier that outlives the engine | refused; served with `kvtier_identity` |
"""


def describe(lines: Mapping[str, str]) -> str:
    """The page with these lines, by feature; those of features that there are no more are left out."""
    served, refused = (
        "".join(
            f"{lines[name]}\n"
            for name, feature in FEATURES.items()
            if name in lines and bool(feature.refused) == is_refused
        )
        for is_refused in (False, True)
    )
    return f"""# What vLLM's servers turn on

Made by `nox -s features -- --page`: real vLLM {VLLM} on a CPU, tiny random models, a pool and a disk. A feature has a
line if every answer was right and nothing else went wrong. The last column says when it was tried. With features' names
behind it, the command tries those alone and leaves the other lines.

## Served

*Answers* were compared with vLLM without a connector, and all are the same. The columns behind are prompt tokens that
vLLM did not compute because kvtier had them: while the engine ran (the smaller number of those from the pool and from
disk), and in a new engine from disk.

| feature | answers | tokens from kvtier | after a restart | tried |
|---|---|---|---|---|
{served}
## Refused

The engine does not start, and this is what it says.

| feature | message | tried |
|---|---|---|
{refused}{_BY_CONFIGURATION}"""


def lines_of(page: str) -> dict[str, str]:
    """The lines of its tables, by what each begins with."""
    return {line[1]: line[0] for line in re.finditer(r"^\| (.+?) \| .*$", page, re.MULTILINE)}


def _write(name: str, *cells: object) -> None:
    """Write the line about a feature to the page; without *cells* it gets none."""
    lines = lines_of(PAGE.read_text())
    lines.pop(name, None)
    if cells:
        lines[name] = f"| {' | '.join(map(str, (name, *cells, datetime.now(UTC).date())))} |"
    PAGE.write_text(describe(lines))


def main(arguments: list[str] | None = None) -> int:
    """Try all, or those named; the exit status says whether an answer was wrong, or something else was a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.features", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    parser.add_argument("--page", action="store_true", help=f"write to {PAGE.name} what is tried")
    parser.add_argument("names", nargs="*", help="features of the table; all of them without")
    given = parser.parse_args(arguments)
    prepare()
    report: dict[str, Any] = {"served": {}, "refused": {}, "wrong": 0, "faults": 0}
    for name in given.names or FEATURES:
        cells: tuple[object, ...] = ()
        with tempfile.TemporaryDirectory(prefix="kvtier-feature-") as directory:
            try:
                outcome = try_out(FEATURES[name], Path(directory))
            except UnsupportedModelError as error:
                is_expected = bool(FEATURES[name].refused) and FEATURES[name].refused in str(error)
                report["refused"][name] = str(error)
                report["faults"] += not is_expected
                cells = (error,) if is_expected else ()
                said = f"refused{'' if is_expected else ' AND THAT IS A FAULT'}: {error}"
            except AssertionError as error:
                report["wrong"] += 1
                said = f"WRONG {error}"
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a fault
                report["faults"] += 1
                said = f"FAULT {type(error).__name__}: {error}"
            else:
                report["served"][name] = outcome._asdict()
                cells = outcome
                said = f"served {outcome}"
        sys.stderr.write(f"{name}: {said[:3000]}\n")
        if given.page:
            _write(name, *cells)
    if given.json:
        sys.stdout.write(f"{json.dumps(report)}\n")
    return 1 if report["wrong"] or report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
