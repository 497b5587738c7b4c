"""The metrics of one or several runs as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from trainer.metrics import Record, read_metrics

SMOOTHED_FROM = 100  # records; a curve of fewer shows every step well
LOG_FROM = 20  # largest over smallest gradient norm


@dataclass(frozen=True)
class Curves:
    """One run's figures as arrays; nan where a record holds null.

    tokens: real tokens seen up to each record, the horizontal axis of everything.
    """

    label: str
    tokens: np.ndarray
    loss: np.ndarray
    lr: np.ndarray
    grad_norm: np.ndarray
    tokens_per_s: np.ndarray
    eval_tokens: np.ndarray
    eval_loss: np.ndarray


def metrics_file(run: Path) -> Path:
    """The metrics of a run that is given as its folder or as the file itself."""
    return run / "metrics.jsonl" if run.is_dir() else run


def load_curves(run: Path) -> Curves:
    """Read a run. ValueError says what is missing."""
    path = metrics_file(run)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; wait until the run has logged a step")
    records = read_metrics(path)
    steps = [record for record in records if "loss" in record]
    evaluations = [record for record in records if "eval_loss" in record]
    if not steps:
        raise ValueError(f"{path} holds no step yet; wait until the run has logged one")
    tokens = _column(steps, "tokens_total")
    return Curves(
        label="/".join(path.resolve().parent.parts[-2:]),
        tokens=tokens,
        loss=_column(steps, "loss"),
        lr=_column(steps, "lr"),
        grad_norm=_column(steps, "grad_norm"),
        tokens_per_s=_column(steps, "tokens_per_s"),
        # Evaluations know their step only, and not every step is logged.
        eval_tokens=np.interp(_column(evaluations, "step"), _column(steps, "step"), tokens),
        eval_loss=_column(evaluations, "eval_loss"),
    )


def draw(runs: Sequence[Curves], output: Path) -> None:
    """Write loss, learning rate, gradient norm and speed of `runs`, overlaid, as a PNG."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    loss, lr, norm, speed = figure.subplots(2, 2).flat
    for number, curves in enumerate(runs):
        color = f"C{number % 10}"
        _line(loss, curves.tokens, curves.loss, color, label=f"{curves.label}, training")
        if curves.eval_loss.size:
            loss.plot(
                curves.eval_tokens,
                curves.eval_loss,
                color=color,
                marker="o",
                linestyle="--",
                markerfacecolor="white",
                label=f"{curves.label}, held out",
            )
        lr.plot(curves.tokens, curves.lr, color=color)
        _line(norm, curves.tokens, curves.grad_norm, color)
        _line(speed, curves.tokens, curves.tokens_per_s, color)
    _title(loss, "Loss", "cross-entropy per token (nats)")
    _title(lr, "Learning rate", "AdamW learning rate")
    _title(norm, "Gradient norm", "L2 norm before clipping")
    _title(speed, "Speed", "real tokens per second")
    lr.set_ylim(bottom=0)
    speed.set_ylim(bottom=0)
    norms = np.concatenate([curves.grad_norm[curves.grad_norm > 0] for curves in runs])
    if norms.size and norms.max() > LOG_FROM * norms.min():
        norm.set_yscale("log")
    else:
        norm.set_ylim(bottom=0)
    for axes in (lr, norm):
        axes.yaxis.set_major_formatter("{x:g}")
    loss.legend(frameon=False, fontsize="small")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120, format="png")


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None) -> None:
    """A curve; a long one as its running mean over the pale values themselves."""
    if y.size < SMOOTHED_FROM:
        axes.plot(x, y, color=color, linewidth=1.5, label=label)
        return
    axes.plot(x, y, color=color, linewidth=0.7, alpha=0.3)
    axes.plot(x, _running_mean(y, y.size // 50), color=color, linewidth=1.8, label=label)


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of the last `width` finite values at each place (fewer at the beginning)."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[width:] -= sums[:-width].copy()
    counts[width:] -= counts[:-width].copy()
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _title(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_xlabel("tokens seen")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)


def _column(records: Sequence[Record], key: str) -> np.ndarray:
    values = (record.get(key) for record in records)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
