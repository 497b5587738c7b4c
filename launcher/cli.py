"""`dsv41-train`: from the command line to a run's last line. The only place where Hydra runs."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from launcher import compose, help_text, hydra_launcher
from launcher.failures import Terminated, terminable
from launcher.problems import Stop
from launcher.submit import submit
from launcher.tee import keep_working_unheard
from launcher.validate import validate
from trainer.exit_codes import ExitCode

DRY_RUN = {"--dry-run": "launcher.slurm.dry_run=true"}


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name=compose.CONFIG_NAME)
def _run(cfg: DictConfig) -> NoReturn:
    """One run. Leaves by SystemExit in every case: Hydra carries no exit code, and would print."""
    chosen = HydraConfig.get()
    try:
        if chosen.mode == RunMode.MULTIRUN:
            raise Stop(ExitCode.USAGE, "hydra/launcher cannot be replaced; leave it out to sweep.")
        outcome = submit(
            validate(cfg),
            overrides=list(chosen.overrides.task),
            flags=compose.config_flags(chosen),
        )
    except Stop as stop:
        _refuse(stop)
    except Exception:
        _bug()
    sys.exit(outcome.code)


def main() -> NoReturn:
    """The command's entry point; ends with the exit code of the run."""
    keep_working_unheard()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, not to Hydra's own printing
    sys.argv[1:] = together([DRY_RUN.get(word, word) for word in sys.argv[1:]])
    if not sys.warnoptions:  # what libraries say to one another
        warnings.simplefilter("ignore", FutureWarning)
    OmegaConf.register_new_resolver("dsv41_help", help_text.render, replace=True)
    hydra_launcher.register()
    try:
        with terminable():
            _run()
    except Stop as stop:
        _refuse(stop)
    except KeyboardInterrupt:
        _refuse(Stop(ExitCode.INTERRUPTED, "interrupted; nothing was started."))
    except Terminated:
        _refuse(Stop(ExitCode.AGAIN, "asked to stop; nothing was started."))
    except Exception as error:
        problems = compose.diagnose(get_args_parser().parse_args(), error)
        if problems is None:
            _bug()
        _refuse(problems)
    sys.exit(hydra_launcher.finish())  # sweepers, --help, --cfg and the like come back


def together(argv: Sequence[str]) -> list[str]:
    """`argv` with all overrides in one place; argparse knows no others (`a=1 -m b=2`)."""
    args, unknown = get_args_parser().parse_known_args(argv)
    stray = [word for word in unknown if not word.startswith("-")]
    if not stray:
        return list(argv)
    overrides = [*args.overrides, *stray]
    return [*overrides, *(word for word in argv if word not in overrides)]


def _refuse(stop: Stop) -> NoReturn:
    print(f"dsv41-train: {stop.message}", file=sys.stderr)
    sys.exit(stop.code)


def _bug() -> NoReturn:
    traceback.print_exc()
    print("dsv41-train: this should not have happened; please report it.", file=sys.stderr)
    sys.exit(ExitCode.BUG)


if __name__ == "__main__":
    main()
