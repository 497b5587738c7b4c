"""What every kind of document offers: records in, documents or problems out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from data.documents import Document


class Kind(Protocol):
    """Turns records into documents. Plain data, sent to other processes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields that every record must have."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """Fields that are looked at where a record has them."""
        ...

    @property
    def masked(self) -> bool:
        """Whether its documents say which tokens may be predicted."""
        ...

    def settings(self) -> dict[str, Any]:
        """What decides its documents besides the records, as plain data."""
        ...

    def encode(self, values: Sequence[Mapping[str, Any]]) -> list[Document | str]:
        """For each record its document, or what is wrong with it and the fix."""
        ...


def field_of(value: Mapping[str, Any], name: str) -> Any:
    """A field, which must be there; ValueError says what is there instead."""
    if name in value:
        return value[name]
    present = ", ".join(map(repr, list(value)[:8])) or "none"
    raise ValueError(f"no field {name!r} (fields here: {present}); add it or set data.fields")


def text_of(value: Any, what: str) -> str:
    """`value` as a text that is not blank and can be encoded; ValueError names it as `what`."""
    if not isinstance(value, str):
        raise ValueError(
            f"{what} is a {type(value).__name__}, not a text; correct it or set data.fields"
        )
    if not value or value.isspace():
        raise ValueError(f"{what} is empty; remove it or give it text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds half of a \\u surrogate pair, which is no character; correct the escape"
        ) from error
    return value
