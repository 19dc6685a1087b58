"""vLLM, in its own environment and process. Versions other than those of `TESTED` run with a warning.

Nothing here imports torch or vLLM before an engine is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from eagle3x.capture import Reader, native_layer_ids
from eagle3x.engines import interpreter
from eagle3x.engines.attached import AttachedServer, attached_refusals
from eagle3x.engines.base import chains_only
from eagle3x.engines.captured import states_ring
from eagle3x.engines.gpus import compute_capability
from eagle3x.engines.interpreter import EngineInterpreter
from eagle3x.engines.known_answer_check import LONGEST, check_known_answer
from eagle3x.engines.resolved import both_fit, quantization_argument, reported_quantization, resolved_dtype
from eagle3x.engines.servers import Servers
from eagle3x.engines.vllm_arguments import (
    BATCH_TOKENS,
    BLOCK_TOKENS,
    STATES_KV_DTYPES,
    arguments,
    environment,
    reserved,
    resolved_attention,
    resolved_runner,
)
from eagle3x.engines.vllm_attach import attach, attached_version
from eagle3x.engines.vllm_offline import OfflineVllm, capture_arguments
from eagle3x.engines.vllm_serve import Launch, capacity, serve
from eagle3x.progress import log
from eagle3x.types import Completion, ConfigError, EagleError, HiddenStates, Request, TokenSample

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.config import Hardware
    from eagle3x.engines.base import DrafterPlan, Endpoint
    from eagle3x.engines.config import Job, Slot
    from eagle3x.engines.inside.states_ring import RingReader
    from eagle3x.engines.server_endpoint import ServerEndpoint
    from eagle3x.targets import Target

TESTED = {("0.32.0", "cpu"), ("0.26.0", "cuda")}
OLDEST_READ = (0, 26)
"""Sources from this version on were read: all norm options of a drafter are honoured, runner V2 exists."""
MOST_DRAFT_TOKENS = 128
"""v1/sample/rejection_sampler.py: MAX_SPEC_LEN."""
GENERATING = "generate"


class VllmAdapter:
    """What is known of the engine before it is loaded."""

    name = "vllm"

    def identity(self, slot: Slot, target: Target, hardware: Hardware) -> dict[str, Any]:
        """What decides the floats. `batch_size` too: which rows are computed together moves the last bits."""
        capability = compute_capability(hardware) if hardware.device == "cuda" else None
        if slot.backend.url is not None:  # what it does not tell is what the user says of it
            software = {"version": attached_version(slot.backend.url), "torch": None, "attention": slot.attention.name}
        else:
            found = interpreter.find("vllm", slot.backend.python, hardware.device)
            attention = resolved_attention(slot, target, hardware, capability)
            software = {"version": found.version, "torch": found.packages["torch"], "attention": attention}
        return {
            "engine": self.name,
            **software,
            "attached": slot.backend.url is not None,
            "runner": resolved_runner(slot),
            "quantization": slot.quantization.scheme,
            "dtype": resolved_dtype(slot, hardware),
            "kv_cache_dtype": slot.backend.kv_cache_dtype,
            "device": hardware.device,
            "sm": capability,
            "tensor_parallel": slot.backend.tensor_parallel,
            "batch_size": slot.backend.batch_size,
            "batch_invariant": False,
            "chunked_prefill": slot.role != "extract",
            "prefix_cache": False,
            "engine_args": slot.backend.engine_args,
        }

    def refusals(self, slot: Slot, target: Target, hardware: Hardware) -> list[str]:
        """Every reason why this combination cannot run here, each with what would be right."""
        backend = slot.backend
        capability = compute_capability(hardware) if hardware.device == "cuda" else None
        if backend.url is not None and slot.role == "serve":
            return attached_refusals(backend, attached_version)
        reasons: list[str] = []
        if hardware.device == "cuda" and capability is None:
            reasons.append("hardware.device=cuda: the driver reports no GPU; use hardware=cpu")
        for check in (
            lambda: interpreter.find("vllm", backend.python, hardware.device),
            lambda: resolved_attention(slot, target, hardware, capability),
            lambda: quantization_argument(slot, target, hardware),
        ):
            try:
                check()
            except ConfigError as error:
                reasons.append(str(error))
        if names := reserved(backend.engine_args):
            reasons.append(f"backend.engine_args: {', '.join(names)} are decided by other config nodes")
        if slot.role == "extract" and backend.kv_cache_dtype not in STATES_KV_DTYPES:
            reasons.append(
                f"backend.kv_cache_dtype={backend.kv_cache_dtype}: vLLM captures states with"
                f" {', '.join(STATES_KV_DTYPES)} only"
            )
        if hardware.device == "cpu" and backend.tensor_parallel != 1:
            reasons.append(f"backend.tensor_parallel={backend.tensor_parallel}: not run on CPUs; use 1")
        devices = len(hardware.devices) if hardware.devices is not None else None
        if devices is not None and hardware.device == "cuda" and devices != backend.tensor_parallel:
            reasons.append(
                f"hardware.devices={list(hardware.devices or ())}: backend.tensor_parallel={backend.tensor_parallel}"
                " takes as many; name them, or use null"
            )
        if slot.role != "serve":
            for field in ("url", "port"):
                if getattr(backend, field) is not None:
                    reasons.append(f"backend.{field}: belongs to the serve slot; set serve.backend.{field}")
        return reasons

    def drafter_refusals(self, slot: Slot, target: Target, hardware: Hardware, plan: DrafterPlan) -> list[str]:
        """Every reason why vLLM would not serve such a drafter, or would serve it wrong."""
        reasons = chains_only("vLLM", plan.speculation)
        k, version = plan.speculation.num_speculative_tokens, self.identity(slot, target, hardware)["version"]
        if k > MOST_DRAFT_TOKENS:
            reasons.append(f"speculation.num_speculative_tokens={k}: vLLM verifies at most {MOST_DRAFT_TOKENS} a step")
        if plan.variants and _numbers(version) < OLDEST_READ:
            reasons.append(
                f"drafter with {', '.join(sorted(plan.variants))}: vLLM {version} is older than"
                f" {'.'.join(map(str, OLDEST_READ))}, where these options are known to be read"
            )
        if plan.boundaries is not None and len(plan.boundaries) != plan.num_aux:
            reasons.append(
                f"the drafter's fc reads {plan.num_aux} boundaries, vLLM would feed it {len(plan.boundaries)}:"
                f" {list(plan.boundaries)}"
            )
        return reasons

    def open(self, slot: Slot, target: Target, hardware: Hardware, job: Job) -> VllmEngine | AttachedServer:
        """An engine that loads the target when it is first asked for something: its processes differ by what for."""
        if slot.backend.url is not None:
            reader = Reader("vllm", attached_version(slot.backend.url), runner="v1")
            return AttachedServer(slot.backend.url, target, slot.backend.batch_size, attach, reader)
        found = interpreter.find("vllm", slot.backend.python, hardware.device)
        if (found.version.split("+")[0], hardware.device) not in TESTED:
            known = ", ".join(f"{version} on {device}" for version, device in sorted(TESTED))
            log(f"vLLM {found.version} was never tested with eagle3x on {hardware.device} ({known} were); going on")
        return VllmEngine(slot, target, hardware, job, found)


class VllmEngine:
    """vLLM with one target. One worker process at a time: for text, or for states at certain boundaries."""

    def __init__(self, slot: Slot, target: Target, hardware: Hardware, job: Job, found: EngineInterpreter) -> None:
        self._slot, self._target, self._hardware, self._job, self._found = slot, target, hardware, job, found
        self._offline: OfflineVllm | None = None
        self._offline_for: str | tuple[int, ...] = ""
        self._ring: RingReader | None = None
        self.can_serve_both = slot.backend.port is None and both_fit(slot, target, hardware)
        self.can_serve_plain = True
        self._passed = False
        self._servers = Servers(self._start_server, 2 if self.can_serve_both else 1)

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answer the requests, at most `batch_size` at a time.

        Raises:
            EagleError: vLLM could not load or failed. EngineDied: it ended; with the end of its log.
        """
        if requests:
            yield from self._worker(GENERATING).generate(requests, self._target.eos_token_ids)

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        """States of each sample, on the CPU: aux [T, A*H] at ascending `boundaries`, last [T, H] before the final norm.

        Whole prompts are computed together, as many as fit into one engine step.

        Raises:
            EagleError: a sample longer than the engine was opened for, or vLLM failed. EngineDied: it ended.
        """
        for sample in samples:
            if not 0 < len(sample.token_ids) <= self._job.longest:
                raise EagleError(f"{sample.id}: {len(sample.token_ids)} tokens, should be 1 to {self._job.longest}")
        if samples:
            worker = self._worker(tuple(boundaries))
            assert self._ring is not None
            yield from worker.capture(samples, len(boundaries), self._ring)

    def serve(self, drafter: Path | None, speculation: Speculation | None) -> Endpoint:
        """Serve the target through vLLM's OpenAI server, with the exported drafter in directory `drafter` if given.

        The server is kept for the next time it is asked for. The first one with a drafter has to pass the known-answer
        check, unless this way of serving has passed it before.

        Raises:
            EagleError: the server runs in another way than was asked. EngineDied: it ended; with the end of its log.
        """
        self._close_offline()
        if self.can_serve_both:
            self._servers.prepare(drafter, speculation)  # while the known-answer pair is served
        if speculation is not None and not self._passed:
            identity = VllmAdapter().identity(self._slot, self._target, self._hardware)
            check_known_answer(identity, speculation, self._serve_known)
            self._passed = True
        return self._servers.lend(drafter, speculation)

    def native_layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """The ids that make this engine capture exactly `boundaries`."""
        reader = Reader("vllm", self._found.version, runner=resolved_runner(self._slot))
        return native_layer_ids(reader, boundaries, self._target.num_blocks)

    def _start_server(
        self, drafter: Path | None, speculation: Speculation | None, wanted: Callable[[], bool]
    ) -> ServerEndpoint:
        name = "vllm-serve.log" if drafter is None else "vllm-serve-drafter.log"
        return serve(self._launch(self._target, self._job.longest, name), drafter, speculation, wanted)

    def _serve_known(self, target: Target, drafter: Path, speculation: Speculation) -> ServerEndpoint:
        if not self.can_serve_both:
            self._servers.close()  # the memory may not hold one more
        return serve(self._launch(target, LONGEST, "vllm-known-answer.log"), drafter, speculation)

    def _launch(self, target: Target, longest: int, log_name: str) -> Launch:
        """How a server is started: alike for the real target and for the known-answer pair."""
        slot, hardware = self._slot, self._hardware
        identity = VllmAdapter().identity(slot, target, hardware)
        block = BLOCK_TOKENS[hardware.device]
        room = capacity(slot.backend.batch_size, longest, max(longest, BATCH_TOKENS[hardware.device]), block)
        asked = {**arguments(slot, target, hardware, identity["attention"], longest), **room}
        if hardware.device == "cuda" and self.can_serve_both:
            asked["gpu_memory_utilization"] = slot.backend.memory_fraction / 2
        return Launch(
            self._found,
            target,
            {**asked, **slot.backend.engine_args},
            environment(slot, target, hardware, longest, self._found.python),
            hardware.device,
            identity["runner"],
            identity["attention"],
            reported_quantization(slot, target, hardware),
            self._job.logs / log_name,
            slot.backend.start_timeout,
            slot.backend.port,
        )

    def _worker(self, purpose: str | tuple[int, ...]) -> OfflineVllm:
        """The worker for text, or for states at these boundaries; one for something else is ended first."""
        if self._offline is not None and self._offline_for == purpose:
            return self._offline
        self._close()  # servers too: not everything fits into the memory together
        slot, target, hardware = self._slot, self._target, self._hardware
        longest = self._job.longest + 1  # vLLM wants room for a token to follow, even if none is asked for
        identity = VllmAdapter().identity(slot, target, hardware)
        asked = arguments(slot, target, hardware, identity["attention"], longest)
        asked |= {"skip_tokenizer_init": True, "worker_extension_cls": "vllm_extension.Report"}
        if isinstance(purpose, tuple):
            last = target.num_blocks  # its states before the final norm: the last hidden state
            ids = [*self.native_layer_ids(purpose), *([last] if purpose[-1] != last else [])]
            batch = slot.backend.engine_args.get("max_num_batched_tokens", BATCH_TOKENS[hardware.device])
            step, fewer = max(longest, batch), "max_num_batched_tokens"
            self._ring = states_ring(step, len(ids), target.hidden_size, identity["dtype"], fewer)
            asked |= capture_arguments(ids, self._ring, step)
        variables = environment(slot, target, hardware, longest, self._found.python)
        name = "vllm-generate.log" if purpose == GENERATING else "vllm-capture.log"
        self._offline = OfflineVllm(self._found.python, asked, variables, self._job.logs / name)
        self._offline_for = purpose
        _require_honoured(self._offline.report, identity, reported_quantization(slot, target, hardware))
        return self._offline

    def _close(self) -> None:
        self._servers.close()
        self._close_offline()

    def _close_offline(self) -> None:
        if self._offline is not None:
            self._offline.__exit__(None, None, None)
            self._offline = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def _require_honoured(report: dict[str, Any], identity: dict[str, Any], quantization: str | None) -> None:
    """What runs must be what the identity says, or an artifact would carry a false name.

    Raises:
        EagleError: names what was asked for and what runs.
    """
    asked = {
        "attention": [identity["attention"]],
        "runner": identity["runner"],
        "dtype": identity["dtype"],
        "quantization": quantization,
    }
    wrong = {name: (value, report[name]) for name, value in asked.items() if report[name] != value}
    if wrong:
        said = ", ".join(f"{name} {found} instead of {value}" for name, (value, found) in wrong.items())
        raise EagleError(f"vLLM does not run what it was asked for: {said}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
