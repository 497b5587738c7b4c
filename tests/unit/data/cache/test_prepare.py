"""Sources end up in the cache, once, whole, and the same whoever prepares them however often."""

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.cache import parallel, room
from data.cache.prepare import prepare, prepare_set, recipes
from data.config import MixtureSource
from data.errors import CacheError, DataError, WorkerDiedError
from data.sources import jsonl, streams

WORDS = "the cat sat on the mat and then it ran away from the dog".split()


def lines(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, count)
    return [{"text": " ".join(rng.choice(WORDS, size))} for size in sizes]


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def documents(prepared) -> list[list[int]]:
    found = []
    for window in range(prepared.windows):
        borders = prepared.offsets(window)
        tokens = prepared.tokens(window)
        found += [tokens[a:b].tolist() for a, b in itertools.pairwise(borders)]
    return found


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks of a small source, and processes even so."""
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(streams, "CHUNK", 2000)
    monkeypatch.setattr(parallel, "SMALL", 0)


@pytest.fixture
def make(make_data, model, tmp_path, write_jsonl):
    """make(lines, **settings): (DataConfig, its only recipe)."""

    def made(written, *, name="corpus.jsonl", **settings):
        path = write_jsonl(*written, name=name)
        given = {
            "source": "jsonl",
            "paths": (str(path),),
            "cache_dir": str(tmp_path / "cache"),
            "window_documents": 100,
            "processes": 1,
        }
        data = make_data(**(given | settings))
        return data, recipes(data, model)[0]

    return made


def test_documents_are_found_again(make, model):
    written = lines(250)
    data, recipe = make(written)
    (source,) = prepare(data, model)
    assert (source.name, source.weight, source.epochs) == ("", 1.0, None)
    found = source.set
    assert [found.documents(w) for w in range(found.windows)] == [100, 100, 50]
    ids = recipe.pipeline.kind.encoder.encode([line["text"] for line in written])
    assert documents(found) == [[0, *text.tolist(), 1] for text in ids]
    assert found.origin(2, 49).endswith("corpus.jsonl:250")
    assert found.fingerprint == recipe.fingerprint
    before = contents(found.folder)
    (again,) = prepare(data, model)
    assert contents(again.set.folder) == before
    assert [p.name for p in Path(data.cache_dir).iterdir()] == [found.folder.name]


def test_the_count_of_processes_does_not_show(make, small_blocks, tmp_path):
    _, recipe = make(lines(400))
    one = prepare_set(recipe, tmp_path / "one", processes=1)
    seen = []
    several = prepare_set(
        recipe,
        tmp_path / "several",
        processes=3,
        progress=lambda source, done, total: seen.append((source, done, total)),
    )
    assert len(seen) > 10
    assert contents(several.folder) == contents(one.folder)
    size = recipe.pipeline.source.size
    assert seen == sorted(seen) and seen[-1] == ("data", size, size)


SCRIPT = """
import sys
from data.cache import parallel, prepare, writer
from data.config import DataConfig
from data.sources import jsonl, streams
from model.config import ModelConfig
import pickle
if __name__ == "__main__":
    jsonl.BLOCK_BYTES = streams.CHUNK = 2000
    writer.SYNC_SECONDS = 0.0
    data, model = pickle.load(open(sys.argv[1], "rb"))
    prepare.prepare(data, model, say=lambda text: print(text, flush=True))
    print("prepared", flush=True)
"""


@pytest.fixture
def start(tmp_path, model):
    """start(data): a process of its own that prepares it, syncing after every block."""
    small, file = model, tmp_path / "prepare_it.py"
    root = str(Path(__file__).parents[4])
    running = []

    def begin(data, model=small, script=SCRIPT) -> subprocess.Popen:
        file.write_text(script)
        pickled = tmp_path / "config.pickle"
        pickled.write_bytes(pickle.dumps((data, model)))
        process = subprocess.Popen(
            [sys.executable, str(file), str(pickled)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()


def durable_documents(folder: Path) -> int:
    """How many are safe in the set that is being written."""
    finished = len(list(folder.glob("window-*"))) * 100
    try:
        progress = json.loads((folder / "progress.json").read_text())
    except (FileNotFoundError, ValueError):
        return finished
    return finished + progress["counts"]["lengths"]


def wait_for(condition, *, process) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_killed_three_times_and_resumed(make, start, model, small_blocks, tmp_path):
    data, recipe = make(lines(3000))
    folder = data.cache_folder / recipe.folder_name
    for least in (50, 700, 1500):
        process = start(data)
        wait_for(lambda least=least: durable_documents(folder) >= least, process=process)
        process.kill()
        process.wait()
        assert not (folder / "complete.json").exists()
    before = durable_documents(folder)
    seen = []
    (resumed,) = prepare(data, model, progress=lambda source, done, total: seen.append(done))
    whole = prepare_set(recipe, tmp_path / "whole", processes=1)
    assert contents(resumed.set.folder) == contents(whole.folder)
    blocks = len(list(recipe.pipeline.source.blocks()))
    assert before >= 1500
    assert len(seen) < 0.6 * blocks  # what was done was not done again


def test_two_processes_share_the_work_of_one(make, start, small_blocks):
    data, recipe = make(lines(2000))
    folder = data.cache_folder / recipe.folder_name
    first = start(data)
    wait_for(lambda: durable_documents(folder) > 0, process=first)
    first.send_signal(signal.SIGSTOP)  # or it is done before the second has started
    second = start(data)
    waiting = second.stdout.readline()
    first.send_signal(signal.SIGCONT)
    assert waiting.startswith(b"Waiting for process %d on " % first.pid)
    for process in (first, second):
        said, errors = process.communicate(timeout=120)
        assert said == b"prepared\n", errors
    assert [p.name for p in data.cache_folder.iterdir()] == [recipe.folder_name]


def test_a_dead_owners_lock_is_taken_over(make, start, model):
    data, recipe = make(lines(3000))
    folder = data.cache_folder / recipe.folder_name
    process = start(data)
    wait_for(lambda: durable_documents(folder) > 0, process=process)
    process.kill()
    process.wait()
    assert list(data.cache_folder.glob("*.lock"))
    said = []
    prepare(data, model, say=said.append)
    assert said == []
    assert not list(data.cache_folder.glob("*.lock"))


def test_an_interrupt_keeps_what_is_done(make, model, small_blocks):
    data, recipe = make(lines(400))

    def stop(source: str, done: int, total: int | None) -> None:
        if total and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(data, model, progress=stop)
    assert durable_documents(data.cache_folder / recipe.folder_name) > 150


def test_a_killed_worker_is_told(make, model, small_blocks, monkeypatch):
    data, _ = make(lines(100), processes=2)
    monkeypatch.setattr(parallel, "_in_order", _dying)
    with pytest.raises(WorkerDiedError, match=r"data\.processes"):
        prepare(data, model)


SEVERAL = SCRIPT.replace("data, model =", "parallel.SMALL = 0; data, model =")


def test_workers_end_with_a_killed_parent(make, start):
    data, recipe = make(lines(3000), processes=2)
    folder = data.cache_folder / recipe.folder_name
    parent = start(data, script=SEVERAL)
    wait_for(lambda: durable_documents(folder) > 0, process=parent)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    if not children.exists():
        pytest.skip("this system does not list a process's children")
    pids = children.read_text().split()
    assert len(pids) >= 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _dying(pool, blocks, *, ahead):
    yield pool.submit(os._exit, 1).result()


def test_findings_name_every_line_nearby_and_leave_nothing(make, model):
    bad = [{"text": "fine"}, {"body": 1}, {"text": ""}, "{", b'{"text": "\xff"}', {"text": "fine"}]
    data, _ = make(bad)
    with pytest.raises(DataError) as raised:
        prepare(data, model)
    text = str(raised.value)
    path = data.paths[0]
    assert f"  {path}:2: no field 'text' (fields here: 'body'); add it or set data.fields" in text
    assert f"  {path}:3: field 'text' is empty" in text
    assert f"  {path}:4: not JSON" in text
    assert f"  {path}:5: not UTF-8" in text
    assert "dsv41 data check" in text
    assert list(data.cache_folder.iterdir()) == []


def test_a_field_that_is_missing_in_line_17(make, model):
    data, _ = make([{"text": "x"}] * 16 + [{"body": "x"}] + [{"text": "x"}] * 3)
    with pytest.raises(DataError, match=r"^\S+corpus\.jsonl:17: no field 'text' .*data\.fields$"):
        prepare(data, model)


def test_many_findings_stay_on_one_screen(make, model):
    data, _ = make([{}] * 300)
    with pytest.raises(DataError, match="and 290 more nearby") as raised:
        prepare(data, model)
    assert len(str(raised.value).splitlines()) == 13


def test_long_documents(make, model):
    written = [{"text": "dog " * n} for n in (1, 30, 3)]
    data, _ = make(written, max_document_length=10)
    whole = documents(prepare(make(written)[0], model)[0].set)
    split = documents(prepare(data, model)[0].set)
    assert len(whole[0]) <= 10 < len(whole[1])
    assert [token for d in split for token in d] == [token for d in whole for token in d]
    assert max(map(len, split)) == 10
    (dropped,) = prepare(replace(data, on_long_document="drop"), model)
    kept = [document for document in whole if len(document) <= 10]
    assert documents(dropped.set) == kept
    assert dropped.set.dropped == len(whole) - len(kept) > 0
    with pytest.raises(DataError, match=r"corpus\.jsonl:2: .* more than data\.max_document_length"):
        prepare(replace(data, on_long_document="refuse"), model)
    with pytest.raises(DataError, match=r"all 3 documents are longer than data\.max_document_l"):
        prepare(replace(data, max_document_length=2, on_long_document="drop"), model)


def test_what_changes_the_set(make, model, tmp_path):
    written = lines(5)
    data, recipe = make(written)

    def other(**changes):
        return recipes(replace(data, **changes), model)[0]

    assert other(pack_length=32, holdout=0.5, workers=3, processes=7) == recipe
    same = other(window_documents=7)
    assert same.fingerprint == recipe.fingerprint
    assert same.folder_name != recipe.folder_name
    split = other(max_document_length=50)
    assert split.fingerprint != recipe.fingerprint

    path = Path(data.paths[0])
    os.utime(path, ns=(1, 1))
    touched = other()
    assert touched.fingerprint == recipe.fingerprint
    assert touched.folder_name != recipe.folder_name
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(path.read_bytes())
    assert other(paths=(str(moved),)).fingerprint == recipe.fingerprint
    moved.write_bytes(path.read_bytes().replace(b"cat", b"dog"))
    assert other(paths=(str(moved),)).fingerprint != recipe.fingerprint


def test_each_source_of_a_mixture_is_a_set_of_its_own(make, make_data, model, tmp_path):
    data, _ = make(lines(20))
    web = MixtureSource(source="jsonl", paths=data.paths, weight=3.0)
    help_texts = MixtureSource(source="embedded", weight=1.0, epochs=2, max_document_length=64)
    mixed = make_data(
        source="mixture",
        mixture={"web": web, "help": help_texts},
        cache_dir=str(tmp_path / "cache"),
        window_documents=100,
    )
    seen = []
    sources = prepare(mixed, model, progress=lambda source, done, total: seen.append(source))
    assert [(s.name, s.weight, s.epochs) for s in sources] == [("web", 3.0, None), ("help", 1.0, 2)]
    assert list(dict.fromkeys(seen)) == ["data.mixture.web", "data.mixture.help"]
    assert prepare(data, model)[0].set == sources[0].set
    assert int(sources[1].set.lengths(0).max()) == 64


def test_bad_sources_of_a_mixture_are_named(make_data, model, tmp_path):
    gone = MixtureSource(source="text", paths=(str(tmp_path / "none"),), weight=1.0)
    mixed = make_data(source="mixture", mixture={"a": gone, "b": gone}, cache_dir=str(tmp_path))
    with pytest.raises(DataError) as raised:
        prepare(mixed, model)
    for line, name in zip(str(raised.value).splitlines(), "ab", strict=True):
        assert "none: no such file" in line
        assert line.endswith(f"correct data.mixture.{name}.paths")


def test_a_disk_that_will_not_do_is_told_early(make, model, small_blocks, monkeypatch):
    data, _ = make(lines(2000))
    disk = room.shutil.disk_usage(data.paths[0])
    monkeypatch.setattr(
        room.shutil, "disk_usage", lambda path: disk._replace(free=room.SPARE + 50_000)
    )
    with pytest.raises(CacheError) as raised:
        prepare(data, model)
    assert raised.value.full
    text = str(raised.value)
    free = f"{room.SPARE + 50_000:,} bytes free"
    assert free in text and "data.cache_dir=FOLDER" in text
    needed = int(text.split("about ")[1].split(" bytes")[0].replace(",", ""))
    monkeypatch.undo()
    (made,) = prepare(data, model)
    size = sum(len(raw) for raw in contents(made.set.folder).values())
    assert 0.9 * size < needed < 1.1 * size
    assert not (made.set.folder / "partial").exists()


def test_a_full_disk(make, model, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        data, recipe = make(lines(3000), cache_dir=str(disk / "cache"))
        with pytest.raises(
            CacheError, match=r"needs about .* bytes more, and .* 0 bytes free"
        ) as raised:
            prepare(data, model)
        assert raised.value.full
        folder = data.cache_folder / recipe.folder_name
        assert "partial" not in {p.name for p in folder.iterdir()}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_cache_that_cannot_be_made(make, model, tmp_path):
    (tmp_path / "file").write_text("")
    data, _ = make(lines(3), cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match=r"cannot be written .*data\.cache_dir=FOLDER") as raised:
        prepare(data, model)
    assert not raised.value.full


MEASURED = """
import pickle, resource, sys
from data.cache.prepare import prepare
pages = []
def look(*told):
    pages.append(int(open("/proc/self/statm").read().split()[1]))
if __name__ == "__main__":
    data, model = pickle.load(open(sys.argv[1], "rb"))
    prepare(data, model, progress=look)
    print(max(pages) * resource.getpagesize())
"""


def test_a_lock_that_cannot_be_made(make, model, monkeypatch):
    data, recipe = make(lines(3))
    (data.cache_folder / f"{recipe.folder_name}.lock").mkdir(parents=True)
    with pytest.raises(CacheError, match=r"cannot be written \(Is a directory"):
        prepare(data, model)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(make, make_model, start):
    """8 MB and 50 MB, read by a process each: the same peak."""
    model = make_model(vocab_size=129280, engram_layer_ids=(), engram_num_embeddings=())
    peaks = []
    for millions in (8, 50):
        text = [{"text": " ".join(line["text"] for line in lines(300, seed=1))}]
        count = millions * 10**6 // len(json.dumps(text[0]))
        data, _ = make(text * count, name=f"{millions}.jsonl", tokenizer="deepseek")
        out, error = start(data, model, script=MEASURED).communicate(timeout=280)
        assert out, error.decode()
        peaks.append(int(out) / 2**20)
    assert peaks[1] < peaks[0] + 16, peaks
