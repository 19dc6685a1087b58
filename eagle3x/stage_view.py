"""A config seen through a stage's declaration: what is not declared cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from eagle3x.config import Config


class UndeclaredNodeError(AttributeError):
    """A maker read a config node that its stage does not declare: its key would not change with that value."""


class View:
    """`view.train.epochs` works if `train` or `train.epochs` is declared."""

    def __init__(self, node: Any, declared: frozenset[str], stage: str, prefix: str = "") -> None:
        self._node, self._declared, self._stage, self._prefix = node, declared, stage, prefix

    @staticmethod
    def of(cfg: Config, declared: Sequence[str], stage: str) -> Config:
        """The view of `stage`, typed as the config that it stands for."""
        return cast("Config", View(cfg, frozenset(declared), stage))

    def __getattr__(self, name: str) -> Any:
        path = self._prefix + name
        if path in self._declared:
            return getattr(self._node, name)
        if any(d.startswith(path + ".") for d in self._declared):
            return View(getattr(self._node, name), self._declared, self._stage, path + ".")
        raise UndeclaredNodeError(f"stage {self._stage} reads config node {path}, which it does not declare")
