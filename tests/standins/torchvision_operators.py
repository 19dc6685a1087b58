"""A test aid: torchvision's operators by name, so that it can be imported beside a CPU build of torch.

Torchvision's published wheel is built for CUDA; its library does not load without, and the import fails where it adds
meta functions to operators that the library would have defined. SGLang imports torchvision for image targets only; no
operator of it is called for text. `torchvision_operators.pth` calls this in every Python process of the environment, so
it must cost nothing: torch is imported only when torchvision is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
LIBRARIES: list[object] = []
"""Keeps definitions alive: they go with their library object."""


class _Before(MetaPathFinder):
    """Finds nothing; defines the operators when torchvision is looked for, once."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                library.define(schema)
            LIBRARIES.append(library)
        return None


def define_before_torchvision() -> None:
    """Arrange that the operators are defined when torchvision is first imported in this process."""
    sys.meta_path.insert(0, _Before())
