"""What this machine's CPU does with products of 8-bit integers. No torch."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

DOT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""Flags of x86 CPUs that add up products of 8-bit integers in 32 bits."""


@cache
def sums_overflow() -> bool:
    """Whether pairs of products are first added in 16 bits, and cut off there.

    x86 CPUs without VNNI have only VPMADDUBSW: oneDNN, and so vLLM, then computes wrong sums of large codes, without a
    word (oneDNN's developer guide, "Nuances of int8 Computations"). Codes of at most 64 cannot overflow: an input is at
    most 255 there, and 2 * 255 * 64 = 32640 < 32768.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return not DOT_PRODUCTS.intersection(flags)
