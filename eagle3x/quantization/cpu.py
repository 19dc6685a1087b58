"""What this machine's CPU has for quantized products. No torch."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

DOT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""Flags of x86 CPUs that add up products of 8-bit integers in 32 bits."""


def sums_overflow() -> bool:
    """Whether pairs of products of 8-bit integers are first added in 16 bits, and cut off there.

    x86 CPUs without VNNI have only VPMADDUBSW: oneDNN, and so vLLM, then computes wrong sums of large codes, without a
    word (oneDNN's developer guide, "Nuances of int8 Computations"). Codes of at most 64 cannot overflow: an input is at
    most 255 there, and 2 * 255 * 64 = 32640 < 32768.
    """
    return _is_x86() and not DOT_PRODUCTS.intersection(_flags())


def has_avx512() -> bool:
    """Whether vLLM loads its build for AVX-512 (vllm/platforms/cpu.py: import_kernels)."""
    return "avx512f" in _flags()


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


@cache
def _flags() -> frozenset[str]:
    try:
        return frozenset(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return frozenset()
