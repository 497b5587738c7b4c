"""Time the data's way from texts to batches, each part beside a plain baseline in the same run.

    python benchmarks/loading.py --json

Prints, for the released tokenizer and the released Engram geometry (24 rows x 2 layers a token):

prepare  tokens/s of tokenising into the cache on one core; baseline: the tokenizer alone
plan     documents/s packed on one core, and the share of padding; baseline: naive first fit
hash     tokens/s on one and on two threads; baseline: copying as many rows
loader   tokens/s of batches in this process and from --workers processes, everything in it;
         baseline: copying a batch's memory

Rates are by the clock (`_per_s`) and by processor time (`_per_cpu_s`), which a busy machine
disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ["RAYON_NUM_THREADS"] = "1"  # of the tokenizers library: one core
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from data.cache.encoded import SPAN, Encoded
from data.cache.prepare import prepare
from data.cache.prepared import PreparedSet
from data.cache.writer import SetWriter
from data.config import DataConfig
from data.documents import Document
from data.engram import RowHasher
from data.loader import batches
from data.packs import PackedSet, PackSource
from data.plan.settings import PlanSettings
from data.plan.stored import StoredPlans
from data.plan.window import plan_window
from data.sources.embedded import EmbeddedSource
from data.tokenizer import load_tokenizer
from model.config import ModelConfig

PACK_LENGTH, ALIGNMENT = 8192, 2
MODEL = ModelConfig(  # the released Engram sizes on a small backbone
    vocab_size=129280,
    hidden_size=64,
    num_hidden_layers=15,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
    compress_ratios=(0,) * 15,
    kv_source_layer_ids=(),
    index_source_layer_ids=(),
    index_n_heads=2,
    index_head_dim=32,
    index_topk=4,
    engram_layer_ids=(1, 14),
    engram_num_embeddings=(384006168, 384016682),
)
Report = dict[str, float]


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report = {
            "prepare": time_prepare(folder, megabytes=args.megabytes),
            "plan": time_plan(documents=args.documents),
        }
        hasher = RowHasher.for_model(MODEL, tokenizer="deepseek")
        assert hasher is not None
        packs = random_packs(folder / "set", hasher, packs=args.packs)
        report["hash"] = time_hash(packs, hasher)
        report["loader"] = time_loader(packs, workers=args.workers)
    if args.json:
        print(json.dumps(report))
        return
    for part, figures in report.items():
        print(part)
        for name, value in figures.items():
            print(f"  {name:32} {value:,.6g}")


def time_prepare(folder: Path, *, megabytes: float) -> Report:
    """Texts in a JSON file into the cache, and through the tokenizer alone, on one core."""
    texts = some_texts(int(megabytes * 1e6))
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = DataConfig(
        source="jsonl",
        paths=(str(source),),
        pack_length=PACK_LENGTH,
        cache_dir=str(folder / "cache"),
        processes=1,
    )
    backend = load_tokenizer("deepseek").backend_tokenizer
    tokens = 0

    def alone() -> None:
        nonlocal tokens
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        tokens = sum(len(encoding.ids) for encoding in encoded)

    plain = timed(alone)
    whole = timed(lambda: prepare(config, MODEL, say=lambda text: None))
    return rates("", tokens, whole) | rates("baseline_tokenizer_", tokens, plain)


def time_plan(*, documents: int) -> Report:
    """Plans of log-normal documents; naive first fit of as many as it manages in reason."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.5, 1.2, documents).astype(np.int64).clip(2)
    report = rates("", documents, timed(lambda: planned(lengths)), what="documents")
    for alignment in (1, ALIGNMENT):
        share, slots = padding(lengths[:100_000], alignment=alignment)
        report |= {f"padding_share_align_{alignment}": share}
        report |= {f"of_it_alignment_slots_align_{alignment}": slots}
    few = lengths[:10_000].clip(max=PACK_LENGTH)
    bins = 0

    def naive() -> None:
        nonlocal bins
        bins = first_fit(few)

    report |= rates("baseline_first_fit_", len(few), timed(naive), what="documents")
    report["baseline_first_fit_padding_share"] = 1 - int(few.sum()) / (bins * PACK_LENGTH)
    return report


def time_hash(packs: PackedSet, hasher: RowHasher) -> Report:
    """Rows of whole batches of one pack, on one thread and two; copying such rows."""
    stream = batches(packs, **one_rank(steps=16), workers=0)
    ready = [batch for (batch,) in stream]
    slots = sum(batch.input_ids.numel() for batch in ready)

    def hash_one(number: int) -> None:
        ids, documents = ready[number].input_ids.numpy(), ready[number].seq_ids.numpy()
        hasher.rows(ids, seq_ids=documents, live=documents != 0)

    def on_one() -> None:
        for number in range(len(ready)):
            hash_one(number)

    def on_two() -> None:
        list(pool.map(hash_one, range(len(ready))))

    def copy() -> None:
        for batch in ready:
            batch.engram_rows.numpy().copy()

    with ThreadPoolExecutor(2) as pool:
        report = rates("1_thread_", slots, best(on_one))
        report |= rates("2_threads_", slots, best(on_two))
    return report | rates("baseline_copy_", slots, best(copy))


def time_loader(packs: PackedSet, *, workers: int) -> Report:
    """Batches here and from workers, after those have started; copying a batch's memory."""
    report: Report = {}
    for count in dict.fromkeys((0, workers)):
        with closing(batches(packs, **one_rank(steps=200), workers=count)) as stream:
            for _ in range(8 * max(count, 1)):
                next(stream)
            tokens = 0
            before, clock = cpu_seconds(), time.perf_counter()
            for (batch,) in stream:
                tokens += batch.real_tokens
            elapsed, spent = time.perf_counter() - clock, cpu_seconds() - before
        report |= {f"{count}_workers_tokens_per_s": tokens / elapsed}
        report |= {f"{count}_workers_cpu_us_per_token_here": spent / tokens * 1e6}
    (batch,) = next(iter(batches(packs, **one_rank(steps=1), workers=0)))
    tensors = [t.numpy() for t in vars(batch).values() if hasattr(t, "numpy")]
    copied = best(lambda: [array.copy() for array in tensors])
    return report | rates("baseline_copy_", batch.real_tokens, copied)


def one_rank(*, steps: int) -> dict[str, Any]:
    """Arguments of `batches` for one pack a step on one rank."""
    return {
        "first_step": 0,
        "steps": steps,
        "packs_per_step": 1,
        "packs_per_micro_batch": 1,
        "rank": 0,
        "ranks": 1,
    }


def random_packs(folder: Path, hasher: RowHasher, *, packs: int) -> PackedSet:
    """Packs of log-normal documents of random tokens."""
    rng = np.random.default_rng(1)
    writer = SetWriter(folder, header={"fingerprint": "", "files": ["random"]}, labelled=False)
    made = 0
    while made < packs * PACK_LENGTH:
        lengths = rng.lognormal(6.5, 1.2, 100).astype(np.int64).clip(2)
        documents = [Document(rng.integers(3, 128_000, n, dtype=np.int32)) for n in lengths]
        writer.append(Encoded.of(documents, [(0, 1)] * len(documents)), position=None)
        made += int(lengths.sum())
    writer.complete()
    settings = PlanSettings(PACK_LENGTH, ALIGNMENT, "split", 0.0, 0)
    source = PackSource("data", StoredPlans(PreparedSet.open(folder), settings))
    return PackedSet((source,), PACK_LENGTH, MODEL.pad_token_id, seed=0, hasher=hasher)


def some_texts(size: int) -> list[str]:
    """English of `size` characters: the embedded texts in random order, again and again."""
    source = EmbeddedSource("text")
    texts = [record.value["text"] for block in source.blocks() for record in source.read(block)]
    rng, found, done = np.random.default_rng(0), [], 0
    while done < size:
        found.append(texts[rng.integers(len(texts))])
        done += len(found[-1])
    return found


def planned(lengths: np.ndarray, *, alignment: int = ALIGNMENT):
    """The plan of one window of documents of these lengths."""
    return plan_window(
        window=0,
        offsets=np.append(0, np.cumsum(lengths)),
        spans=np.zeros(0, dtype=SPAN),
        settings=PlanSettings(PACK_LENGTH, alignment, "split", 0.0, 0),
        origin=str,
    )


def padding(lengths: np.ndarray, *, alignment: int) -> tuple[float, float]:
    """(share of positions without a token, share that are slots behind documents)."""
    plan = planned(lengths, alignment=alignment)
    positions, tokens = len(plan) * PACK_LENGTH, int(lengths.sum())
    slots = int((-plan.lengths % alignment).sum())
    return 1 - tokens / positions, slots / positions


def first_fit(lengths: np.ndarray) -> int:
    """Bins that first fit opens, as one would write it at first."""
    spaces: list[int] = []
    for length in lengths.tolist():
        for number, space in enumerate(spaces):
            if space >= length:
                spaces[number] -= length
                break
        else:
            spaces.append(PACK_LENGTH - length)
    return len(spaces)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(seconds by the clock, processor seconds) of one call."""
    cpu, clock = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - clock, time.process_time() - cpu


def best(work: Callable[[], object], *, times: int = 5) -> tuple[float, float]:
    """The least of either over several calls."""
    clocks, cpus = zip(*(timed(work) for _ in range(times)), strict=True)
    return min(clocks), min(cpus)


def rates(prefix: str, count: int, spent: tuple[float, float], *, what: str = "tokens") -> Report:
    return {
        f"{prefix}{what}_per_s": count / spent[0],
        f"{prefix}{what}_per_cpu_s": count / spent[1],
    }


def cpu_seconds() -> float:
    """Processor seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=8, help="of text to prepare")
    parser.add_argument("--documents", type=int, default=2**20, help="to plan")
    parser.add_argument("--packs", type=int, default=64, help="of random tokens for the loader")
    parser.add_argument("--workers", type=int, default=2, help="of the loader")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
