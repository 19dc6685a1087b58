"""`command=convert`: a published drafter in another format, with layer ids that are right wherever it is served."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from eagle3x.commands.config import ConvertArgs
from eagle3x.config import Config
from eagle3x.types import ConfigError


def run(args: ConvertArgs, cfg: Config, console: Console) -> None:
    """Write the drafter that `drafter=pretrained` names into the directory `args.to`, and say what it is.

    Raises:
        ConfigError: no published drafter is named, or `to` is there already.
        EagleError: the drafter cannot be read, is another target's, or nobody knows its boundaries.
    """
    from eagle3x import targets
    from eagle3x.drafters import checkpoint, export, location, origin, speculators_format

    directory = Path(args.to)
    if cfg.drafter.source != "pretrained":
        raise ConfigError("command=convert needs a published drafter: drafter=pretrained drafter.path=DIRECTORY")
    if directory.exists():
        raise ConfigError(f"to={directory} exists already; name a new directory")
    location.check(cfg.drafter)
    target, source = targets.resolve(cfg.target), location.resolve(cfg.drafter)
    assert source is not None, "the config refuses a pretrained drafter without a source"
    published = checkpoint.read(source, cfg.drafter.made_by, cfg.drafter.allow_bin)
    found = origin.of(cfg.drafter, published.config, target.num_blocks)
    boundaries = found.boundaries
    if boundaries is None:
        raise ConfigError(f"{source}: {found.said_by}")
    refused = None
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place: what is there under its own name is whole.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as temporary:
        made = Path(temporary) / "drafter"
        if args.format == "speculators":
            checkpoint.module(published, target)
            drafts = cfg.speculation.num_speculative_tokens
            config = speculators_format.config(published.arch, published.dtype, boundaries, target, drafts)
            checkpoint.write(made, speculators_format.tensors(published.tensors, published.arch), config)
        else:
            checkpoint.republish(published, made, target)
            refused = export.rewrite_ids(made, boundaries, target)
        made.rename(directory)
    console.print(
        f"{checkpoint.format_of(published.config)} in {source} -> {args.format} in {directory}: boundaries"
        f" {list(boundaries)} ({found.said_by})" + (f"; not for SGLang: {refused}" if refused else ""),
        markup=False,
        soft_wrap=True,
    )
