"""`dsv41 COMMAND`: tools around runs. A command's module is imported when it is used."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from launcher.tee import keep_working_unheard
from trainer.exit_codes import ExitCode

# name: (module with add_arguments(parser) and run(args) -> exit code, what it does)
COMMANDS = {
    "checkpoint": ("launcher.checkpoints", "list, verify or prune the checkpoints of a run"),
    "completion": ("launcher.completion", "a script for the shell's tab key"),
    "data": ("launcher.data_tools.command", "prepare, inspect or check the data of a run"),
    "doctor": ("launcher.doctor.command", "is this machine fit for a run, and if not, the fix"),
    "drill": ("launcher.drill.command", "rehearse faults on a setup: does a run survive them"),
    "export": ("launcher.export", "write a run's model as a folder of safetensors"),
    "generate": ("launcher.generate", "sample text from a run's newest checkpoint"),
    "join": ("launcher.join", "take part in a run of several nodes that another one supervises"),
    "logs": ("launcher.runs.logs", "what a rank printed, or prints"),
    "plan": ("launcher.plan.command", "bytes per rank and the mesh of a run, before it starts"),
    "plot": ("launcher.plot", "draw the loss curves of runs to a PNG"),
    "resume": ("launcher.runs.resume", "go on with a run, as it was or with changes"),
    "runs": ("launcher.runs.listing", "a table of all runs"),
    "status": ("launcher.runs.status", "what a run is doing, how it got there, what to do next"),
    "stop": ("launcher.runs.stop", "ask a run to save and end, and wait for it"),
    "sweep": ("launcher.sweep.command", "the points of a sweep: status, retry, best"),
    "verify": ("launcher.verify.command", "check this installation against reference cases"),
}
TRAIN = ("drill", "join", "resume", "sweep")  # commands that may work for days


def main(argv: list[str] | None = None) -> int:
    """The command's entry point: returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    overview = argparse.ArgumentParser(
        prog="dsv41",
        description="Tools around training runs; dsv41-train starts a run.",
        epilog="dsv41 COMMAND --help tells more.",
    )
    chosen = overview.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (_, purpose) in COMMANDS.items():
        chosen.add_parser(name, help=purpose, add_help=False)
    name = overview.parse_known_args(argv)[0].command
    rest = list(argv)
    rest.remove(name)
    module = importlib.import_module(COMMANDS[name][0])
    if name in TRAIN:
        keep_working_unheard()
    parser = argparse.ArgumentParser(prog=f"dsv41 {name}", description=COMMANDS[name][1])
    module.add_arguments(parser)
    try:
        return module.run(parser.parse_intermixed_args(rest))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # whoever read the output has gone: head, a pager
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
