"""vLLM, in its own environment and process. Versions other than the tested ones run with a warning.

Nothing here imports torch or vLLM before an engine is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.capture import Reader
from eagle3x.engines import vllm_attach
from eagle3x.engines.base import chains_only
from eagle3x.engines.captured import states_ring
from eagle3x.engines.offline import OfflineStart
from eagle3x.engines.process_adapter import ProcessAdapter
from eagle3x.engines.process_engine import Boundaries, ProcessEngine
from eagle3x.engines.resolved import reported_quantization
from eagle3x.engines.vllm_arguments import (
    BATCH_TOKENS,
    BLOCK_TOKENS,
    STATES_KV_DTYPES,
    arguments,
    capture_arguments,
    environment,
    reserved,
    resolved_attention,
    resolved_runner,
)
from eagle3x.engines.vllm_serve import Launch, capacity, release_of, sampling_refused, serve

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.config import Hardware
    from eagle3x.engines.base import DrafterPlan
    from eagle3x.engines.config import Slot
    from eagle3x.engines.server_endpoint import ServerEndpoint
    from eagle3x.targets import Target

OLDEST_READ = (0, 26)
"""Sources from this version on were read: all norm options of a drafter are honoured, runner V2 exists."""
MOST_DRAFT_TOKENS = 128
"""v1/sample/rejection_sampler.py: MAX_SPEC_LEN."""


class VllmEngine(ProcessEngine):
    """vLLM with one target. Where it captures, whole prompts are computed together, as many as fit into a step."""

    last_norm = "pre_norm"

    def _offline_start(self, identity: dict[str, Any], boundaries: Boundaries) -> OfflineStart:
        slot, target, hardware = self._slot, self._target, self._hardware
        longest = self._job.longest + 1  # vLLM wants room for a token to follow, even if none is asked for
        asked = arguments(slot, target, hardware, identity["attention"], longest)
        asked |= {"skip_tokenizer_init": True, "worker_extension_cls": "vllm_extension.Report"}
        ring = None
        if boundaries:
            last = target.num_blocks  # its states before the final norm: the last hidden state
            ids = [*self.native_layer_ids(boundaries), *([last] if boundaries[-1] != last else [])]
            batch = slot.backend.engine_args.get("max_num_batched_tokens", BATCH_TOKENS[hardware.device])
            step, fewer = max(longest, batch), "max_num_batched_tokens"
            ring = states_ring(step, len(boundaries), target.hidden_size, identity["dtype"], fewer)
            asked |= capture_arguments(ids, len(boundaries), ring.path, step)
        variables = environment(slot, target, hardware, longest, self._found.python)
        # On a GPU too: its steps are driven here, one by one.
        variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return OfflineStart("vllm_worker.py", asked, variables, ring)

    def _honoured(
        self, identity: dict[str, Any], start: OfflineStart, report: dict[str, Any]
    ) -> dict[str, tuple[Any, Any]]:
        asked = {
            "attention": [identity["attention"]],
            "runner": identity["runner"],
            "dtype": identity["dtype"],
            "quantization": reported_quantization(self._slot, self._target),
            "kv_cache_dtype": identity["kv_cache_dtype"],  # a checkpoint can ask for 8 bits, and vLLM then obeys it
        }
        as_the_model = report["kv_cache_dtype"] == identity["dtype"] and identity["kv_cache_dtype"] == "auto"
        found = {**report, "kv_cache_dtype": "auto"} if as_the_model else report
        return {name: (value, found[name]) for name, value in asked.items()}

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
        identity = self._identity(target)
        block = BLOCK_TOKENS[hardware.device]
        room = capacity(slot.backend.batch_size, longest, max(longest, BATCH_TOKENS[hardware.device]), block)
        asked = {**arguments(slot, target, hardware, identity["attention"], longest), **room}
        if hardware.device == "cuda" and self.can_serve_both:
            asked["gpu_memory_utilization"] = slot.backend.memory_fraction / 2
        launch = Launch(
            self._found,
            target,
            {**asked, **slot.backend.engine_args},
            environment(slot, target, hardware, longest, self._found.python),
            hardware.device,
            identity["runner"],
            identity["attention"],
            reported_quantization(slot, target),
            log,
            slot.backend.start_timeout,
            slot.backend.port,
        )
        return serve(launch, drafter, speculation, wanted)


class VllmAdapter(ProcessAdapter):
    """What is known of vLLM before it is loaded."""

    name = "vllm"
    tested = frozenset({("0.32.0", "cpu"), ("0.26.0", "cuda")})
    engine = VllmEngine
    attach = vllm_attach.attach

    def _attention(self, slot: Slot, target: Target, hardware: Hardware, capability: str | None) -> str:
        return resolved_attention(slot, target, hardware, capability)

    def _own_identity(self, slot: Slot) -> dict[str, Any]:
        return {"runner": resolved_runner(slot), "chunked_prefill": slot.role != "extract"}

    def _attached_version(self, url: str) -> str:
        return vllm_attach.attached_version(url)

    def _attached_identity(self, slot: Slot, url: str) -> dict[str, Any]:
        return {"version": self._attached_version(url), "torch": None, "attention": slot.attention.name}

    def _own_refusals(self, slot: Slot, target: Target, hardware: Hardware) -> list[str]:
        backend, reasons = slot.backend, []
        if names := reserved(backend.engine_args):
            reasons.append(f"backend.engine_args: {', '.join(names)} are decided by other config nodes")
        if slot.role == "extract" and backend.kv_cache_dtype not in STATES_KV_DTYPES:
            reasons.append(
                f"backend.kv_cache_dtype={backend.kv_cache_dtype}: vLLM captures states with"
                f" {', '.join(STATES_KV_DTYPES)} only"
            )
        if hardware.device == "cpu" and backend.tensor_parallel != 1:
            reasons.append(f"backend.tensor_parallel={backend.tensor_parallel}: not run on CPUs; use 1")
        return reasons

    def _drafter_refusals(self, slot: Slot, target: Target, identity: dict[str, Any], plan: DrafterPlan) -> list[str]:
        reasons = chains_only("vLLM", plan.speculation)
        k, version = plan.speculation.num_speculative_tokens, identity["version"]
        if k > MOST_DRAFT_TOKENS:
            reasons.append(f"speculation.num_speculative_tokens={k}: vLLM verifies at most {MOST_DRAFT_TOKENS} a step")
        if plan.sampled and (why := sampling_refused(version, identity["device"])):
            reasons.append(f"benchmark.temperatures: {why}")
        if plan.variants and release_of(version) < OLDEST_READ:
            reasons.append(
                f"drafter with {', '.join(sorted(plan.variants))}: vLLM {version} is older than"
                f" {'.'.join(map(str, OLDEST_READ))}, where these options are known to be read"
            )
        return reasons

    def reader(self, version: str, slot: Slot, target: Target) -> Reader:
        """How this version reads ids of the target's layers."""
        return Reader("vllm", version, runner=resolved_runner(slot))
