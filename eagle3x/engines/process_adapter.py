"""What is known of an engine with an environment and processes of its own, before it is loaded. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from eagle3x.engines import gpus, interpreter
from eagle3x.engines.attached import Attach, AttachedServer, attached_refusals
from eagle3x.engines.resolved import ENGINES, resolved_dtype
from eagle3x.progress import log
from eagle3x.quantization import in_slot, support
from eagle3x.types import ConfigError

if TYPE_CHECKING:
    from eagle3x.capture import Reader
    from eagle3x.config import Hardware
    from eagle3x.engines.base import DrafterPlan
    from eagle3x.engines.config import Job, Slot
    from eagle3x.engines.process_engine import ProcessEngine
    from eagle3x.targets import Target


class ProcessAdapter(ABC):
    """What vLLM and SGLang share of `eagle3x.engines.base.Adapter`.

    `tested`: versions that were run, each on a device; others run with a warning. `attach`: to a server of this engine.
    """

    name: ClassVar[interpreter.Engine]
    tested: ClassVar[frozenset[tuple[str, interpreter.Device]]]
    engine: ClassVar[type[ProcessEngine]]
    attach: ClassVar[Attach]

    @abstractmethod
    def _attention(self, slot: Slot, target: Target, hardware: Hardware, capability: str | None) -> str:
        """The backend that the engine is told to use, in its own words.

        Raises:
            ConfigError: the engine does not have it on this device.
        """

    @abstractmethod
    def _own_identity(self, slot: Slot) -> dict[str, Any]:
        """What of the identity this engine has of its own: `runner`, `chunked_prefill`."""

    @abstractmethod
    def _attached_version(self, url: str) -> str:
        """The version of the server at `url`. EagleError: none answers there, or it is another engine's."""

    @abstractmethod
    def _attached_identity(self, slot: Slot, url: str) -> dict[str, Any]:
        """What decides the floats of the server at `url`; what it does not tell is what the slot says of it."""

    @abstractmethod
    def _own_refusals(self, slot: Slot, target: Target, hardware: Hardware) -> list[str]:
        """Reasons of this engine alone why a combination cannot run here."""

    @abstractmethod
    def _drafter_refusals(self, slot: Slot, target: Target, identity: dict[str, Any], plan: DrafterPlan) -> list[str]:
        """Reasons of this engine alone why it would not serve such a drafter, or would serve it wrong."""

    @abstractmethod
    def reader(self, version: str, slot: Slot, target: Target) -> Reader:
        """How this version of the engine reads ids of the target's layers."""

    def identity(self, slot: Slot, target: Target, hardware: Hardware) -> dict[str, Any]:
        """What decides the floats. `batch_size` too: which rows are computed together moves the last bits."""
        capability = gpus.compute_capability(hardware) if hardware.device == "cuda" else None
        if slot.backend.url is not None:
            software = self._attached_identity(slot, slot.backend.url)
        else:
            found = interpreter.find(self.name, slot.backend.python, hardware.device)
            attention = self._attention(slot, target, hardware, capability)
            software = {"version": found.version, "torch": found.packages["torch"], "attention": attention}
        return {
            "engine": self.name,
            "attached": slot.backend.url is not None,
            "quantization": slot.quantization.scheme,
            "dtype": resolved_dtype(slot, hardware),
            "kv_cache_dtype": slot.backend.kv_cache_dtype,
            "device": hardware.device,
            "sm": capability,
            "tensor_parallel": slot.backend.tensor_parallel,
            "batch_size": slot.backend.batch_size,
            "batch_invariant": False,
            "prefix_cache": False,
            "engine_args": slot.backend.engine_args,
            **self._own_identity(slot),
            **software,
            **in_slot.identity(slot, target, hardware),
        }

    def refusals(self, slot: Slot, target: Target, hardware: Hardware) -> list[str]:
        """Every reason why this combination cannot run here, each with what would be right."""
        backend = slot.backend
        if backend.url is not None and slot.role == "serve":
            return attached_refusals(backend, self._attached_version)
        capability = gpus.compute_capability(hardware) if hardware.device == "cuda" else None
        reasons: list[str] = []
        if hardware.device == "cuda" and capability is None:
            reasons.append("hardware.device=cuda: the driver reports no GPU; use hardware=cpu")
        for check in (
            lambda: interpreter.find(self.name, backend.python, hardware.device),
            lambda: self._attention(slot, target, hardware, capability),
        ):
            try:
                check()
            except ConfigError as error:
                reasons.append(str(error))
        reasons += support.refusals(self.name, slot, target, hardware)
        devices = hardware.devices if hardware.device == "cuda" else None
        if devices is not None and len(devices) != backend.tensor_parallel:
            reasons.append(
                f"hardware.devices={list(devices)}: backend.tensor_parallel={backend.tensor_parallel} takes as many;"
                " name them, or use null"
            )
        if slot.role != "serve":
            for field in ("url", "port"):
                if getattr(backend, field) is not None:
                    reasons.append(f"backend.{field}: belongs to the serve slot; set serve.backend.{field}")
        return [*reasons, *self._own_refusals(slot, target, hardware)]

    def drafter_refusals(self, slot: Slot, target: Target, hardware: Hardware, plan: DrafterPlan) -> list[str]:
        """Every reason why the engine would not serve such a drafter, or would serve it wrong."""
        reasons = self._drafter_refusals(slot, target, self.identity(slot, target, hardware), plan)
        if plan.boundaries is not None and len(plan.boundaries) != plan.num_aux:
            reasons.append(
                f"the drafter's fc reads {plan.num_aux} boundaries, {ENGINES[self.name]} would feed it"
                f" {len(plan.boundaries)}: {list(plan.boundaries)}"
            )
        return reasons

    def open(self, slot: Slot, target: Target, hardware: Hardware, job: Job) -> ProcessEngine | AttachedServer:
        """An engine that loads the target when it is first asked for something: its processes differ by what for."""
        url = slot.backend.url
        if url is not None:
            reader = self.reader(self._attached_version(url), slot, target)
            return AttachedServer(url, target, slot.backend.batch_size, type(self).attach, reader)
        found = interpreter.find(self.name, slot.backend.python, hardware.device)
        if (found.version.split("+")[0], hardware.device) not in self.tested:
            known = ", ".join(f"{version} on {device}" for version, device in sorted(self.tested))
            log(
                f"{ENGINES[self.name]} {found.version} was never tested with eagle3x on {hardware.device} ({known}"
                " were); going on"
            )
        support.warn(self.name, slot, hardware)
        return self.engine(self, slot, in_slot.in_slot(slot, target, hardware), hardware, job, found)
