"""What is in captured states: are they finite, how long are they. With NumPy, in the calling thread alone.

torch takes all cores for each sample, and its threads wait for the one whose core an engine has: 32 of them, on a GPU
machine whose cores had other work, looked at 0.3 GB/s where one looks at 3. Several callers at a time scale instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

BLOCK = 1 << 18
"""Elements looked at together: they stay in a core's own cache between two passes."""
INFINITY = {
    "float32": (np.int32, np.uint32, 0x7F800000),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
    "float16": (np.int16, np.uint16, 0x7C00),
}
"""Integers of a value's size, signed and not, and the bits of infinity, which are the smallest that are not finite."""


def all_finite(states: Tensor) -> bool:
    """Whether no value of states [T, ...] is NaN or infinite."""
    signed, unsigned, infinity = INFINITY[_name(states)]
    negative = infinity | 1 << 8 * np.dtype(signed).itemsize - 1  # the sign is the highest bit
    return all(  # as signed integers all negative values are below the positive ones, as unsigned above
        block.view(signed).max(initial=0) < infinity and block.view(unsigned).max(initial=0) < negative
        for block in _blocks(_bits(states))
    )


def row_norms(states: Tensor) -> NDArray[np.float32]:
    """[T, A]: L2 norms in float32 of states [T, A, H]; infinite where the squares are too large for it."""
    name = _name(states)
    T, A, _ = states.shape
    norms = np.empty((T, A), np.float32)
    wide = None
    start = 0
    with np.errstate(over="ignore"):
        for bits in _blocks(_bits(states)):
            if name == "float32":
                values = bits.view(np.float32)
            else:  # into the same memory each time: fresh memory costs more than the work
                wide = np.zeros(bits.shape, np.float32) if wide is None else wide
                values = wide[: len(bits)]
                if name == "float16":
                    np.copyto(values, bits.view(np.float16))
                else:  # bfloat16 is float32's upper half; little-endian
                    np.copyto(values.view(np.uint16)[..., 1::2], bits.view(np.uint16))
            np.vecdot(values, values, out=norms[start : start + len(bits)])
            start += len(bits)
    return np.sqrt(norms, out=norms)


def _name(states: Tensor) -> str:
    return str(states.dtype).removeprefix("torch.")


def _bits(states: Tensor) -> NDArray[Any]:
    """A view of the values' bits; NumPy has no bfloat16."""
    import torch

    return states.detach().view(torch.int32 if states.dtype.itemsize == 4 else torch.int16).numpy()


def _blocks(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    step = max(1, BLOCK // max(1, values[:1].size))
    return (values[start : start + step] for start in range(0, len(values), step))
