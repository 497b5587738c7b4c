"""`dsv41 completion bash|zsh|fish`: a script that completes commands, options and names of runs.

The script holds what there is to complete, so that the tab key starts no Python; names of runs are
what lies in runs/ at that moment. dsv41-train has Hydra's own: dsv41-train -sc install=bash.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainer.exit_codes import ExitCode

USE = {
    "bash": 'eval "$(dsv41 completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(dsv41 completion zsh)" in ~/.zshrc, below compinit',
    "fish": "dsv41 completion fish > ~/.config/fish/completions/dsv41.fish",
}


@dataclass(frozen=True)
class Option:
    """The spellings of an option, what it is for, and whether a value follows."""

    names: tuple[str, ...]
    purpose: str
    takes_value: bool


@dataclass(frozen=True)
class Command:
    """What may follow a command. words: its actions. runs: whether it takes the name of a run."""

    name: str
    purpose: str
    words: tuple[str, ...]
    options: tuple[Option, ...]
    runs: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "\n".join(
        [
            "Prints a script that completes dsv41's commands, options and runs. To use it:",
            "",
            *(f"  {shell:<5} {how}" for shell, how in USE.items()),
            "",
            'dsv41-train completes its settings by eval "$(dsv41-train -sc install=bash)", and so',
            "for zsh (by the same script) and fish.",
        ]
    )
    parser.add_argument("shell", choices=USE, metavar="SHELL", help=", ".join(USE))


def run(args: argparse.Namespace) -> int:
    """Print the script and return the exit code."""
    write: Callable[[Sequence[Command]], Iterator[str]] = SCRIPTS[args.shell]
    print("\n".join(write(all_commands())))
    return ExitCode.DONE


def all_commands() -> list[Command]:
    """Every command of dsv41, as its own parser describes it."""
    from launcher.tools import COMMANDS

    found = []
    for name, (module, purpose) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"dsv41 {name}")
        importlib.import_module(module).add_arguments(parser)
        shown = [a for a in parser._actions if a.help != argparse.SUPPRESS]
        options = tuple(
            Option(tuple(a.option_strings), a.help or "", a.nargs != 0)
            for a in shown
            if a.option_strings
        )
        words = [str(w) for a in shown if not a.option_strings for w in a.choices or ()]
        runs = any(a.dest == "runs_dir" for a in shown)
        found.append(Command(name, purpose, tuple(words), options, runs))
    return found


def bash(commands: Sequence[Command]) -> Iterator[str]:
    yield "_dsv41() {"
    yield "    local current=${COMP_WORDS[COMP_CWORD]} words= runs= path"
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f"        words={shlex.quote(' '.join(c.name for c in commands))}"
    yield "    else"
    yield "        case ${COMP_WORDS[1]} in"
    for command in commands:
        words = [*command.words, *(n for option in command.options for n in option.names)]
        runs = " runs=yes" if command.runs else ""
        yield f"            {command.name}) words={shlex.quote(' '.join(words))}{runs} ;;"
    yield "        esac"
    yield "    fi"
    yield '    if [ -n "$runs" ]; then'
    yield "        for path in runs/*/*/config.yaml; do"
    yield "            path=${path#runs/}"
    yield '            [ "$path" != "*/*/config.yaml" ] && words="$words ${path%/config.yaml}"'
    yield "        done"
    yield "    fi"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield "complete -o default -F _dsv41 dsv41"


def zsh(commands: Sequence[Command]) -> Iterator[str]:
    yield "#compdef dsv41"
    yield "_dsv41() {"
    yield "    local -a found runs"
    yield "    if (( CURRENT == 2 )); then"
    described = [_zsh_described(c.name, c.purpose) for c in commands]
    yield f"        found=({' '.join(described)})"
    yield "        _describe command found"
    yield "        return"
    yield "    fi"
    yield "    case ${words[2]} in"
    for command in commands:
        options = [_zsh_described(n, o.purpose) for o in command.options for n in o.names]
        yield f"        {command.name})"
        if command.words:
            yield f"            compadd -- {' '.join(command.words)}"
        if command.runs:
            yield "            runs=(runs/*/*/config.yaml(N))"
            yield "            compadd -- ${${runs#runs/}%/config.yaml}"
        yield f"            found=({' '.join(options)})"
        yield "            ;;"
    yield "    esac"
    yield "    if [[ ${words[CURRENT]} == -* ]]; then"
    yield "        _describe option found"
    yield "    else"
    yield "        _files"
    yield "    fi"
    yield "}"
    yield "compdef _dsv41 dsv41"


def fish(commands: Sequence[Command]) -> Iterator[str]:
    yield "function __dsv41_runs"
    yield "    for path in runs/*/*/config.yaml"
    yield "        string replace -r '^runs/(.*)/config.yaml$' '$1' $path"
    yield "    end"
    yield "end"
    for command in commands:
        about = shlex.quote(command.purpose)
        yield f"complete -c dsv41 -n __fish_use_subcommand -f -a {command.name} -d {about}"
    for command in commands:
        after = f"complete -c dsv41 -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            yield f"{after} -a {shlex.quote(' '.join(command.words))}"
        if command.runs:
            yield f"{after} -a '(__dsv41_runs)'"
        for option in command.options:
            names = "".join(
                f" -l {n[2:]}" if n.startswith("--") else f" -s {n[1:]}" for n in option.names
            )
            value = " -r" if option.takes_value else ""
            yield f"{after}{names}{value} -d {shlex.quote(option.purpose)}"


def _zsh_described(word: str, purpose: str) -> str:
    escaped = purpose.replace("\\", "\\\\").replace(":", "\\:")
    return shlex.quote(f"{word}:{escaped}")


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
