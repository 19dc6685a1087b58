"""Which scheme runs on which engine and device: seen, read in its source and let go on, or refused with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3x.engines.resolved import is_mla
from eagle3x.progress import log
from eagle3x.quantization import cpu, in_slot, marlin
from eagle3x.quantization.stored import stored_scheme
from eagle3x.types import ConfigError

if TYPE_CHECKING:
    from eagle3x.config import Hardware
    from eagle3x.engines.config import Slot
    from eagle3x.targets import Target


@dataclass(frozen=True)
class Row:
    """One engine, device and scheme. `ran`: in this version, with the reference's states. `refused`: why it does not
    run, and what does. Neither: its source has it, but nobody has run it here; it goes on with a warning."""

    ran: str | None = None
    refused: str | None = None


READ = Row()
NO_ONLINE_FP8 = Row(refused="is made by an engine while it loads, on a GPU; use quantization=fp8")
NO_NVFP4 = Row(refused="its 4-bit floats have kernels on GPUs alone; use quantization=int4")
NOTHING_ON_SGLANG_CPU = Row(
    refused="no quantized target was ever run on SGLang on a CPU; use quantization=none or vLLM"
)
NO_AVX512 = (
    "vLLM's build for CPUs without AVX-512, as this one, has no kernel for it (cpu_gemm_wna16); use"
    " backend=transformers in this slot, or another machine"
)
OVERFLOW = (
    "on this CPU, which has no VNNI, vLLM adds up products of 8-bit integers in 16 bits and cuts them off; give the"
    " unquantized target, which is rounded to codes that fit, or use backend=transformers"
)
TABLE: dict[tuple[str, str], dict[str, Row]] = {
    ("transformers", "cpu"): {
        "int8": Row("5.19.0"), "int4": Row("5.19.0"), "fp8": Row("5.19.0"),
        "fp8_online": NO_ONLINE_FP8, "nvfp4": NO_NVFP4,
    },
    ("transformers", "cuda"): {
        "int8": Row("5.17.0"), "int4": Row("5.17.0"), "fp8": Row("5.17.0"),
        "fp8_online": NO_ONLINE_FP8, "nvfp4": Row(refused="transformers has no kernel for it; use vllm or sglang"),
    },
    ("vllm", "cpu"): {
        "int8": Row("0.32.0"), "int4": READ, "fp8": Row("0.32.0"),
        "fp8_online": NO_ONLINE_FP8, "nvfp4": NO_NVFP4,
    },
    ("vllm", "cuda"): {
        "int8": Row("0.26.0"), "int4": Row("0.26.0"), "fp8": Row("0.26.0"), "fp8_online": Row("0.26.0"), "nvfp4": READ,
    },
    ("sglang", "cpu"): dict.fromkeys(("int8", "int4", "fp8", "fp8_online", "nvfp4"), NOTHING_ON_SGLANG_CPU),
    ("sglang", "cuda"): {
        "int8": Row("0.5.14"), "int4": READ, "fp8": Row("0.5.14"), "fp8_online": READ, "nvfp4": READ,
    },
}  # fmt: skip
"""By engine and device; each row's scheme. `none` runs everywhere."""


def refusals(engine: str, slot: Slot, target: Target, hardware: Hardware) -> list[str]:
    """Every reason why the slot's scheme cannot run there, or the target cannot be had in it. Empty: go on."""
    scheme = slot.quantization.scheme
    reason = None if scheme == "none" else TABLE[engine, hardware.device][scheme].refused
    if reason is not None:
        return [f"quantization={scheme}: {reason}"]
    try:
        if engine == "vllm" and hardware.device == "cpu":
            if scheme == "int4" and not cpu.has_avx512():
                return [f"quantization={scheme}: {NO_AVX512}"]
            if scheme == stored_scheme(target) == "int8" and cpu.sums_overflow():
                return [f"quantization={scheme}: {OVERFLOW}"]
        asked = engine == "sglang" and scheme == "int4" and not is_mla(target)
        if asked and (names := marlin.untiled(target, slot.backend.tensor_parallel)):
            return [f"quantization=int4: SGLang's kernel (Marlin) has no tile for {', '.join(names)}; use vLLM"]
        return in_slot.refusals(slot, target)
    except ConfigError as error:  # a checkpoint of a scheme that we do not know
        return [str(error)]


def warn(engine: str, slot: Slot, hardware: Hardware) -> None:
    """Say it if nobody has run the slot's scheme there."""
    scheme = slot.quantization.scheme
    if scheme != "none" and TABLE[engine, hardware.device][scheme].ran is None:
        log(f"quantization={scheme}: never run by eagle3x with {engine} on {hardware.device}; going on")
