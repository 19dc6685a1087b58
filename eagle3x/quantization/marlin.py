"""Which matrices SGLang's INT4 kernel multiplies. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle3x.targets import Target

TILES = ((128, 128), (64, 128), (128, 64))
"""Inputs x outputs of a thread block's tile (SGLang 0.5.14, jit_kernel/csrc/gemm/marlin/gptq_marlin.cuh:115)."""


def untiled(target: Target, ranks: int) -> list[str]:
    """The matrices of a dense block that no tile divides, as each of `ranks` GPUs has them: "q, k and v (576 x 960)".

    SGLang starts with them, and ends at its first step ("Invalid thread config").
    """
    attention, keys = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    hidden, inner = target.hidden_size, target.intermediate_size
    shapes = {
        "q, k and v": (hidden, (attention + 2 * keys) // ranks),
        "o": (attention // ranks, hidden),
        "gate and up": (hidden, 2 * inner // ranks),
        "down": (inner // ranks, hidden),
    }
    return [
        f"{name} ({inputs} x {outputs})"
        for name, (inputs, outputs) in shapes.items()
        if not any(inputs % k == 0 and outputs % n == 0 for k, n in TILES)
    ]
