"""`dsv41 data inspect`: what a run would train on, in figures, a picture and a few packs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from data.corpus import Corpus, load_corpus
from data.statistics import EngramReuse, SourceStatistics, Stretch, engram_reuse, stretches
from data.tokenizer import load_tokenizer
from launcher.data_tools.lengths import draw_lengths, length_bars
from launcher.data_tools.prepare import prepared, told
from launcher.run_config import RunConfig
from trainer.exit_codes import ExitCode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STEPS = 16
PACKS = 2
DOCUMENTS = 12  # of a pack
TOKENS = 120  # of a document, from its beginning, and a few from its end
LAST_TOKENS = 20


def run(config: RunConfig) -> int:
    """Prepare what is not there yet, count everything, and show the first packs of the run."""
    made = prepared(config)
    out = Console(highlight=False, soft_wrap=True)
    with told():
        corpus = load_corpus(config.data, config.model, seed=config.seed, made=made)
        found = [SourceStatistics.of(source) for source in corpus.train.sources]
        reuse = []
        if not corpus.train.problems(PACKS):
            reuse = engram_reuse(
                corpus.train, packs_per_step=config.train.packs_per_step, steps=STEPS
            )
    for source in found:
        show_source(out, source)
    picture = Path(f"{config.name}-documents.png")
    draw_lengths(found, picture)
    out.print(f"drawn in {picture.absolute()}\n")
    show_reuse(out, reuse)
    show_packs(out, corpus, load_tokenizer(config.data.tokenizer))
    return ExitCode.DONE


def show_source(out: Console, found: SourceStatistics) -> None:
    """Figures and histogram of one source."""
    mean = found.tokens / max(1, found.documents - found.dropped)
    lines = [
        (
            "documents",
            f"{found.documents:,}"
            + _besides(found.cuts, "cuts where one is longer than a pack")
            + _besides(found.dropped, "dropped as too long"),
        ),
        ("tokens", f"{found.tokens:,}, {mean:,.0f} a document, the longest {found.longest:,}"),
        ("labels", f"{_share(found.labels, found.tokens)} of the tokens are learnt"),
        ("packs", f"{found.packs:,} for training, {found.held_out:,} held out"),
        (
            "padding",
            f"{_share(found.padding, found.positions)} of the positions; "
            f"{_share(found.slots, found.positions)} are alignment slots behind documents",
        ),
    ]
    if found.dropped:
        more = found.dropped - len(found.dropped_first)
        names = ", ".join(found.dropped_first) + (f" and {more:,} more" if more else "")
        lines.insert(1, ("dropped", names))
    if found.images:
        lines.insert(-3, ("images", f"{found.images:,}"))
    out.print(Text(found.name, style="bold"))
    for name, text in lines:
        out.print(f"  {name:10} {text}")
    out.print("  documents by length in tokens")
    for line in length_bars(found):
        out.print(f"  {line}")


def show_reuse(out: Console, reuse: list[EngramReuse]) -> None:
    """How often Engram rows are wanted again."""
    for found in reuse:
        out.print(Text(f"Engram layer {found.layer}", style="bold"))
        out.print(
            f"  {found.tokens:,} tokens of the first steps look up {found.looked_up:,} rows, "
            f"{found.distinct:,} different ones ({_share(found.distinct, found.rows)} of the "
            f"table's {found.rows:,}); {found.per_step:,.0f} different ones a step"
        )
        for size, share in found.top:
            out.print(f"  the {size:,} most wanted rows take {share:.1%} of the look-ups")
    if reuse:
        out.print()


def show_packs(out: Console, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> None:
    """The first packs of the run: borders of documents, and what is learnt in colour."""
    if corpus.train.problems(PACKS):
        return
    out.print(
        Text.assemble(
            "The first packs. What is learnt is ",
            ("green", "green"),
            ", the rest ",
            ("grey and ⟨in brackets⟩", "bright_black"),
            ".",
        )
    )
    for index in range(PACKS):
        place = corpus.train.place(index)
        documents = stretches(corpus.train, place)
        used = sum(len(document.tokens) for document in documents)
        out.print(
            Text(
                f"\npack {index}: {len(documents):,} documents, {used:,} tokens, "
                f"{corpus.train.describe(index)}",
                style="bold",
            )
        )
        for document in documents[:DOCUMENTS]:
            out.print(
                Text(
                    f"── column {document.column:,}, {len(document.tokens):,} tokens, "
                    f"{document.where}",
                    style="cyan",
                )
            )
            out.print(_coloured(document, tokenizer))
        if len(documents) > DOCUMENTS:
            out.print(Text(f"── and {len(documents) - DOCUMENTS:,} more", style="cyan"))


def _coloured(document: Stretch, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The beginning and end of a document as text."""
    text = Text()
    size = len(document.tokens)
    parts = [slice(0, size)]
    if size > TOKENS + LAST_TOKENS:
        parts = [slice(0, TOKENS), slice(size - LAST_TOKENS, size)]
    for number, part in enumerate(parts):
        if number:
            text.append(f" … {size - TOKENS - LAST_TOKENS:,} tokens … ", style="cyan")
        for learnt, words in _runs(document.tokens[part], document.learnt[part], tokenizer):
            text.append(words if learnt else f"⟨{words}⟩", "green" if learnt else "bright_black")
    return text


def _runs(
    tokens: np.ndarray, learnt: np.ndarray, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[bool, str]]:
    """Stretches of tokens that are all learnt or all not, as text; special tokens show."""
    pairs = zip(learnt.tolist(), tokens.tolist(), strict=True)
    for same, run_of in groupby(pairs, key=lambda pair: pair[0]):
        yield same, str(tokenizer.decode([token for _, token in run_of]))


def _share(part: float, whole: float) -> str:
    share = part / whole if whole else 0.0
    return f"{share:.2%}" if share >= 0.001 or not share else f"{share:.1e}"


def _besides(count: int, what: str) -> str:
    return f", {count:,} {what}" if count else ""
