"""`dsv41 data ACTION +experiment=... [overrides]`: the same words that start the run."""

from __future__ import annotations

import argparse
import importlib
import sys

from launcher.composed import add_run_words, composed_run
from launcher.failures import Terminated, terminable
from launcher.problems import Stop
from trainer.exit_codes import ExitCode

# name: (module with run(RunConfig) -> exit code, what it does)
ACTIONS = {
    "prepare": ("launcher.data_tools.prepare", "tokenise into the cache, ahead of training"),
    "inspect": ("launcher.data_tools.inspect", "lengths, packing, labels, Engram rows, some packs"),
    "check": ("launcher.data_tools.check", "list every document that cannot be used; code 65"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "\n".join(
        ["Looks at the data of a run. Takes the words that start the run.", ""]
        + [f"  {name:<10} {purpose}" for name, (_, purpose) in ACTIONS.items()]
    )
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    add_run_words(parser)


def run(args: argparse.Namespace) -> int:
    """Compose and validate the run's configuration, then do the action."""
    try:
        with terminable():
            config = composed_run(
                args.overrides, config_dir=args.config_dir, config_name=args.config_name
            )
            return importlib.import_module(ACTIONS[args.action][0]).run(config)
    except Stop as stop:
        message, code = stop.message, stop.code
    except Terminated:
        message, code = "asked to stop; what is done is kept.", ExitCode.AGAIN
    except KeyboardInterrupt:
        message, code = "interrupted; what is done is kept.", ExitCode.INTERRUPTED
    print(f"dsv41 data {args.action}: {message}", file=sys.stderr)
    return code
