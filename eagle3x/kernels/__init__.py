"""The parts of a training step that are not matrix products, forward and backward, written out.

`eager.py` says each in torch, for any device and precision; `fused.py` is the same in Triton, for bfloat16 on a GPU,
and is tested against it.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor


def kernels_for(x: Tensor) -> ModuleType:
    """The module, `eager` or `fused`, that works on tensors such as x."""
    from torch import bfloat16

    if x.is_cuda and x.dtype == bfloat16:
        from eagle3x.kernels import fused

        return fused
    from eagle3x.kernels import eager

    return eager
