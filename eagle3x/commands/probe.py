"""`command=probe states=DIR`: what the hidden states of an existing dump are, column by column."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from eagle3x.commands.config import ProbeArgs
from eagle3x.config import Config
from eagle3x.types import ConfigError, EagleError


def run(args: ProbeArgs, cfg: Config, console: Console) -> None:
    """Print what the dump holds.

    Raises:
        ConfigError: no such directory.
        EagleError: no dump is there, or no drafter can be trained on it (after it was described).
    """
    from eagle3x import targets
    from eagle3x.data.dumps import Dump
    from eagle3x.diagnosis.dump_probe import probe_dump

    if not Path(args.states).is_dir():
        raise ConfigError(f"states={args.states}: no such directory")
    target = targets.resolve(cfg.target)
    dump = Dump(Path(args.states), target.hidden_size)
    verdict = probe_dump(dump, target, args.samples, cfg.capture.probe_tokens)
    console.print(verdict.describe(), markup=False, soft_wrap=True)
    console.print(f"{len(dump)} samples in {dump.directory}", markup=False, soft_wrap=True)
    if not verdict.usable:
        raise EagleError(f"{args.states} is not what a drafter can be trained on")
