import pytest

from kvtier.prompts import PromptLine, read_prompts
from kvtier_core import ConfigError


def write(tmp_path, text):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    return file


def test_lines_with_and_without_options_in_order(tmp_path):
    file = write(tmp_path, '{"prompt": "é"}\n\n  \n{"prompt": "b", "max_tokens": 3, "salt": "x"}')
    assert read_prompts(file) == [
        PromptLine(number=1, prompt="é"),
        PromptLine(number=4, prompt="b", max_tokens=3, salt="x"),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "not JSON: .* at column 15"),
        ('["a"]', "not a JSON object"),
        ('"a"', "not a JSON object"),
        ("{}", "prompt is missing"),
        ('{"prompt": ""}', "prompt is missing or empty"),
        ('{"prompt": 3}', "prompt must be a text"),
        ('{"prompt": null}', "prompt must be a text"),
        ('{"prompt": "a", "max_token": 3}', "unknown key 'max_token': allowed are prompt, max_tokens, salt"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be at least 1"),
        ('{"prompt": "a", "max_tokens": -2}', "max_tokens must be at least 1"),
        ('{"prompt": "a", "max_tokens": "3"}', "max_tokens must be a whole number"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens must be a whole number"),
        ('{"prompt": "a", "salt": 1}', "salt must be a text"),
    ],
)
def test_k9_o3_a_broken_line_is_named_with_what_is_wrong(tmp_path, line, problem):
    file = write(tmp_path, '{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl, line 2: {problem}"):
        read_prompts(file)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (rb'{"prompt": "a\ud800b"}', "prompt has half a surrogate pair at character 2"),
        (rb'{"prompt": "a", "salt": "\udfff"}', "salt has half a surrogate pair at character 1"),
        (rb'{"prompt": "a", "\ud800": 1}', "unknown key"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "a number of too many digits"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"prompt": "\xff"}', "not UTF-8: .* at byte 13"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "not JSON"),
        (b'{"prompt": "a", "max_tokens": NaN}', "max_tokens must be a whole number"),
    ],
    ids=["surrogate", "salt", "key", "digits", "nesting", "bytes", "bom", "nan"],
)
def test_r5_whatever_is_in_a_line_it_is_named_and_the_others_are_read(tmp_path, line, problem):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "first"}\n' + line + b'\n{"prompt": "last"}\n')
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl, line 2: {problem}") as caught:
        read_prompts(file)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    told: list[ConfigError] = []
    assert [kept.prompt for kept in read_prompts(file, on_broken=told.append)] == ["first", "last"]
    assert len(told) == 1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.jsonl: cannot read"):
        read_prompts(tmp_path / "absent.jsonl")


def test_a_file_that_is_not_text_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 1: not UTF-8"):
        read_prompts(file)


def test_a_file_without_prompts_says_what_to_write(tmp_path):
    with pytest.raises(ConfigError, match='no prompts: write one JSON object a line, such as {"prompt"'):
        read_prompts(write(tmp_path, "\n\n"))


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_a_line_feed_ends_a_line(tmp_path, separator):
    file = write(tmp_path, f'{{"prompt": "a{separator}b"}}\r\n{{"prompt": "c"}}\n')
    assert [line.prompt for line in read_prompts(file)] == [f"a{separator}b", "c"]
