import io
import json
import sys
from dataclasses import replace
from typing import Any, cast

import pytest

from kvtier.engines import Model
from kvtier.main import main
from kvtier_transformers.local_model import LocalModel
from tests.transformers.tiny import save_model, tiny_model, write_settings

OFFERED: type[Model] = LocalModel
"""Whether it is one is the type checker's to say."""
TEXT = "The quick brown fox jumps over the lazy dog. " * 3


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return save_model(tiny_model(), tmp_path_factory.mktemp("model"))


def write_prompts(tmp_path, *lines):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def run(capsys, *arguments):
    status = main(["run", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_second_run_reuses_what_the_first_one_stored(tmp_path, model_path, capsys):
    prompts = write_prompts(tmp_path, {"prompt": TEXT + "A"}, {"prompt": TEXT + "B", "max_tokens": 3})
    options = [
        "--model",
        model_path,
        "--prompts",
        prompts,
        "--config",
        write_settings(tmp_path),
        "--max-tokens",
        5,
    ]
    runs = []
    for _ in range(2):
        status, out, _err = run(capsys, *options, "--json")
        assert status == 0
        runs.append([json.loads(line) for line in out.splitlines()])
    for first, second in zip(*runs, strict=True):
        assert first["token_ids"] == second["token_ids"]
        assert first["text"] == second["text"]
    assert [record["line"] for record in runs[0]] == [1, 2]
    assert [len(record["token_ids"]) for record in runs[0]] == [5, 3]
    assert [record["hits_by_tier"] for record in runs[0]] == [{}, {"pool": 128}]
    assert runs[1][0]["hits_by_tier"] == {"disk": 128}
    assert [[record["misses"] for record in records] for records in runs] == [
        [{"not_stored": 1}, {}],
        [{}, {}],
    ]
    assert runs[1][0]["hit_tokens"] == 128
    assert runs[1][0]["prompt_tokens"] == len(TEXT) + 1


def test_r5_what_the_terminal_can_not_show_is_written_in_escapes(tmp_path, model_path, monkeypatch):
    prompts = write_prompts(tmp_path, {"prompt": TEXT}, {"prompt": TEXT + "é"})
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    options = ["--model", model_path, "--prompts", prompts, "--config", write_settings(tmp_path)]
    assert main(["run", *map(str, options), "--max-tokens", "8"]) == 0
    text = shown.getvalue().decode("ascii")
    assert "[line 1]" in text
    assert "[line 2]" in text
    assert "\\x" in text or "\\u" in text


def test_r5_broken_lines_are_left_out_and_the_others_run(tmp_path, model_path, capsys):
    prompts = write_prompts(
        tmp_path,
        {"prompt": TEXT},
        r'{"prompt": "a\ud800"}',
        '{"prompt": "a", "max_tokens": ' + "9" * 5000 + "}",
        '{"prompt": ' + "[" * 100_000,
        {"prompt": TEXT, "salt": "b"},
    )
    options = ["--model", model_path, "--prompts", prompts, "--config", write_settings(tmp_path)]
    status, out, err = run(capsys, *options, "--max-tokens", 1, "--json", "--keep-going")
    assert status == 1
    assert [json.loads(line)["line"] for line in out.splitlines()] == [1, 5]
    assert [f"line {number}: " in err for number in (2, 3, 4)] == [True] * 3
    assert "Traceback" not in err
    status, out, err = run(capsys, *options, "--max-tokens", 1, "--json")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "prompts.jsonl, line 2: prompt has half a surrogate pair" in err


def test_r5_a_prompt_of_no_tokens_is_named(tmp_path, model_path, capsys, monkeypatch):
    from kvtier_transformers import models

    class Deaf:
        def encode(self, text, **_options):
            return [] if text == "-" else [1, 2, 3]

        def decode(self, *_args, **_options):
            return ""

    real = models.load
    monkeypatch.setattr(models, "load", lambda path: replace(real(path), tokenizer=cast("Any", Deaf())))
    prompts = write_prompts(tmp_path, {"prompt": "fine"}, {"prompt": "-"})
    options = ["--model", model_path, "--prompts", prompts, "--config", write_settings(tmp_path), "--json"]
    status, out, err = run(capsys, *options, "--max-tokens", 1, "--keep-going")
    assert (status, len(out.splitlines())) == (1, 1)
    assert "line 2: the prompt has no tokens" in err


def test_salted_lines_share_nothing(tmp_path, model_path, capsys):
    prompts = write_prompts(
        tmp_path, {"prompt": TEXT, "salt": "a"}, {"prompt": TEXT, "salt": "b"}, {"prompt": TEXT, "salt": "a"}
    )
    status, out, _err = run(
        capsys,
        *["--model", model_path, "--prompts", prompts, "--config", write_settings(tmp_path)],
        *["--max-tokens", 1, "--json"],
    )
    assert status == 0
    assert [json.loads(line)["hit_tokens"] for line in out.splitlines()] == [0, 0, 128]


def test_for_people_each_completion_says_what_was_restored(tmp_path, model_path, capsys):
    prompts = write_prompts(tmp_path, {"prompt": TEXT}, {"prompt": TEXT})
    status, out, _err = run(
        capsys,
        *[
            "--model",
            model_path,
            "--prompts",
            prompts,
            "--config",
            write_settings(tmp_path),
            "--max-tokens",
            2,
        ],
    )
    assert status == 0
    assert "[line 1] 135 prompt tokens, 0 restored, first token" in out
    assert "[line 2] 135 prompt tokens, 128 restored (128 from pool), first token" in out
    assert out.endswith("\nblocks at which lookups ended, by why they missed: 1 not stored\n")


def test_k9_mistakes_are_one_message_and_status_2(tmp_path, model_path, capsys):
    good = write_prompts(tmp_path, {"prompt": "x"})
    settings = write_settings(tmp_path)

    def fails(message, *, model=model_path, prompts=good, config=settings):
        status, out, err = run(capsys, "--model", model, "--prompts", prompts, "--config", config)
        assert (status, out) == (2, "")
        assert err.startswith("kvtier: error: ")
        assert "Traceback" not in err
        assert message in err

    fails("absent: no such model", model=tmp_path / "absent")
    fails("no config.json", model=tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    fails("not a GGUF file", model=tmp_path / "x.gguf")
    fails("cannot read the prompts", prompts=tmp_path / "absent.jsonl")
    fails("absent.toml", config=tmp_path / "absent.toml")

    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    fails("broken.jsonl, line 2: prompt must be a text", prompts=broken)
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "x"}\n' + json.dumps({"prompt": "y" * 500}) + "\n")
    fails(
        "long.jsonl, line 2: 500 prompt tokens and 128 more exceed the model's context of 512", prompts=long
    )

    t5 = tmp_path / "t5"
    t5.mkdir()
    (t5 / "config.json").write_text('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}')
    fails("it has cross-attention layers", model=t5)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_bytes((model_path / "config.json").read_bytes())
    fails("transformers cannot load the model", model=empty)
    (empty / "model.safetensors").write_bytes(b"damaged" * 10)
    fails("transformers cannot load the model", model=empty)


def test_usage_errors_are_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "--model", "x", "--prompts", "y", "--max-tokens", "0"])
    assert caught.value.code == 2
    assert "'0' is not a number of at least 1" in capsys.readouterr().err


def test_k9_broken_lines_are_left_out_where_asked_and_the_status_says_so(tmp_path, model_path, capsys):
    prompts = write_prompts(
        tmp_path, {"prompt": "a"}, '{"prompt": "b"', {"prompt": "c" * 600}, {"prompt": "d", "max_tokens": 1}
    )
    options = ["--model", model_path, "--prompts", prompts, "--config", write_settings(tmp_path)]
    status, out, err = run(capsys, *options, "--max-tokens", 1, "--json")
    assert (status, out) == (2, "")
    assert "prompts.jsonl, line 2: not JSON" in err
    status, out, err = run(capsys, *options, "--max-tokens", 1, "--json", "--keep-going")
    assert status == 1
    assert [json.loads(line)["line"] for line in out.splitlines()] == [1, 4]
    messages = err.splitlines()
    assert len(messages) == 2
    assert "line 2: not JSON" in messages[0]
    assert "line 3: 600 prompt tokens" in messages[1]
    assert all(message.endswith("; left out") for message in messages)


def test_k9_keep_going_with_nothing_to_run_is_an_error(tmp_path, model_path, capsys):
    prompts = write_prompts(tmp_path, {"prompt": "c" * 600})
    options = ["--model", model_path, "--prompts", prompts, "--config", write_settings(tmp_path)]
    status, out, err = run(capsys, *options, "--keep-going")
    assert (status, out) == (2, "")
    assert "no line can be run" in err


def test_c54_a_pool_too_small_for_a_prompt_is_told_with_what_to_set(tmp_path, model_path, capsys):
    prompts = write_prompts(tmp_path, {"prompt": TEXT, "max_tokens": 1}, {"prompt": "short", "max_tokens": 1})
    options = ["--model", model_path, "--prompts", prompts, "--config"]
    status, _, err = run(capsys, *options, write_settings(tmp_path, capacity="48KiB"))
    assert status == 0
    assert "WARNING kvtier.run: pool.capacity holds 64 tokens, but the prompt of line 1 has 135" in err
    enough = err.split("at least ")[1].strip()
    status, _, err = run(capsys, *options, write_settings(tmp_path, capacity=enough))
    assert (status, err) == (0, "")


def test_c54_a_run_without_a_tier_says_that_nothing_is_restored_and_why(
    tmp_path, model_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
    monkeypatch.setenv("KVTIER_POOL__CAPACITY", "4MiB")
    prompts = write_prompts(tmp_path, {"prompt": "x", "max_tokens": 1})
    status, _, err = run(capsys, "--model", model_path, "--prompts", prompts)
    assert status == 0
    assert err == (
        "kvtier: nothing will be restored from a tier: no tier is configured, and no settings file was given: "
        "name one with --config or KVTIER_CONFIG\n"
    )
