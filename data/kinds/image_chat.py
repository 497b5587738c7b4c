"""Kind `image_chat`: conversations in the released chat form, in which the user shows images.

An image stands where its placeholder is: `<image>` in the text of a message, or a part
{"type": "image"} of a message whose content is a list of parts (texts are {"type": "text", "text":
...}). The images are the record's list, in the order of their placeholders; an image part may hold
its own under "image" instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data.documents import Document, ImagePiece
from data.images.given import GivenImage, read_image
from data.images.sizing import ImagePlan, plan_image
from data.kinds.base import text_of
from data.kinds.chat import Chat, chat_form

if TYPE_CHECKING:
    from model.config import VisionConfig

PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class Shown:
    """An image in a message. where: it, in words."""

    image: GivenImage
    where: str


@dataclass(frozen=True)
class ImageChat:
    """Conversations as kind chat has them, with the record's images under the field name `images`.

    An image is a path (from `folder` on, if relative), the bytes of a file, a data URI, an object
    with "bytes" or "path", or a PIL image. Only the user shows images, and their tokens are never
    predicted. An image file is copied: what happens to it later changes no document.
    """

    chat: Chat
    images: str
    folder: str
    vision: VisionConfig

    @property
    def columns(self) -> tuple[str, ...]:
        return self.chat.columns

    @property
    def optional(self) -> tuple[str, ...]:
        return (self.images, *self.chat.optional)

    @property
    def masked(self) -> bool:
        return True

    def settings(self) -> dict[str, Any]:
        v = self.vision
        sizing = [v.patch_size, v.downsample_ratio, v.max_image_tokens, v.min_pixels]
        return self.chat.settings() | {
            "kind": "image_chat",
            "images": [self.images, self.folder],
            "sizing": [*sizing, v.max_wh_ratio],
        }

    def encode(self, values: Sequence[Mapping[str, Any]]) -> list[Document | str]:
        read: list[list[tuple[str, list[str | Shown]]] | str] = []
        for value in values:
            try:
                read.append(self.turns(value))
            except ValueError as error:
                read.append(str(error))
        whole = [turns for turns in read if not isinstance(turns, str)]
        parts = [part for turns in whole for _, content in turns for part in content]
        ids = iter(self.chat.encoder.encode([part for part in parts if isinstance(part, str)]))
        return [turns if isinstance(turns, str) else self._document(turns, ids) for turns in read]

    def turns(self, value: Mapping[str, Any]) -> list[tuple[str, list[str | Shown]]]:
        """(role, texts and images in their order) of each message; no text is empty.

        ValueError says what cannot be used.
        """
        supply = _Supply(_listed(value.get(self.images)), self.images)
        found = []
        for number, (role, content) in enumerate(self.chat.messages_of(value), start=1):
            what = f"message {number} ({role})"
            parts = [
                self._shown(part, what) if isinstance(part, _Slot) else part
                for part in _parts(content, what, self.chat.content, supply)
            ]
            if role != "user" and any(isinstance(part, Shown) for part in parts):
                raise ValueError(
                    f"{what} shows an image, which only the user can; remove it, or write "
                    f"{PLACEHOLDER} in another way if it is meant as text"
                )
            if all(isinstance(part, str) for part in parts):
                text_of("".join(map(str, parts)), f"{what}: {self.chat.content!r}")
            found.append((role, parts))
        supply.require_used()
        return found

    def _shown(self, slot: _Slot, what: str) -> Shown:
        where = f"{what}: image {slot.number}"
        if isinstance(slot.image, str) and not slot.image.startswith("data:"):
            where += f" ({slot.image})"
        return Shown(read_image(slot.image, folder=self.folder, where=where), where)

    def _document(
        self, turns: Sequence[tuple[str, list[str | Shown]]], texts: Iterator[np.ndarray]
    ) -> Document | str:
        """The turns' document; `texts` gives the ids of each of their texts, all of them."""
        encoder = self.chat.encoder
        form = chat_form(encoder)
        tokens, learnt, images = [form.begin], [False], []
        length, problem = 1, ""

        def add(ids: np.ndarray, *, label: bool) -> None:
            nonlocal length
            tokens.append(ids)
            learnt.extend([label] * len(ids))
            length += len(ids)

        for number, (role, parts) in enumerate(turns, start=1):
            spoken = self.chat.all_labels or role == "assistant"
            add(form.before[role], label=self.chat.all_labels)
            for part in parts:
                if isinstance(part, Shown):
                    plan = plan_image(part.image.width, part.image.height, self.vision)
                    images.append(_piece(part, plan, offset=length))
                    add(np.full(plan.tokens, encoder.image, np.int32), label=False)
                else:
                    ids = next(texts)
                    if told := form.problem(encoder, ids):
                        problem = problem or f"message {number} ({role}): {told}"
                    add(ids, label=spoken)
            if role == "assistant":
                add(form.end, label=True)
        if problem:
            return problem
        return Document(np.concatenate(tokens), np.array(learnt), tuple(images))


def _piece(shown: Shown, plan: ImagePlan, *, offset: int) -> ImagePiece:
    return ImagePiece(
        offset=offset,
        rows=plan.rows,
        cols=plan.cols,
        width=plan.width,
        height=plan.height,
        blob=shown.image.blob,
        origin=shown.where,
    )


@dataclass(frozen=True)
class _Slot:
    """A placeholder with its image as given; number: among the record's, from 1."""

    image: Any
    number: int


class _Supply:
    """The record's images, handed out in order."""

    def __init__(self, images: Sequence[Any], field: str) -> None:
        self._images, self._field = images, field
        self._wanted = self._shown = 0

    def next(self) -> _Slot:
        """The next image of the record's list; ValueError past its end."""
        self._wanted += 1
        self._shown += 1
        if self._wanted > len(self._images):
            raise ValueError(self._mismatch(f"at least {self._wanted}"))
        return _Slot(self._images[self._wanted - 1], self._shown)

    def own(self, image: Any) -> _Slot:
        """An image that its part holds itself."""
        self._shown += 1
        return _Slot(image, self._shown)

    def require_used(self) -> None:
        """ValueError when images are left over."""
        if self._wanted != len(self._images):
            raise ValueError(self._mismatch(str(self._wanted)))

    def _mismatch(self, placeholders: str) -> str:
        return (
            f"the messages have {placeholders} placeholder(s) ({PLACEHOLDER}) for images, but "
            f"field {self._field!r} holds {len(self._images)}; give every image one placeholder"
        )


def _listed(images: Any) -> Sequence[Any]:
    """A record's images as a list: none, one, or a list of them."""
    if images is None:
        return []
    return images if isinstance(images, list | tuple) else [images]


def _parts(content: Any, what: str, field: str, supply: _Supply) -> Iterator[str | _Slot]:
    """Texts and placeholders of a message's content, without empty texts."""
    if isinstance(content, str):
        first, *others = content.split(PLACEHOLDER)
        if first:
            yield first
        for text in others:
            yield supply.next()
            if text:
                yield text
    elif isinstance(content, list):
        for number, part in enumerate(content, start=1):
            yield from _part(part, f"{what}: part {number}", supply)
    else:
        raise ValueError(
            f"{what}: {field!r} is a {type(content).__name__}, neither a text nor a list of parts; "
            "correct it or set data.fields"
        )


def _part(part: Any, what: str, supply: _Supply) -> Iterator[str | _Slot]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        yield text_of(part.get("text"), f"{what}: 'text'")
    elif kind == "image":
        image = part.get("image")
        yield supply.next() if image is None else supply.own(image)
    else:
        raise ValueError(
            f'{what} is neither {{"type": "text", "text": ...}} nor {{"type": "image"}}; '
            "correct it or remove the record"
        )
