"""What is asked of an engine whose features are tried: each function gives answers that can be compared.

vLLM's types are imported where they are used: nothing of vLLM is needed to read the table of features.
"""

from pathlib import Path
from typing import Any

from tests.vllm.engine_program import Engine
from tests.vllm.engines import BLOCK, prompt
from tests.vllm.models import SIDE, save_adapter, until_settled
from tests.vllm.served import Served

Answers = list[Any]
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def prompts() -> list[list[int]]:
    return [prompt(seed, blocks=4) for seed in (1, 2)]


def generate(engine: Engine | Served, directory: Path) -> Answers:
    del directory
    return [item["tokens"] for item in engine.generate(prompts(), max_tokens=2 * BLOCK)]


def one_by_one(engine: Engine, directory: Path) -> Answers:
    """So that no kernel rounds by who else asks, and a few tokens alone, so that no rounding adds up."""
    del directory
    return [engine.generate([each])[0]["tokens"] for each in prompts()]


def with_acceptance(engine: Engine, directory: Path) -> Answers:
    """Of each prompt, by itself, with the number of tokens that a drafter proposed and the number accepted."""
    del directory
    answers = []
    for each in prompts():
        before = engine.metrics()
        (said,) = engine.generate([each], max_tokens=2 * BLOCK)
        after = engine.metrics()
        counts = {name: after[name] - before.get(name, 0) for name in (DRAFTED, ACCEPTED)}
        assert counts[ACCEPTED] > 0
        answers.append((said["tokens"], counts))
    return answers


def with_adapters(engine: Engine, directory: Path) -> Answers:
    """The answers of two adapters and of the model alone."""
    answers = generate(engine, directory)
    for number in (1, 2):
        path = str(directory / f"adapter-{number}")
        given = {"name": f"adapter-{number}", "number": number, "path": path}
        answers += [item["tokens"] for item in engine.generate(prompts(), adapter=given)]
    return answers


def with_an_adapter_exchanged_in_place(engine: Engine, directory: Path) -> Answers:
    """The answers of one adapter, then of another one in its files, under its name and number; and of one that stays.

    vLLM's own cache takes the two for one, so it is reset.
    """
    mine, stays = (
        {"name": f"adapter-{number}", "number": number, "path": str(directory / f"adapter-{number}")}
        for number in (1, 2)
    )
    answers = []
    for seed in (1, 3):
        until_settled(save_adapter(directory / "adapter-1", seed=seed))
        engine.load_adapter(**mine, in_place=True)
        assert engine.reset()
        for adapter in (mine, stays):
            answers += [item["tokens"] for item in engine.generate(prompts(), adapter=adapter)]
    assert answers[:2] != answers[4:6], "the weights of the adapter say nothing"
    return answers


def with_hints(engine: Engine, directory: Path) -> Answers:
    """Of prompts whose blocks a client wants to be kept and brought early, the one that comes last first."""
    del directory
    hints = [["kv.pin", "1.0", {"seconds": 3600}], ["kv.prefetch", "1.0", {}]]
    requests = [
        {"prompt": each, "max_tokens": BLOCK, "hints": hints, "priority": priority}
        for each, priority in zip(prompts(), (1, 0), strict=True)
    ]
    return [item["tokens"] for item in engine.soak(requests, len(requests), {}, [])]


def sampled(engine: Engine, **sampling: Any) -> Answers:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=BLOCK, ignore_eos=True, detokenize=False, **sampling)
    outputs = engine.llm.generate([{"prompt_token_ids": each} for each in prompts()], params, use_tqdm=False)
    return [[list(said.token_ids) for said in output.outputs] for output in outputs]


def several_samples(engine: Engine, directory: Path) -> Answers:
    del directory
    return sampled(engine, n=3, temperature=1.0, seed=1)


def by_priority(engine: Engine, directory: Path) -> Answers:
    del directory
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=BLOCK, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": each} for each in prompts()]
    outputs = engine.llm.generate(given, params, use_tqdm=False, priority=[1, 0])
    return [list(output.outputs[0].token_ids) for output in outputs]


def by_embeddings(engine: Engine, directory: Path) -> Answers:
    """The prompts as the vectors that the model has for their tokens."""
    import torch
    from safetensors.torch import load_file
    from vllm import SamplingParams

    vectors = load_file(directory / "model" / "model.safetensors")["model.embed_tokens.weight"]
    params = SamplingParams(temperature=0, max_tokens=BLOCK, ignore_eos=True, detokenize=False)
    given = [{"prompt_embeds": vectors[torch.tensor(each)]} for each in prompts()]
    outputs = engine.llm.generate(given, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def about_images(engine: Engine, directory: Path) -> Answers:
    """Of one text behind two images, each of which stands for the same tokens."""
    del directory
    from PIL import Image
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=BLOCK, ignore_eos=True, detokenize=False)
    given = [
        {
            "prompt_token_ids": prompt(1, blocks=4),
            "multi_modal_data": {"image": Image.new("RGB", (SIDE, SIDE), colour)},
        }
        for colour in ("red", "blue")
    ]
    one, other = engine.llm.generate(given, params, use_tqdm=False)
    assert one.prompt_token_ids == other.prompt_token_ids
    answers = [list(output.outputs[0].token_ids) for output in (one, other)]
    assert answers[0] != answers[1], "the images say nothing"
    return answers


def pooled(engine: Engine, directory: Path) -> Answers:
    """The prompts' embeddings, to three digits."""
    del directory
    outputs = engine.llm.embed([{"prompt_token_ids": each} for each in prompts()], use_tqdm=False)
    return [[round(number, 3) for number in output.outputs.embedding] for output in outputs]


def in_beams(engine: Engine, directory: Path) -> Answers:
    del directory
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    outputs = engine.llm.beam_search([{"prompt_token_ids": each} for each in prompts()], params)
    return [[list(beam.tokens)[-8:] for beam in output.sequences] for output in outputs]


def structured(engine: Engine, directory: Path) -> Answers:
    """Ten digits each."""
    del directory
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(
        temperature=0, max_tokens=10, structured_outputs=StructuredOutputsParams(regex="[0-9]{10}")
    )
    outputs = engine.llm.generate([{"prompt_token_ids": each} for each in prompts()], params, use_tqdm=False)
    said = [output.outputs[0].text.replace(" ", "") for output in outputs]
    assert all(text.isdigit() for text in said), said
    return said
