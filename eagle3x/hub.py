"""What is downloaded from the Hugging Face hub, and what to do where it cannot be had. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from eagle3x.types import EagleError


def is_hub_id(name: str) -> bool:
    """Whether it looks like org/name."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is not None


@dataclass(frozen=True)
class Dataset:
    """A dataset's commit, and the licence that its card names."""

    commit: str
    licence: str | None


@cache
def dataset(hub_id: str, revision: str | None) -> Dataset:
    """Ask the hub, once in a process: a branch that moves must not give the cells of a run different prompts.

    EagleError says what to do.
    """
    from huggingface_hub import HfApi

    with _explained(hub_id, "hub_id", "a directory (hub_id=null path=DIRECTORY)", revision):
        info = HfApi().dataset_info(hub_id, revision=revision)
    licence = None if info.card_data is None else info.card_data.get("license")
    return Dataset(str(info.sha), None if licence is None else str(licence))


def licence_of(directory: Path) -> str | None:
    """The licence that the card in a model's directory names (README.md); None if there is none, or it names none."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    card = directory / "README.md"
    if not card.is_file():
        return None
    try:
        data = ModelCard.load(card).data.to_dict()
    except (OSError, ValueError, YAMLError):  # a card for people alone
        return None
    licence = data.get("license_name") if data.get("license") == "other" else data.get("license")
    return None if licence is None else str(licence)


def snapshot(hub_id: str, revision: str | None, files: Sequence[str], key: str, instead: str) -> Path:
    """The files of a repository that fit the patterns, none from its subfolders (they hold other formats).

    key: the config key that names the repository; instead: what to set for a directory. EagleError says what to do.
    """
    from huggingface_hub import snapshot_download

    with _explained(hub_id, key, instead, revision):
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(files), ignore_patterns=["*/*"]))


def cached(hub_id: str, revision: str | None, file: str) -> Path | None:
    """A file of a repository, if an earlier download left it in the hub's cache. Asks no network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, file, revision=revision)
    return Path(found) if isinstance(found, str) else None


@contextmanager
def _explained(hub_id: str, key: str, instead: str, revision: str | None) -> Iterator[None]:
    """EagleError for what the hub answers."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise EagleError(f"{key}={hub_id} is gated: accept its licence there, then log in (hf auth login)") from error
    except RevisionNotFoundError as error:
        raise EagleError(f"{key}={hub_id} has no revision {revision!r}: name a branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise EagleError(
            f"{key}={hub_id} is not on the hub, or private: check its spelling, or log in (hf auth login)"
        ) from error
    except (OSError, ValueError) as error:  # no network, proxy, disk: huggingface_hub raises both kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise EagleError(
            f"{key}={hub_id} cannot be downloaded and is not in the hub's cache: {reason}\n"
            f"Without network, copy the directory here and use {instead}"
        ) from error
