"""SGLang, in its own environment and processes. Versions other than the tested ones run with a warning.

Nothing here imports torch or SGLang before an engine is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.capture import CaptureError, Reader, native_layer_ids
from eagle3x.engines import sglang_attach
from eagle3x.engines.captured import states_ring
from eagle3x.engines.offline import OfflineStart
from eagle3x.engines.process_adapter import ProcessAdapter
from eagle3x.engines.process_engine import Boundaries, ProcessEngine
from eagle3x.engines.resolved import reported_quantization
from eagle3x.engines.sglang_arguments import (
    CPU_DRAFTS_SINCE,
    NOT_DRAFTING,
    arguments,
    capture_environment,
    environment,
    reserved,
    resolved_attention,
    spreading,
    surplus_stops,
)
from eagle3x.engines.sglang_models import only_models
from eagle3x.engines.sglang_report import Asked, compared
from eagle3x.engines.sglang_serve import HIGHEST_PORT, Launch, sampling_refused, serve

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.config import Hardware
    from eagle3x.engines.base import DrafterPlan
    from eagle3x.engines.config import Slot
    from eagle3x.engines.server_endpoint import ServerEndpoint
    from eagle3x.targets import Target

READ_SINCE = {"fc_norm": "0.5.14", "norm_output": "0.5.14", "norm_before_fc": "0.5.23"}
"""Norm options of a drafter, and the first version whose source was seen to honour them (models/llama_eagle3.py)."""
IGNORED = frozenset({"norm_before_residual"})
"""Options that no version honours: its draft layer takes the residual before its norm, whatever the config says."""


class SglangEngine(ProcessEngine):
    """SGLang with one target. Where it captures, samples share forwards, and long ones are cut into chunks.

    At a temperature above 0 it draws from one stream of numbers for all requests: a request's own seed is used only
    with `engine_args.enable_deterministic_inference`.
    """

    last_norm = "post_norm"

    def _offline_start(self, identity: dict[str, Any], boundaries: Boundaries) -> OfflineStart:
        target, longest = self._target, self._job.longest
        asked = arguments(self._slot, target, self._hardware, identity["attention"], longest)
        asked["log_level"] = "info"
        variables, ring = self._environment(target), None
        if boundaries:
            ids = self.native_layer_ids(boundaries)
            step = max(longest, asked["chunked_prefill_size"], asked["max_prefill_tokens"])
            fewer = "chunked_prefill_size and max_prefill_tokens"
            ring = states_ring(step, len(ids), target.hidden_size, identity["dtype"], fewer)
            asked["disable_cuda_graph"] = True  # a replayed graph runs no hook
            variables |= capture_environment(ids, ring.path)
        return OfflineStart("sglang_worker.py", asked, variables, ring)

    def _honoured(
        self, identity: dict[str, Any], start: OfflineStart, report: dict[str, Any]
    ) -> dict[str, tuple[Any, Any]]:
        quantization = reported_quantization(self._slot, self._target)
        return compared(Asked(identity["version"], identity["attention"], quantization, start.arguments), report)

    def _start_server(
        self,
        target: Target,
        longest: int,
        log: Path,
        drafter: Path | None,
        speculation: Speculation | None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> ServerEndpoint:
        slot, hardware = self._slot, self._hardware
        attention = self._identity(target)["attention"]
        launch = Launch(
            self._found,
            target,
            arguments(slot, target, hardware, attention, longest),
            self._environment(target),
            hardware.device,
            attention,
            reported_quantization(slot, target),
            log,
            slot.backend.start_timeout,
            slot.backend.port,
        )
        return serve(launch, drafter, speculation, wanted)

    def _environment(self, target: Target) -> dict[str, str]:
        return environment(self._slot, self._hardware) | only_models(self._found.python, target.model_class)


class SglangAdapter(ProcessAdapter):
    """What is known of SGLang before it is loaded."""

    name = "sglang"
    tested = frozenset({("0.5.23", "cpu"), ("0.5.14", "cuda")})
    engine = SglangEngine
    attach = sglang_attach.attach

    def _attention(self, slot: Slot, target: Target, hardware: Hardware, capability: str | None) -> str:
        return resolved_attention(slot, target, hardware, capability)

    def _own_identity(self, slot: Slot) -> dict[str, Any]:
        return {"runner": None, "chunked_prefill": True}

    def _attached_version(self, url: str) -> str:
        return sglang_attach.reported(url).version

    def _attached_identity(self, slot: Slot, url: str) -> dict[str, Any]:
        return sglang_attach.attached_identity(url)

    def _own_refusals(self, slot: Slot, target: Target, hardware: Hardware) -> list[str]:
        backend, reasons = slot.backend, _argument_refusals(slot)
        if backend.runner != "auto":
            reasons.append(f"backend.runner={backend.runner}: SGLang has no choice of runners; use auto")
        if hardware.device == "cpu" and backend.kv_cache_dtype != "auto":
            reasons.append(f"backend.kv_cache_dtype={backend.kv_cache_dtype}: not run on CPUs; use auto")
        if backend.port is not None and backend.port > HIGHEST_PORT:
            reasons.append(f"backend.port={backend.port}: SGLang needs one up to {HIGHEST_PORT}")
        cores = hardware.threads or os.cpu_count() or 1
        if hardware.device == "cpu" and backend.tensor_parallel > cores:
            reasons.append(f"backend.tensor_parallel={backend.tensor_parallel}: each rank needs a core, of {cores}")
        if slot.role != "extract" and (more := surplus_stops(target)):
            reasons.append(
                f"target {target.name}: its config.json names stop tokens {more} that its generation_config.json does"
                " not, and SGLang stops at either; make the two agree"
            )
        return reasons

    def _drafter_refusals(self, slot: Slot, target: Target, identity: dict[str, Any], plan: DrafterPlan) -> list[str]:
        reasons: list[str] = []
        version, attention = identity["version"], identity["attention"]
        for option in sorted(plan.variants & IGNORED):
            reasons.append(
                f"drafter.{option}: SGLang ignores it and would compute another drafter; use {option}=false, or serve"
                " this drafter with backend@serve.backend=vllm"
            )
        for option, since in READ_SINCE.items():
            if option in plan.variants and _numbers(version) < _numbers(since):
                reasons.append(
                    f"drafter.{option}: SGLang {version} is older than {since}, where it is known to be read"
                )
        if attention in NOT_DRAFTING:
            reasons.append(f"attention={attention}: SGLang has no draft attention of that name; use attention=auto")
        if identity["device"] == "cpu" and _numbers(version) < _numbers(CPU_DRAFTS_SINCE):
            reasons.append(f"SGLang {version} does not speculate on a CPU; {CPU_DRAFTS_SINCE} does")
        if plan.sampled and (why := sampling_refused(identity["device"])):
            reasons.append(f"benchmark.temperatures: {why}")
        if plan.boundaries is not None:
            try:
                native_layer_ids(self.reader(version, slot, target), plan.boundaries, target.num_blocks)
            except CaptureError as error:
                reasons.append(str(error))
        return reasons

    def reader(self, version: str, slot: Slot, target: Target) -> Reader:
        """How this version reads ids of the target's layers."""
        return Reader("sglang", version, target.model_class)


def _argument_refusals(slot: Slot) -> list[str]:
    reasons: list[str] = []
    given = slot.backend.engine_args
    if names := reserved(given):
        reasons.append(f"backend.engine_args: {', '.join(names)} are decided by other config nodes")
    if names := spreading(given):
        reasons.append(
            f"backend.engine_args: {', '.join(names)}: never run here; use backend.tensor_parallel for a target that"
            " one device does not hold"
        )
    if slot.role == "extract" and given.get("disable_cuda_graph", True) is not True:
        reasons.append(
            "backend.engine_args.disable_cuda_graph=false: a replayed graph runs no hook, so no states would come;"
            " leave it out when extracting"
        )
    return reasons


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 23) of "0.5.23+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
