"""`python -m eagle3x`: check everything, then hand over to Hydra. No torch import before the work starts.

Exit codes: 0 done, 1 a cell failed, 2 bad input (nothing was started).
"""

from __future__ import annotations

import logging
import shlex
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from eagle3x import composition
from eagle3x.commands.config import ArtifactsArgs, CommandArgs, ConvertArgs, EstimateArgs, ExplainArgs, ProbeArgs
from eagle3x.config import Config
from eagle3x.types import ConfigError, EagleError

logger = logging.getLogger("eagle3x")
failed_cells: list[str] = []


def main() -> None:
    """Entry point of `python -m eagle3x` and of the `eagle3x` script."""
    # Hydra's parser takes no override after a flag that follows another override; -m may stand anywhere.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    args = get_args_parser().parse_args()
    try:
        if not (args.help or args.hydra_help or args.info or args.shell_completion):
            cells = composition.cells(args.overrides, args.multirun)
            if cells[0].command is not None:
                run_command(cells[0].command, cells[0].config)
                return
            if not args.cfg:
                from eagle3x.preflight import check

                for cell in cells:
                    check(cell.config)
    except ConfigError as e:
        refuse(e)
    except EagleError as e:
        print(f"eagle3x: {e}", file=sys.stderr)
        sys.exit(1)
    hydra.main(version_base="1.3", config_path=str(composition.CONF_DIR.resolve()), config_name="config")(run_cell)()
    if failed_cells:
        sys.exit(1)


def refuse(error: ConfigError) -> NoReturn:
    """Say what is wrong with the input, and stop."""
    print(f"eagle3x: {error}", file=sys.stderr)
    sys.exit(2)


def run_command(command: CommandArgs, cfg: Config) -> None:
    """What is not a stage: `command=explain`, `artifacts`, `convert`, `probe`, `estimate`."""
    from rich.console import Console

    from eagle3x.commands import artifacts, convert, estimate, explain, probe

    match command:
        case ExplainArgs():
            explain.run(command, Console())
        case ArtifactsArgs():
            from eagle3x.artifacts import Store

            artifacts.run(Store(Path(cfg.artifacts)), command, Console())
        case ConvertArgs():
            convert.run(command, cfg, Console())
        case ProbeArgs():
            probe.run(command, cfg, Console())
        case EstimateArgs():
            estimate.run(command, cfg, Console())


def run_cell(composed: DictConfig) -> None:
    """One cell, in the run directory that Hydra made. A failure is recorded there, so that a sweep goes on."""
    hydra_cfg = HydraConfig.get()
    overrides = tuple(hydra_cfg.overrides.task)
    run_dir = Path(hydra_cfg.runtime.output_dir)
    in_sweep = str(hydra_cfg.mode) == "RunMode.MULTIRUN"
    plain = OmegaConf.masked_copy(composed, [str(k) for k in composed])
    cell = composition.checked(overrides, plain)

    from eagle3x.experiment import run_experiment

    try:
        run_experiment(cell, run_dir, in_sweep, command_line())
    except ConfigError as e:
        if not in_sweep:
            refuse(e)
        fail(overrides, str(e))
    except EagleError as e:
        fail(overrides, str(e))
    except Exception as e:  # an engine or a disk can fail in any way: the other cells still run
        logger.debug(traceback.format_exc())
        traceback.print_exc()
        fail(overrides, f"{type(e).__name__}: {e}")


def fail(overrides: tuple[str, ...], message: str) -> None:
    """Remember a failed cell for the exit code."""
    name = " ".join(overrides) or "default"
    failed_cells.append(name)
    logger.error("failed: %s: %s", name, message)


def command_line() -> str:
    """The command as the user typed it."""
    return shlex.join(["python", "-m", "eagle3x", *sys.argv[1:]])
