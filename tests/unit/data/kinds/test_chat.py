"""Conversations in the released form, and everything that the form cannot hold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.documents import Document
from data.kinds.chat import Chat, chat_problems
from data.tokenizer import load_tokenizer

SMALL = Path(__file__).parents[3] / "golden" / "tokenizer.json"
SYSTEM, USER, ASSISTANT, THINK, END_THINK = range(400, 405)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


HELLO = [turn("user", "Hello"), turn("assistant", "Good day.")]
LONG = [
    turn("system", "Be brief."),
    *HELLO,
    turn("user", " What is 2+2?\n"),
    turn("assistant", "4"),
]


@pytest.fixture(scope="module")
def chat(encoder) -> Chat:
    return Chat(encoder, "messages", "role", "content", all_labels=False)


def encoded(chat: Chat, messages, **more) -> Document:
    (document,) = chat.encode([{"messages": messages, **more}])
    assert isinstance(document, Document), document
    return document


def told(chat: Chat, messages, **more) -> str:
    value = messages if isinstance(messages, dict) else {"messages": messages, **more}
    good = {"messages": HELLO}
    first, problem, last = chat.encode([good, value, good])
    assert isinstance(first, Document) and isinstance(last, Document)
    assert isinstance(problem, str)
    assert len(problem) < 220
    return problem


def test_the_released_form(chat, encoder):
    def ids(text):
        return encoder.encode([text])[0].tolist()

    document = encoded(chat, LONG)
    expected = [
        *[encoder.bos, SYSTEM, *ids("Be brief."), USER, *ids("Hello")],
        *[ASSISTANT, END_THINK, *ids("Good day."), encoder.eos],
        *[USER, *ids(" What is 2+2?\n"), ASSISTANT, END_THINK, *ids("4"), encoder.eos],
    ]
    assert document.tokens.tolist() == expected
    assert document.tokens.dtype == np.int32
    assert document.labelled is not None
    learnt = document.tokens[document.labelled].tolist()
    assert learnt == [*ids("Good day."), encoder.eos, *ids("4"), encoder.eos]


def test_all_labels(chat):
    everything = encoded(replace(chat, all_labels=True), LONG)
    assert everything.labelled is None
    assert not replace(chat, all_labels=True).masked
    assert chat.masked
    np.testing.assert_array_equal(everything.tokens, encoded(chat, LONG).tokens)


def test_the_released_tokenizer_writes_it_as_one_text(encoder):
    """Piece by piece or as one string: the same ids. Its name for <｜System｜> is an older one."""
    released = replace(encoder, tokenizer="deepseek", vocab_size=129280, image=129264)
    document = encoded(Chat(released, "messages", "role", "content", all_labels=False), LONG)
    text = (
        "<｜begin▁of▁sentence｜><｜place▁holder▁no▁799｜>Be brief.<｜User｜>Hello"
        "<｜Assistant｜></think>Good day.<｜end▁of▁sentence｜>"
        "<｜User｜> What is 2+2?\n<｜Assistant｜></think>4<｜end▁of▁sentence｜>"
    )
    tokenizer = load_tokenizer("deepseek")
    assert document.tokens.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(document.tokens.tolist()) == text
    assert document.tokens[1] == 128799


def test_fields_are_chosen(encoder):
    chat = Chat(encoder, "conversation", "from", "value", all_labels=False)
    messages = [{"from": m["role"], "value": m["content"]} for m in HELLO]
    (document,) = chat.encode([{"conversation": messages}])
    assert isinstance(document, Document)
    assert chat.columns == ("conversation",)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], ["at least one"]),
        ("Hello", ["must be a list"]),
        ({"text": "x"}, ["no field 'messages'", "'text'"]),
        (["Hello"], ["message 1 is a str"]),
        ([{"role": "user"}], ["message 1: no field 'content'", "'role'"]),
        ([turn("user", None), HELLO[1]], ["message 1 (user): 'content' is a NoneType"]),
        ([turn("user", [{"type": "text"}]), HELLO[1]], ["'content' is a list"]),
        ([*HELLO, turn("user", "?"), turn("assistant", "")], ["message 4 (assistant)", "empty"]),
        ([turn("human", "Hello"), HELLO[1]], ["role 'human'", "system, user, assistant"]),
        ([turn("tool", "4"), HELLO[1]], ["role 'tool'", "tools cannot be trained on"]),
        ([HELLO[1]], ["message 1 is the assistant's", "the user's is due"]),
        ([HELLO[0], *HELLO], ["message 2 is the user's", "the assistant's is due"]),
        ([*HELLO, HELLO[1]], ["message 3 is the assistant's"]),
        ([*HELLO, turn("system", "x")], ["message 3 is the system's", "comes first or not at all"]),
        ([turn("system", "x")] * 2, ["message 2 is the system's"]),
        ([turn("system", "x")], ["last message is the system's"]),
        ([*HELLO, HELLO[0]], ["last message is the user's", "add the assistant's answer"]),
        ([HELLO[0], turn("assistant", "<think>Hm</think>4")], ["message 2", "as text"]),
        ([turn("user", "a<｜Assistant｜>b"), HELLO[1]], ["message 1 (user)", "as text"]),
        ([turn("user", "a<eos>b"), HELLO[1]], ["message 1 (user)", "as text"]),
        ([turn("user", "<image> what?"), HELLO[1]], ["message 1 (user)", "the mark of an image"]),
    ],
)
def test_what_the_form_cannot_hold_is_told(chat, messages, words):
    problem = told(chat, messages)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("tool_calls", "tools"),
        ("function_call", "tools"),
        ("tool_call_id", "tools"),
        ("reasoning_content", "reasoning"),
        ("thinking", "reasoning"),
    ],
)
def test_tools_and_reasoning_are_refused_by_name(chat, name, of):
    answer = turn("assistant", "4", **{name: ["x"]})
    problem = told(chat, [HELLO[0], answer])
    assert problem.startswith(f"message 2 has a field {name!r}; {of} cannot be trained on")
    unused = turn("assistant", "4", **{name: None})
    assert len(encoded(chat, [HELLO[0], unused]).tokens) > 5


def test_the_records_own_tools_are_refused(chat):
    assert "the record has a field 'tools'" in told(chat, HELLO, tools=[{"name": "f"}])
    assert encoded(chat, HELLO, tools=[], id=7).tokens[1] == USER
    assert "tools" in chat.optional


def test_a_tokenizer_without_the_marks_is_refused(encoder):
    assert chat_problems(encoder) == []
    (problem,) = chat_problems(replace(encoder, tokenizer=str(SMALL)))
    assert "has no token <｜System｜>, <｜User｜>, <｜Assistant｜>, </think>" in problem
    assert "data.tokenizer=deepseek" in problem
