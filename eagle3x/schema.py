"""The one kind of config record: frozen, strict, no unknown keys, no defaults (values live in `conf/`)."""

from __future__ import annotations

from typing import TypeVar, cast, dataclass_transform

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

T = TypeVar("T")
STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass_transform(frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """Decorate a config record. A wrong type, a missing or an unknown key is a `pydantic.ValidationError`."""
    return cast("type[T]", pydantic_dataclass(frozen=True, config=STRICT)(cls))
