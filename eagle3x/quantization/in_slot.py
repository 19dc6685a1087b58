"""The target as an engine slot has it: as it is stored, rounded by eagle3x, or quantized by the engine. No torch."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.engines.config import Quantization
from eagle3x.fingerprint import cache_dir
from eagle3x.identity import digest
from eagle3x.progress import log
from eagle3x.quantization import cpu, rounding
from eagle3x.quantization.stored import stored_as, stored_scheme

if TYPE_CHECKING:
    from eagle3x.config import Hardware
    from eagle3x.engines.config import Slot
    from eagle3x.targets import Target

NONE = Quantization(scheme="none")
ONLINE = "fp8_online"
"""The scheme that an engine makes of an unquantized checkpoint while it loads it: its own fp8."""
LIBRARY = "compressed-tensors"


def is_rounded(slot: Slot, target: Target) -> bool:
    """Whether the slot runs a checkpoint that eagle3x makes of the target. Not where a server runs already."""
    scheme = slot.quantization.scheme
    if scheme in ("none", ONLINE) or slot.backend.url is not None:
        return False
    return stored_scheme(target) == "none"


def refusals(slot: Slot, target: Target) -> list[str]:
    """Why the target cannot be what the slot says, with what would be right. Engines have reasons of their own."""
    wanted, stored = slot.quantization.scheme, stored_scheme(target)
    if wanted == stored or (wanted == ONLINE and stored == "none"):
        return []
    if stored != "none":
        return [
            f"quantization={wanted}: target {target.name} is stored as {stored_as(target)}; use quantization={stored}"
        ]
    return [f"quantization={wanted}: {reason}" for reason in rounding.refusals(target.path, wanted)]


def in_slot(slot: Slot, target: Target, hardware: Hardware) -> Target:
    """The target whose directory is what the slot's engine loads; rounded now if it never was.

    Everything but the weights and what config.json says of them is the target's.
    """
    if not is_rounded(slot, target):
        return target
    from filelock import FileLock

    scheme = slot.quantization.scheme
    key = digest({"target": target.identity(), "scheme": scheme, **identity(slot, target, hardware)})
    directory = cache_dir() / "targets" / f"{scheme}-{key[:20]}"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.with_name(directory.name + ".lock")):
            if not directory.is_dir():  # no other process rounded it while this one waited
                _round(target, scheme, directory, _narrow(slot, hardware))
    return replace(target, path=directory)


def _narrow(slot: Slot, hardware: Hardware) -> bool:
    return slot.quantization.scheme == "int8" and hardware.device == "cpu" and cpu.sums_overflow()


def _round(target: Target, scheme: str, directory: Path, narrow: bool) -> None:
    log(f"Target: rounding {target.name} to {scheme} (once), into {directory}")
    # Beside its place, so that the rename that publishes it is atomic.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".rounding-") as temporary:
        result = Path(temporary) / "result"
        rounding.write(target.path, scheme, result, narrow)
        result.rename(directory)


def identity(slot: Slot, target: Target, hardware: Hardware) -> dict[str, Any]:
    """What the scheme's name does not say of a rounded target: how it is made. Empty for any other."""
    if not is_rounded(slot, target):
        return {}
    recipe = {"version": rounding.VERSION, LIBRARY: version(LIBRARY)}
    return {"rounding": {**recipe, "narrow": True} if _narrow(slot, hardware) else recipe}


def reference_quantization(slot: Slot, target: Target) -> Quantization:
    """How a transformers forward is as near as can be to what the slot runs.

    Rounded weights for weights that an engine rounds on its own (its scales may be others); the target as it is for a
    server that was there before, of whose weights nothing is known.
    """
    if slot.backend.url is not None:
        return Quantization(scheme=stored_scheme(target))  # type: ignore[arg-type]
    return Quantization(scheme="fp8") if slot.quantization.scheme == ONLINE else slot.quantization


def reference_target(slot: Slot, target: Target, hardware: Hardware) -> Target:
    """The target that such a forward runs."""
    return in_slot(replace(slot, quantization=reference_quantization(slot, target)), target, hardware)
