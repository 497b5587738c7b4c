"""Whether a folder holds what a model needs: every fault by name, from the headers alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from model.config import ModelConfig
from model.released.files import Stored, WeightsFolder
from model.released.layout import Form, Shape, quantised_form, scale_of, stored_tensors

PLAIN = ("F32", "BF16", "F16")


def audit(
    folder: WeightsFolder, wanted: Mapping[str, Shape], *, unread: Callable[[str], bool]
) -> list[str]:
    """What is wrong with the folder's files, then with its tensors; empty when all is well.

    wanted: decoded shape by released name. unread: names that may be there and are nobody's
    business. Nothing is read.
    """
    present = folder.tensors
    found = list(folder.problems)
    for name in sorted(wanted.keys() - folder.lost):
        if name in present:
            found += _fit(name, wanted[name], folder)
        elif name.endswith(".weight") and scale_of(name) in present:
            found.append(f"{scale_of(name)} is there, but {name} is missing")
        else:
            found.append(f"{name} is missing")
    for name in sorted(present.keys() - wanted.keys()):
        if not _accounted(name, wanted) and not unread(name):
            found.append(f"{name} belongs to no part of this model")
    return found


def unread_by(config: ModelConfig, *, tables: bool) -> Callable[[str], bool]:
    """Which names of a released checkpoint a model leaves alone.

    The draft (`mtp.*`), layers past its last, the image tower when it builds none, and the Engram
    tables when they are not its own (`tables` false).
    """
    parts = [r"mtp\."]
    if not config.vision.num_hidden_layers:
        parts.append(r"vision\.|aligner\.|image_(start|end|newline)$")
    if not tables:
        parts.append(r"layers\.\d+\.engram\.embed\.")
    always = re.compile("|".join(parts))

    def unread(name: str) -> bool:
        layer = re.match(r"layers\.(\d+)\.", name)
        later = layer is not None and int(layer[1]) >= config.num_hidden_layers
        return later or always.match(name) is not None

    return unread


def _accounted(name: str, wanted: Mapping[str, Shape]) -> bool:
    """Whether it is the scale of a wanted weight, which `_fit` has judged."""
    return name.endswith(".scale") and name.removesuffix("scale") + "weight" in wanted


def _fit(name: str, shape: Shape, folder: WeightsFolder) -> Iterator[str]:
    weight = folder.tensors[name]
    scale = folder.tensors.get(scale_of(name)) if name.endswith(".weight") else None
    form = quantised_form(weight)
    if form is None:
        if weight.dtype not in PLAIN:
            yield f"{name} has dtype {weight.dtype}, which is none of a weight's"
        if scale is not None:
            yield f"{scale.name} is there, but {name} is {weight.dtype}, which has no scale"
        if weight.shape != shape:
            yield f"{name} has shape {list(weight.shape)}, not {list(shape)}"
        return
    if len(shape) != 2:
        yield f"{name} of shape {list(shape)} is stored as {form.value}; only matrices are"
        return
    yield from _quantised(weight, scale, shape, form, lost=scale_of(name) in folder.lost)


def _quantised(
    weight: Stored, scale: Stored | None, shape: Shape, form: Form, *, lost: bool
) -> Iterator[str]:
    expected = stored_tensors(weight.name, shape, form)
    scale_name = scale_of(weight.name)
    if form is Form.FP4 and len(weight.shape) == 2:
        decoded = (weight.shape[0], weight.shape[1] * 2)
        if decoded != shape:
            half = " Half of the packed values are lost." if 2 * decoded[1] == shape[1] else ""
            yield f"{weight.name} decodes from FP4 to {list(decoded)}, not {list(shape)}.{half}"
    elif weight.shape != expected[weight.name][1]:
        yield f"{weight.name} has shape {list(weight.shape)}, not {list(shape)}"
    if scale is None:
        if not lost:
            yield f"{weight.name} is {form.value}, but {scale_name} is missing"
        return
    dtype, wanted = expected[scale_name]
    if scale.dtype != dtype:
        yield f"{scale_name} has dtype {scale.dtype}, not {dtype}"
    if scale.shape != wanted:
        yield f"{scale_name} has shape {list(scale.shape)}, not {list(wanted)}"
