"""`dsv41 generate RUN --prompt TEXT`: what a run's model says, from its newest checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from launcher import freeze
from launcher.problems import Stop
from launcher.run_dir import RunFolder
from launcher.runs.names import add_run, named
from trainer.exit_codes import ExitCode

if TYPE_CHECKING:
    from model.config import ModelConfig
    from model.engram.store import RowStore
    from model.transformer import DeepseekV41
    from trainer.sampling import Sampling

UNFINISHED = "\ufffd"  # what the bytes of half a character decode to


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample text from the newest whole checkpoint of a run, also while it trains, or from a "
        "folder of weights. Text goes to standard output as it comes, all else to standard error."
    )
    add_run(parser, other="a folder with config.json, tokenizer.json and safetensors")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="how the text begins")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens at most")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0 = always the likeliest token"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="choose among the likeliest tokens of this share"
    )
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal texts")
    parser.add_argument("--num", type=int, default=1, metavar="N", help="how many texts")


def run(args: argparse.Namespace) -> int:
    """Print args.num texts and return the exit code."""
    try:
        _run(args)
    except Stop as stop:
        print(f"dsv41 generate: {stop.message}", file=sys.stderr)
        return stop.code
    return ExitCode.DONE


@dataclass(frozen=True)
class Speaker:
    """A model that can be asked. tokenizer: its name or file, as data.tokenizer has it."""

    title: str
    config: ModelConfig
    tokenizer: str
    model: DeepseekV41
    store: RowStore


def _run(args: argparse.Namespace) -> None:
    from data.engram import RowHasher
    from data.tokenizer import load_tokenizer
    from trainer.sampling import NextToken, Sampling, generate

    sampling = Sampling(args.max_tokens, args.temperature, args.top_p)
    _check(args, sampling)
    speaker = _open(args.run, args.runs_dir)
    config, tokenizer = speaker.config, load_tokenizer(speaker.tokenizer)
    prompt = [
        config.bos_token_id,
        *tokenizer.backend_tokenizer.encode(args.prompt, add_special_tokens=False).ids,
    ]
    if args.max_tokens > config.max_position_embeddings - len(prompt):
        raise Stop(
            ExitCode.USAGE,
            f"the prompt has {len(prompt):,} tokens and --max-tokens is {args.max_tokens:,}, but "
            f"the model holds {config.max_position_embeddings:,}; shorten one of them",
        )
    print(speaker.title, file=sys.stderr)
    hasher = RowHasher.for_model(config, tokenizer=speaker.tokenizer)
    write = _writer()
    started, count = time.perf_counter(), 0
    for number in range(args.num):
        if number:
            write("\n\n")
        tokens = generate(
            NextToken(speaker.model, speaker.store, hasher),
            prompt,
            sampling,
            config=config,
            tokens=len(tokenizer),
            dice=np.random.default_rng([args.seed, number]),
        )
        write(args.prompt)
        seen = list(prompt[1:])
        for piece in pieces(tokenizer.backend_tokenizer.decode, seen, tokens):
            write(piece)
        count += len(seen) - len(prompt) + 1
    write("\n")
    seconds = time.perf_counter() - started
    print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} a second", file=sys.stderr)
    speaker.store.close()


def pieces(decode: Callable[..., str], seen: list[int], tokens: Iterator[int]) -> Iterator[str]:
    """The text that each token adds, whole characters only; appends the tokens to `seen`.

    A token may end inside a character, whose text then comes with a later one, or at the end.
    """
    told = len(decode(seen, skip_special_tokens=False))
    for token in tokens:
        seen.append(token)
        text = decode(seen, skip_special_tokens=False)
        whole = len(text.rstrip(UNFINISHED))
        if whole > told:
            yield text[told:whole]
            told = whole
    yield decode(seen, skip_special_tokens=False)[told:]


def _check(args: argparse.Namespace, sampling: Sampling) -> None:
    found = [f"--{problem}" for problem in sampling.problems()]
    if args.num < 1:
        found.append(f"--num={args.num} must be 1 or more")
    if args.seed < 0:
        found.append(f"--seed={args.seed} must be 0 or more")
    if found:
        raise Stop(ExitCode.USAGE, "\n".join(found))


def _open(text: str, runs_dir: Path) -> Speaker:
    """The model of a run, or in a folder of weights; Stop says what is wrong with it."""
    from data.errors import DataError
    from trainer.checkpoint.errors import DamagedCheckpointsError

    try:
        if (Path(text) / "config.json").is_file():
            return _of_weights(Path(text))
        return _of_run(named(text, runs_dir, other="a folder of weights").path)
    except DamagedCheckpointsError as error:
        raise Stop(ExitCode.IO_ERROR, str(error)) from error
    except DataError as error:
        raise Stop(ExitCode.BAD_DATA, str(error)) from error
    except ValueError as error:
        raise Stop(ExitCode.CONFIG, str(error)) from error


def _of_run(path: Path) -> Speaker:
    from trainer.checkpoint.folders import newest_whole
    from trainer.device import choose_device
    from trainer.restore import restored_model

    config = freeze.load(RunFolder(path).config_file)
    folder = newest_whole(path / "checkpoints")
    if folder is None:
        raise Stop(
            ExitCode.CONFIG,
            f"{path} has no checkpoint yet; wait for its first (checkpoint.every="
            f"{config.checkpoint.every}, and one at the end), or stop it: Ctrl-C saves one",
        )
    model, store, state = restored_model(config, folder, device=choose_device(0))
    title = f"{path}, step {state.step}"
    return Speaker(title, config.model, config.data.tokenizer, model, store)


def _of_weights(path: Path) -> Speaker:
    from data.tokenizer import tokenizer_problems
    from trainer.device import choose_device
    from trainer.restore import folder_model

    config, model, store = folder_model(path, device=choose_device(0))
    tokenizer = str(path / "tokenizer.json")
    if found := tokenizer_problems(tokenizer, config):
        raise ValueError("\n".join(found))
    return Speaker(str(path), config, tokenizer, model, store)


def _writer() -> Callable[[str], None]:
    """Prints at once; on a terminal without the control characters that a model may hit upon."""
    terminal = sys.stdout.isatty()

    def write(text: str) -> None:
        if terminal:
            text = "".join(c if c.isprintable() or c in "\n\t" else UNFINISHED for c in text)
        print(text, end="", flush=True)

    return write
