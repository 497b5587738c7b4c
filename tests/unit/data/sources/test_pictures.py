"""Pictures that need no download: always the same, captioned as they look."""

import sys

import numpy as np

from data.images.pixels import open_image
from data.images.shapes import COLOURS, FORMS, draw
from data.sources.base import Record


def test_conversations_come_in_order_and_resume(opened, walked, resumes_anywhere):
    source = opened(source="pictures", kind="image_chat")
    assert resumes_anywhere(source) > 10
    found = walked(source)
    assert len(found) == source.size == len(source.files)
    for number, record in enumerate(found):
        assert isinstance(record, Record)
        assert source.files[record.file] == f"pictures[{number}]"
        user, assistant = record.value["messages"]
        assert user["content"].count("<image>") == len(record.value["images"])
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert assistant["content"].endswith(".")
    counts = {len(record.value["images"]) for record in found}
    assert counts == {1, 2}


def test_the_photograph_is_found_without_importing_matplotlib(opened, walked):
    before = "matplotlib" in sys.modules
    source = opened(source="pictures", kind="image_chat")
    first = walked(source)[0].value
    assert open_image(first["images"][0], where="here").size == (512, 600)
    assert "Grace Hopper" in first["messages"][1]["content"]
    assert ("matplotlib" in sys.modules) == before
    assert source.identity() == opened(source="pictures", kind="image_chat").identity()


def test_fields_are_named_as_configured(opened, walked):
    from data.config import FieldsConfig

    fields = FieldsConfig(messages="talk", role="who", content="says", images="shows")
    record = walked(opened(source="pictures", kind="image_chat", fields=fields))[1]
    assert set(record.value) == {"talk", "shows"}
    assert set(record.value["talk"][0]) == {"who", "says"}


def test_captions_tell_colour_form_and_place():
    captions = set()
    for number in range(300):
        picture = draw(number)
        captions.add(picture.caption)
        _, _, colour, form, *place = picture.caption.split(" ")
        background = picture.pixels[0, 0]
        shape = (picture.pixels != background).any(-1)
        assert (picture.pixels[shape] == COLOURS[colour]).all()
        assert form in FORMS
        y, x = (float(axis.mean()) / 48 for axis in np.nonzero(shape))
        # A quarter from the edge, give or take the offset; a triangle's middle is lower.
        assert abs(y - (0.25 if "top" in place else 0.75)) < 0.16, picture.caption
        assert abs(x - (0.25 if "left" in place else 0.75)) < 0.16, picture.caption
    assert len(captions) > 150
    assert np.array_equal(draw(7).pixels, draw(7).pixels)
