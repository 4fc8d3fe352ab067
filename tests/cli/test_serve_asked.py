"""What requests ask for, and which are refused."""

import pytest

from kvtier.serve.asked import RefusedError, read_chat, read_completion

TEXT = {"prompt": "x"}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def test_what_a_client_may_say_is_read():
    asked = read_completion(
        {
            "model": "tiny",
            "prompt": ["x"],
            "max_tokens": 5,
            "stop": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": "me",
            "temperature": 0.7,
            "n": 1,
            "logprobs": None,
            "seed": 7,
            "top_p": 0.5,
        },
        "tiny",
    )
    assert (asked.prompt, asked.max_tokens, asked.stops, asked.salt) == ("x", 5, ("a", "b"), "me")
    assert (asked.temperature, asked.top_p, asked.seed) == (0.7, 0.5, 7)
    assert asked.is_streamed
    assert asked.wants_usage
    assert not asked.is_chat


def test_without_a_word_a_text_gets_sixteen_tokens_and_a_chat_what_there_is_room_for():
    asked = read_completion(TEXT, "tiny")
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.seed) == (16, 0.0, 1.0, None)
    chat = read_chat({**CHAT, "temperature": 0}, "tiny")
    assert (chat.max_tokens, chat.stops, chat.salt, chat.is_chat) == (None, (), None, True)
    assert read_chat({**CHAT, "max_completion_tokens": 3}, "tiny").max_tokens == 3


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "a\ud800"}, "prompt"),
        ({"model": "other"}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 0}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": "1"}, "top_p"),
        ({"seed": 0.5}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"min_p": 0.1}, "min_p"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": "yes"}}, "include_usage"),
        ({"cache_salt": 1}, "cache_salt"),
    ],
)
def test_what_can_not_be_served_is_refused_by_name(more, param):
    with pytest.raises(RefusedError) as refused:
        read_completion({**TEXT, **more}, "tiny")
    assert refused.value.param == param
    assert refused.value.status == (404 if param == "model" else 400)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        ["x"],
        [{"content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "content": "x", "tool_calls": []}],
    ],
)
def test_messages_that_are_none_are_refused(messages):
    with pytest.raises(RefusedError, match="messages"):
        read_chat({"messages": messages}, "tiny")


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(RefusedError, match="JSON object"):
        read_chat(body, "tiny")
