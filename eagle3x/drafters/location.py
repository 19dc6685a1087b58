"""Where a published drafter lies: a directory, or a repository of the hub. No torch here."""

from __future__ import annotations

from pathlib import Path

from eagle3x import hub
from eagle3x.drafters.config import Drafter
from eagle3x.fingerprint import fingerprint_files
from eagle3x.types import ConfigError

CONFIG = "config.json"


def named(cfg: Drafter) -> tuple[Path | None, str | None, str]:
    """The directory or the hub id that the config names (both None: trained from scratch), and the key that does."""
    if cfg.init_from is not None:
        directory, key = Path(cfg.init_from), "drafter.init_from"
        return (directory, None, key) if directory.exists() else (None, cfg.init_from, key)
    if cfg.path is not None:
        return Path(cfg.path), None, "drafter.path"
    return None, cfg.hub_id, "drafter.hub_id"


def check(cfg: Drafter) -> None:
    """Find a missing or unusable checkpoint before any work: ConfigError. No network."""
    directory, hub_id, key = named(cfg)
    if hub_id is not None and not hub.is_hub_id(hub_id):
        raise ConfigError(f"{key}={hub_id!r} is no directory, and no repository of the hub (as org/name would be)")
    if directory is None:
        return
    if not directory.is_dir():
        raise ConfigError(f"{key}={directory}: no such directory")
    if not (directory / CONFIG).is_file():
        raise ConfigError(f"{key}={directory}: has no {CONFIG}")
    if not weight_files(directory, cfg.allow_bin):
        pickled = " (its .bin files are pickles: drafter.allow_bin=true reads tensors from them, and nothing else)"
        raise ConfigError(
            f"{key}={directory}: has no *.safetensors file{pickled if any(directory.glob('*.bin')) else ''}"
        )


def at_hand(cfg: Drafter) -> Path | None:
    """config.json of the checkpoint, if it can be read without the network."""
    directory, hub_id, _ = named(cfg)
    if directory is not None:
        return directory / CONFIG
    return None if hub_id is None else hub.cached(hub_id, cfg.revision, CONFIG)


def resolve(cfg: Drafter) -> Path | None:
    """The checkpoint's directory, downloaded if the hub has it; None if the drafter is trained from scratch."""
    directory, hub_id, key = named(cfg)
    if hub_id is None:
        return directory
    files = [CONFIG, "README.md", "*.safetensors", *(["*.bin"] if cfg.allow_bin else [])]
    return hub.snapshot(hub_id, cfg.revision, files, key, f"{key.replace('hub_id', 'path')}=DIRECTORY")


def weight_files(directory: Path, allow_bin: bool) -> list[Path]:
    """The files that hold the weights: safetensors, else pickles if they are allowed."""
    files = sorted(directory.glob("*.safetensors"))
    return files or (sorted(directory.glob("*.bin")) if allow_bin else [])


def fingerprint(cfg: Drafter) -> str | None:
    """What is hashed of a checkpoint: its content, wherever it lies and whatever branch it came from."""
    directory = resolve(cfg)
    if directory is None:
        return None
    return fingerprint_files([*weight_files(directory, cfg.allow_bin), directory / CONFIG], directory)
