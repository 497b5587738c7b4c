"""Kind `chat`: conversations in the released chat form.

    BOS <｜System｜> system <｜User｜> user <｜Assistant｜> </think> assistant EOS <｜User｜> ...

without a space or line feed in between: the form of answers without reasoning. The system's part
may be missing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.documents import Document
from data.kinds.base import field_of, text_of
from data.tokenizer import Encoder

SYSTEM, USER, ASSISTANT, THINK, END_THINK = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)
# Entry 128,799 of the released V4.1 vocabulary is <｜System｜>; tokenizer files published before
# V4.1 hold the same entry under the name of a spare one.
OLDER_NAMES = {SYSTEM: "<｜place▁holder▁no▁799｜>"}
ROLES = ("system", "user", "assistant")
OF_TOOLS = (
    "tools",
    "tool_calls",
    "tool_call_id",
    "tool_choice",
    "functions",
    "function_call",
)
OF_REASONING = ("reasoning", "reasoning_content", "thinking")
REFUSED = (*OF_TOOLS, *OF_REASONING)


@dataclass(frozen=True)
class Chat:
    """Conversations: lists of messages under the field name `messages`.

    A system message may come first; then user and assistant take turns, and the assistant has the
    last word. all_labels: every token may be predicted; else what the assistant says and the end
    of sentence behind it.
    """

    encoder: Encoder
    messages: str
    role: str
    content: str
    all_labels: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.messages,)

    @property
    def optional(self) -> tuple[str, ...]:
        return REFUSED

    @property
    def masked(self) -> bool:
        return not self.all_labels

    def settings(self) -> dict[str, Any]:
        return {
            "kind": "chat",
            "fields": [self.messages, self.role, self.content],
            "all_labels": self.all_labels,
            **self.encoder.settings(),
        }

    def encode(self, values: Sequence[Mapping[str, Any]]) -> list[Document | str]:
        read: list[list[tuple[str, str]] | str] = []
        for value in values:
            try:
                read.append(self.turns(value))
            except ValueError as error:
                read.append(str(error))
        texts = [text for turns in read if not isinstance(turns, str) for _, text in turns]
        ids = iter(self.encoder.encode(texts))
        return [
            turns if isinstance(turns, str) else self._document([(r, next(ids)) for r, _ in turns])
            for turns in read
        ]

    def turns(self, value: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(role, text) of each message. ValueError says what the released form cannot hold."""
        return [
            (role, text_of(content, f"message {n} ({role}): {self.content!r}"))
            for n, (role, content) in enumerate(self.messages_of(value), start=1)
        ]

    def messages_of(self, value: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """(role, content) of each message, contents not looked at. ValueError as `turns`."""
        _refuse(value, "the record")
        messages = field_of(value, self.messages)
        if not isinstance(messages, list) or not messages:
            raise ValueError(
                f"field {self.messages!r} must be a list of messages with at least one; "
                "correct it or set data.fields.messages"
            )
        found = [self._message(message, n) for n, message in enumerate(messages, start=1)]
        _require_order([role for role, _ in found])
        return found

    def _message(self, message: Any, number: int) -> tuple[str, Any]:
        what = f"message {number}"
        if not isinstance(message, dict):
            raise ValueError(
                f"{what} is a {type(message).__name__}, not an object with the fields "
                f"{self.role!r} and {self.content!r}"
            )
        _refuse(message, what)
        for name in (self.role, self.content):
            if name not in message:
                raise ValueError(f"{what}: {_missing(message, name)}")
        role = message[self.role]
        if role not in ROLES:
            raise ValueError(
                f"{what} has the role {role!r}; use {', '.join(ROLES)} (messages of tools cannot "
                "be trained on)"
            )
        return role, message[self.content]

    def _document(self, turns: Sequence[tuple[str, np.ndarray]]) -> Document | str:
        form = chat_form(self.encoder)
        parts, mask = [form.begin], [np.zeros(1, bool)]
        for number, (role, ids) in enumerate(turns, start=1):
            if told := form.problem(self.encoder, ids):
                return f"message {number} ({role}): {told}"
            end = form.end if role == "assistant" else form.end[:0]
            parts += [form.before[role], ids, end]
            mask.append(np.zeros(len(form.before[role]), bool))
            mask.append(np.full(len(ids) + len(end), role == "assistant"))
        return Document(np.concatenate(parts), None if self.all_labels else np.concatenate(mask))


@dataclass(frozen=True, eq=False)
class ChatForm:
    """begin, end: of sentence; before: what comes before each role's text; control: bool
    [tokens], those that belong to the form."""

    begin: np.ndarray
    end: np.ndarray
    before: Mapping[str, np.ndarray]
    control: np.ndarray

    def problem(self, encoder: Encoder, ids: np.ndarray) -> str:
        """Why these ids of a text cannot stand in a message; empty when they can."""
        if self.control[ids].any():
            return (
                f"holds a mark of the chat form, such as {USER} or {END_THINK}, as text; remove it"
            )
        return encoder.problem(ids)


@functools.lru_cache(maxsize=2)
def chat_form(encoder: Encoder) -> ChatForm:
    """The marks of the chat form in this tokenizer. ValueError names those it lacks."""
    marks = encoder.named(SYSTEM, USER, ASSISTANT, END_THINK, older=OLDER_NAMES)
    control = np.zeros(encoder.size(), bool)
    control[[encoder.bos, encoder.eos, *marks.values(), *encoder.ids_of([THINK])]] = True

    def ids(*numbers: int) -> np.ndarray:
        return np.array(numbers, np.int32)

    before = {
        "system": ids(marks[SYSTEM]),
        "user": ids(marks[USER]),
        "assistant": ids(marks[ASSISTANT], marks[END_THINK]),
    }
    return ChatForm(ids(encoder.bos), ids(encoder.eos), before, control)


def chat_problems(encoder: Encoder) -> list[str]:
    """Why conversations cannot be written with this tokenizer; empty when they can."""
    try:
        chat_form(encoder)
    except ValueError as error:
        return [str(error)]
    return []


def _refuse(value: Mapping[str, Any], what: str) -> None:
    """Fields that would change what is said, and that the trained form has no place for."""
    for name in REFUSED:
        if value.get(name):
            of = "tools" if name in OF_TOOLS else "reasoning"
            raise ValueError(
                f"{what} has a field {name!r}; {of} cannot be trained on: remove the record, or "
                "the field if the conversation makes sense without it"
            )


def _missing(message: Mapping[str, Any], name: str) -> str:
    present = ", ".join(map(repr, list(message)[:8])) or "none"
    return f"no field {name!r} (fields here: {present}); add it or set data.fields"


def _require_order(roles: Sequence[str]) -> None:
    expected = "user"
    for number, role in enumerate(roles, start=1):
        if number == 1 and role == "system":
            continue
        if role != expected:
            rule = (
                "a system message comes first or not at all"
                if role == "system"
                else "user and assistant take turns, the user first"
            )
            raise ValueError(
                f"message {number} is the {role}'s, where the {expected}'s is due ({rule}); "
                "correct the order or join messages of one role"
            )
        expected = "assistant" if role == "user" else "user"
    if roles[-1] != "assistant":
        raise ValueError(
            f"the last message is the {roles[-1]}'s, and nobody answers it; remove it or add the "
            "assistant's answer"
        )
