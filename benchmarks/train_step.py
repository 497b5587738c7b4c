"""Time one training step (forward, backward, AdamW) on one pack of documents with random ids.

    python benchmarks/train_step.py --model CONFIG.json --tokenizer TOKENIZER.json \
        --seq 1024 --docs 200,312,100,412 --steps 5 --threads 2 --json

Prints tokens_per_s, seconds_per_step (the median, after one warm-up step), peak_rss_mb of the whole
process and the last loss. `--profile FILE` also writes where the time goes, by operator.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from data.engram import RowHasher
from data.tokenizer import load_tokenizer
from model.config import ModelConfig
from model.engram.owners import OwnerStore
from model.init import init_weights
from model.layout import ModelInputs
from model.transformer import DeepseekV41
from trainer.config import OptimConfig
from trainer.garbage import set_up_spared
from trainer.heap import keep_freed_memory
from trainer.optim import build_adamw
from trainer.table_optim import SparseAdam

OPTIM = OptimConfig(
    name="adamw",
    lr=1e-3,
    warmup_steps=0,
    hold_steps=0,
    decay_steps=0,
    final_lr=1e-3,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    table_lr_multiplier=1.0,
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--profile", type=Path, help="write torch's operator table here")
    args = parser.parse_args()
    step = prepared(args)
    loss, seconds = step(), []
    profiler = torch.profiler.profile() if args.profile else nullcontext()
    with profiler as trace, set_up_spared():
        for _ in range(args.steps):
            begin = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - begin)
    if trace is not None:
        table = trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=45)
        args.profile.write_text(table)
    median = statistics.median(seconds)
    report = {
        "tokens_per_s": sum(args.docs) / median,
        "seconds_per_step": median,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "loss": loss,
    }
    if args.json:
        print(json.dumps(report))
    else:
        print("  ".join(f"{name} {value:.4g}" for name, value in report.items()))


def prepared(args: argparse.Namespace) -> Callable[[], float]:
    """A training step on the pack, as a rank on the CPU does it; it returns the loss."""
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    config = ModelConfig.from_released(json.loads(args.model.read_text()))
    model = DeepseekV41(config)
    init_weights(model, seed=0, std=config.initializer_range)
    store = OwnerStore(config, seed=0)
    inputs, labels, rows = pack(config, args)
    optimizer = build_adamw(model, OPTIM)
    tables = SparseAdam(store, beta1=OPTIM.beta1, beta2=OPTIM.beta2, eps=OPTIM.eps)

    def step() -> float:
        window = store.open_window([rows])
        out = model(inputs, engram=window.rows(0), labels=labels)
        assert out.loss_sum is not None
        loss = out.loss_sum / (labels != -100).sum()
        loss.backward()
        optimizer.step()
        tables.step(window.ids, window.grads, lr=OPTIM.lr)
        optimizer.zero_grad()
        return loss.item()

    return step


def pack(
    config: ModelConfig, args: argparse.Namespace
) -> tuple[ModelInputs, torch.Tensor, torch.Tensor]:
    """Aligned documents of the asked lengths in one row, random ids, and their Engram rows."""
    vocabulary = len(load_tokenizer(str(args.tokenizer)))
    rng = np.random.default_rng(0)
    ids = np.full(args.seq, config.pad_token_id, dtype=np.int64)
    seq, position = np.zeros_like(ids), np.zeros_like(ids)
    labels = np.full_like(ids, -100)
    at = 0
    for number, size in enumerate(args.docs, start=1):
        if at + size > args.seq:
            raise SystemExit(f"--docs {args.docs} do not fit --seq {args.seq}")
        here = slice(at, at + size)
        ids[here] = rng.integers(config.pad_token_id + 1, vocabulary, size)
        seq[here], position[here] = number, np.arange(size)
        labels[at : at + size - 1] = ids[at + 1 : at + size]
        at += size + -size % config.alignment
    hasher = RowHasher.for_model(config, tokenizer=str(args.tokenizer))
    assert hasher is not None, "this benchmark wants a model with Engram layers"
    rows = hasher.rows(ids[None], seq_ids=seq[None], live=seq[None] > 0)
    inputs = ModelInputs(
        input_ids=torch.from_numpy(ids)[None],
        seq_ids=torch.from_numpy(seq)[None],
        position_ids=torch.from_numpy(position)[None],
        token_types=torch.full((1, args.seq), -1, dtype=torch.int8),
    )
    return inputs, torch.from_numpy(labels)[None], torch.from_numpy(rows)


def parser_of(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a released config.json")
    parser.add_argument("--tokenizer", type=Path, required=True, help="its tokenizer.json")
    parser.add_argument("--seq", type=int, default=1024, help="tokens in the pack")
    parser.add_argument(
        "--docs",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[200, 312, 100, 412],
        help="document lengths, comma separated",
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a line")
    return parser


if __name__ == "__main__":
    main()
