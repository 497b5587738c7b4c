"""What is appended comes back from the windows, however often the writer was killed."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.cache.encoded import Encoded
from data.cache.prepared import PreparedSet
from data.cache.writer import SetWriter
from data.documents import Document, ImagePiece
from data.errors import DataError

HEADER = {"fingerprint": "f" * 64, "files": ["a.jsonl", "b.jsonl"]}


def document(number: int, *, masked: bool) -> Document:
    """1 to 7 tokens made from its number; every third one carries an image."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, 1000, 1 + number % 7, dtype=np.int32)
    images = ()
    if number % 3 == 0:
        images = (ImagePiece(0, 1, number, 42, 14, bytes([number % 256]) * (number % 5), "x"),)
    return Document(tokens, rng.random(len(tokens)) < 0.5 if masked else None, images)


def blocks(sizes: list[int], *, masked: bool = True) -> list[Encoded]:
    made, number = [], 0
    for size in sizes:
        numbers = range(number, number + size)
        documents = [document(n, masked=masked) for n in numbers]
        made.append(Encoded.of(documents, [(n % 2, n + 1) for n in numbers]))
        number += size
    return made


def writer(folder: Path, *, masked: bool = True, window: int = 5) -> SetWriter:
    return SetWriter(folder, header=HEADER, labelled=masked, window_documents=window)


def write(folder: Path, parts: list[Encoded], *, masked: bool = True) -> PreparedSet:
    target = writer(folder, masked=masked)
    for number, part in enumerate(parts):
        target.append(part, position=number + 1)
    return target.complete()


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


@pytest.mark.parametrize("masked", [True, False])
def test_documents_come_back_in_order(tmp_path, masked):
    made = write(tmp_path / "set", blocks([3, 0, 9, 1], masked=masked), masked=masked)
    assert made.complete
    assert made.windows == 3
    assert [made.documents(w) for w in range(3)] == [5, 5, 3]
    for number in range(13):
        w, d = divmod(number, 5)
        expected = document(number, masked=masked)
        here = slice(*made.offsets(w)[d : d + 2])
        np.testing.assert_array_equal(made.tokens(w)[here], expected.tokens)
        assert made.lengths(w)[d] == len(expected.tokens)
        labelled = made.labelled(w)
        if masked:
            assert labelled is not None
            np.testing.assert_array_equal(labelled[here], expected.labelled)
        else:
            assert labelled is None
        assert made.origin(w, d) == f"{HEADER['files'][number % 2]}:{number + 1}"
        spans = made.image_spans(w)
        mine = spans[spans["document"] == d]
        assert len(mine) == len(expected.images)
        for span, image in zip(mine, expected.images, strict=True):
            assert (span["offset"], span["rows"], span["cols"]) == (0, image.rows, image.cols)
            assert (span["width"], span["height"]) == (image.width, image.height)
            first = int(span["blob_offset"])
            blob = made.blobs(w)[first : first + int(span["blob_length"])]
            assert blob.tobytes() == image.blob


@pytest.fixture(scope="module")
def no_fsync():
    """Durability costs milliseconds a file, and no test here pulls the plug."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=4),
)
def test_stopped_and_resumed_it_is_byte_for_byte_the_same(no_fsync, tmp_path_factory, sizes, stops):
    """A stop after some blocks, with the last of them durable or only half on disk."""
    folder = tmp_path_factory.mktemp("sets")
    parts = blocks(sizes)
    write(folder / "whole", parts)
    for count, durable in stops:
        target = writer(folder / "stopped")
        for number in range(target.position or 0, min(len(parts), (target.position or 0) + count)):
            target.append(parts[number], position=number + 1)
            if durable:
                target.sync()
        target.close()
    target = writer(folder / "stopped")
    for number in range(target.position or 0, len(parts)):
        target.append(parts[number], position=number + 1)
    target.complete()
    assert contents(folder / "stopped") == contents(folder / "whole")


def test_killed_between_any_two_writes(no_fsync, tmp_path):
    """The process dies (SIGKILL) at the n-th write to the disk, for every n."""
    parts = blocks([3, 8, 4, 2])
    whole = write(tmp_path / "whole", parts)
    expected = contents(whole.folder)
    survived = 0
    for calls in range(200):
        folder = tmp_path / f"killed-{calls}"
        child = os.fork()
        if not child:
            left = calls

            def die(path: Path, *rest, kept=Path.rename, **options):
                nonlocal left
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return kept(path, *rest, **options)

            Path.rename = Path.replace = die  # pyright: ignore
            target = writer(folder)
            for number, part in enumerate(parts):
                target.append(part, position=number + 1)
                target.sync()
            target.complete()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        target = writer(folder) if not (folder / "complete.json").exists() else None
        if target is not None:
            for number in range(target.position or 0, len(parts)):
                target.append(parts[number], position=number + 1)
            target.complete()
        assert contents(folder) == expected, calls
        if not status:
            survived += 1
            break
    assert survived


def test_interrupted_between_any_two_lines_of_the_writer(no_fsync, tmp_path):
    """Ctrl-C may come anywhere; what is then made durable is whole, and nothing is twice."""
    parts = blocks([3, 8, 4])
    expected = contents(write(tmp_path / "whole", parts).folder)
    for lines in range(0, 400, 3):
        left = lines

        def trace(frame, event, arg):
            nonlocal left
            if not frame.f_code.co_filename.endswith("writer.py"):
                return None
            if event == "line" and frame.f_code.co_name in ("append", "_write", "_finish_window"):
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            return trace

        folder = tmp_path / f"stopped-{lines}"
        target = writer(folder)
        sys.settrace(trace)
        try:
            for number, part in enumerate(parts):
                target.append(part, position=number + 1)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        done = left >= 0
        target.sync()
        target.close()
        target = writer(folder)
        for number in range(target.position or 0, len(parts)):
            target.append(parts[number], position=number + 1)
        target.complete()
        assert contents(folder) == expected, lines
        if done:
            break
    else:
        pytest.fail("no run came to its end")


def test_a_window_that_was_tampered_with_is_begun_anew(no_fsync, tmp_path):
    parts = blocks([3, 3])
    whole = write(tmp_path / "whole", parts)
    target = writer(tmp_path / "set")
    target.append(parts[0], position=1)
    target.sync()
    target.close()
    (tmp_path / "set" / "partial" / "tokens.bin").write_bytes(b"")
    assert writer(tmp_path / "set").position is None
    assert contents(write(tmp_path / "set", parts).folder) == contents(whole.folder)


def test_a_set_that_still_grows_can_be_read(tmp_path):
    target = writer(tmp_path / "set")
    target.append(blocks([7])[0], position=1)
    growing = PreparedSet.open(tmp_path / "set")
    assert (growing.windows, growing.complete) == (1, False)
    assert growing.documents(0) == 5
    target.complete()
    assert (growing.windows, growing.complete) == (2, True)


def test_digests_follow_the_documents(tmp_path):
    made = write(tmp_path / "a", blocks([5, 5, 5]))
    other = write(tmp_path / "b", [*blocks([10]), blocks([4])[0]])
    assert [made.digest(w) for w in (0, 1)] == [other.digest(w) for w in (0, 1)]
    assert made.digest(2) != other.digest(2)


def test_another_version_and_damage_are_named(tmp_path):
    made = write(tmp_path / "set", blocks([3]))
    (made.window_folder(0) / "tokens.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"tokens\.bin is damaged"):
        made.tokens(0)
    header = made.folder / "set.json"
    header.write_text(header.read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(DataError, match=r"another version \(format 0"):
        PreparedSet.open(made.folder)
    with pytest.raises(DataError, match="cannot be read"):
        PreparedSet.open(tmp_path)


def test_a_discarded_window_leaves_the_finished_ones(tmp_path):
    target = writer(tmp_path / "set")
    target.append(blocks([8])[0], position=1)
    target.discard_partial()
    assert {p.name for p in (tmp_path / "set").iterdir()} == {"set.json", "window-00000"}
    again = writer(tmp_path / "set")
    assert (again.position, again.skip, again.window) == (None, 5, 1)
