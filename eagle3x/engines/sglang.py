"""SGLang, in its own environment and processes. Versions other than those of `TESTED` run with a warning.

Nothing here imports torch or SGLang before an engine is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from eagle3x.capture import CaptureError, Reader, native_layer_ids
from eagle3x.engines import interpreter
from eagle3x.engines.attached import AttachedServer, attached_refusals
from eagle3x.engines.captured import states_ring
from eagle3x.engines.gpus import compute_capability
from eagle3x.engines.interpreter import EngineInterpreter
from eagle3x.engines.known_answer_check import LONGEST, check_known_answer
from eagle3x.engines.resolved import both_fit, quantization_argument, reported_quantization, resolved_dtype
from eagle3x.engines.servers import Servers
from eagle3x.engines.sglang_arguments import (
    CPU_DRAFTS_SINCE,
    NOT_DRAFTING,
    arguments,
    environment,
    reserved,
    resolved_attention,
    spreading,
    surplus_stops,
)
from eagle3x.engines.sglang_attach import attach, attached_identity, reported
from eagle3x.engines.sglang_models import only_models
from eagle3x.engines.sglang_offline import OfflineSglang, capture_environment
from eagle3x.engines.sglang_report import read
from eagle3x.engines.sglang_serve import Launch, serve
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

TESTED = {("0.5.23", "cpu"), ("0.5.14", "cuda")}
READ_SINCE = {"fc_norm": "0.5.14", "norm_output": "0.5.14", "norm_before_fc": "0.5.23"}
"""Norm options of a drafter, and the first version whose source was seen to honour them (models/llama_eagle3.py)."""
IGNORED = frozenset({"norm_before_residual"})
"""Options that no version honours: its draft layer takes the residual before its norm, whatever the config says."""
GENERATING = "generate"


class SglangAdapter:
    """What is known of the engine before it is loaded."""

    name = "sglang"

    def identity(self, slot: Slot, target: Target, hardware: Hardware) -> dict[str, Any]:
        """What decides the floats. `batch_size` too: which rows are computed together moves the last bits."""
        capability = compute_capability(hardware) if hardware.device == "cuda" else None
        if slot.backend.url is not None:  # what it does not tell is what the user says of it
            own = attached_identity(slot.backend.url)
        else:
            found = interpreter.find("sglang", slot.backend.python, hardware.device)
            attention = resolved_attention(slot, target, hardware, capability)
            own = {"version": found.version, "torch": found.packages["torch"], "attention": attention}
        return {
            "engine": self.name,
            "attached": slot.backend.url is not None,
            "runner": None,
            "quantization": slot.quantization.scheme,
            "dtype": resolved_dtype(slot, hardware),
            "kv_cache_dtype": slot.backend.kv_cache_dtype,
            "device": hardware.device,
            "sm": capability,
            "tensor_parallel": slot.backend.tensor_parallel,
            "batch_size": slot.backend.batch_size,
            "batch_invariant": False,
            "chunked_prefill": True,
            "prefix_cache": False,
            "engine_args": slot.backend.engine_args,
            **own,
        }

    def refusals(self, slot: Slot, target: Target, hardware: Hardware) -> list[str]:
        """Every reason why this combination cannot run here, each with what would be right."""
        backend = slot.backend
        capability = compute_capability(hardware) if hardware.device == "cuda" else None
        if backend.url is not None and slot.role == "serve":
            return attached_refusals(backend, reported)
        reasons: list[str] = []
        if hardware.device == "cuda" and capability is None:
            reasons.append("hardware.device=cuda: the driver reports no GPU; use hardware=cpu")
        for check in (
            lambda: interpreter.find("sglang", backend.python, hardware.device),
            lambda: resolved_attention(slot, target, hardware, capability),
            lambda: quantization_argument(slot, target, hardware),
        ):
            try:
                check()
            except ConfigError as error:
                reasons.append(str(error))
        reasons += _argument_refusals(slot)
        if backend.runner != "auto":
            reasons.append(f"backend.runner={backend.runner}: SGLang has no choice of runners; use auto")
        if hardware.device == "cpu" and backend.kv_cache_dtype != "auto":
            reasons.append(f"backend.kv_cache_dtype={backend.kv_cache_dtype}: not run on CPUs; use auto")
        cores = hardware.threads or os.cpu_count() or 1
        if hardware.device == "cpu" and backend.tensor_parallel > cores:
            reasons.append(f"backend.tensor_parallel={backend.tensor_parallel}: each rank needs a core, of {cores}")
        devices = len(hardware.devices) if hardware.devices is not None else None
        if devices is not None and hardware.device == "cuda" and devices != backend.tensor_parallel:
            reasons.append(
                f"hardware.devices={list(hardware.devices or ())}: backend.tensor_parallel={backend.tensor_parallel}"
                " takes as many; name them, or use null"
            )
        if slot.role != "extract" and (more := surplus_stops(target)):
            reasons.append(
                f"target {target.name}: its config.json names stop tokens {more} that its generation_config.json does"
                " not, and SGLang stops at either; make the two agree"
            )
        if slot.role != "serve":
            for field in ("url", "port"):
                if getattr(backend, field) is not None:
                    reasons.append(f"backend.{field}: belongs to the serve slot; set serve.backend.{field}")
        return reasons

    def drafter_refusals(self, slot: Slot, target: Target, hardware: Hardware, plan: DrafterPlan) -> list[str]:
        """Every reason why SGLang would not serve such a drafter, or would serve it wrong."""
        reasons: list[str] = []
        identity = self.identity(slot, target, hardware)
        version, attention = identity["version"], identity["attention"]
        for option in sorted(plan.variants & IGNORED):
            reasons.append(
                f"drafter.{option}: SGLang ignores it and would compute another drafter; use {option}=false, or serve"
                " this drafter with backend@serve.backend=vllm"
            )
        for option, since in READ_SINCE.items():
            if option in plan.variants and numbers(version) < numbers(since):
                reasons.append(
                    f"drafter.{option}: SGLang {version} is older than {since}, where it is known to be read"
                )
        if attention in NOT_DRAFTING:
            reasons.append(f"attention={attention}: SGLang has no draft attention of that name; use attention=auto")
        if identity["device"] == "cpu" and numbers(version) < numbers(CPU_DRAFTS_SINCE):
            reasons.append(f"SGLang {version} does not speculate on a CPU; {CPU_DRAFTS_SINCE} does")
        if plan.boundaries is None:
            return reasons
        if len(plan.boundaries) != plan.num_aux:
            reasons.append(
                f"the drafter's fc reads {plan.num_aux} boundaries, SGLang would feed it {len(plan.boundaries)}:"
                f" {list(plan.boundaries)}"
            )
        try:
            native_layer_ids(Reader("sglang", version, target.model_class), plan.boundaries, target.num_blocks)
        except CaptureError as error:
            reasons.append(str(error))
        return reasons

    def open(self, slot: Slot, target: Target, hardware: Hardware, job: Job) -> SglangEngine | AttachedServer:
        """An engine that loads the target when it is first asked for something: its processes differ by what for."""
        if slot.backend.url is not None:
            reader = Reader("sglang", reported(slot.backend.url).version, target.model_class)
            return AttachedServer(slot.backend.url, target, slot.backend.batch_size, attach, reader)
        found = interpreter.find("sglang", slot.backend.python, hardware.device)
        if (found.version.split("+")[0], hardware.device) not in TESTED:
            known = ", ".join(f"{version} on {device}" for version, device in sorted(TESTED))
            log(f"SGLang {found.version} was never tested with eagle3x on {hardware.device} ({known} were); going on")
        return SglangEngine(slot, target, hardware, job, found)


class SglangEngine:
    """SGLang with one target. One worker process at a time: for text, or for states at certain boundaries."""

    def __init__(self, slot: Slot, target: Target, hardware: Hardware, job: Job, found: EngineInterpreter) -> None:
        self._slot, self._target, self._hardware, self._job, self._found = slot, target, hardware, job, found
        self._offline: OfflineSglang | None = None
        self._offline_for: str | tuple[int, ...] = ""
        self._ring: RingReader | None = None
        self.can_serve_both = slot.backend.port is None and both_fit(slot, target, hardware)
        self.can_serve_plain = True
        self._passed = False
        self._servers = Servers(self._start_server, 2 if self.can_serve_both else 1)

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answer the requests, at most `batch_size` at a time.

        At a temperature above 0 SGLang draws from one stream of numbers for all requests: a request's own seed is used
        only with `engine_args.enable_deterministic_inference`.

        Raises:
            EagleError: SGLang could not load or failed. EngineDied: it ended; with the end of its log.
        """
        if requests:
            yield from self._worker(GENERATING).generate(requests, self._target.eos_token_ids)

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        """States of each sample, on the CPU: aux [T, A*H] at ascending `boundaries`, last [T, H] after the final norm.

        Samples share forwards, and long ones are cut into chunks, as SGLang's scheduler has it.

        Raises:
            EagleError: a sample longer than the engine was opened for, or SGLang failed. EngineDied: it ended.
        """
        for sample in samples:
            if not 0 < len(sample.token_ids) <= self._job.longest:
                raise EagleError(f"{sample.id}: {len(sample.token_ids)} tokens, should be 1 to {self._job.longest}")
        if samples:
            worker = self._worker(tuple(boundaries))
            assert self._ring is not None
            yield from worker.capture(samples, len(boundaries), self._ring)

    def serve(self, drafter: Path | None, speculation: Speculation | None) -> Endpoint:
        """Serve the target through SGLang's HTTP server, with the exported drafter in directory `drafter` if given.

        The server is kept for the next time it is asked for. The first one with a drafter has to pass the known-answer
        check, unless this way of serving has passed it before.

        Raises:
            EagleError: the server runs in another way than was asked. EngineDied: it ended; with the end of its log.
        """
        self._close_offline()
        if self.can_serve_both:
            self._servers.prepare(drafter, speculation)  # while the known-answer pair is served
        if speculation is not None and not self._passed:
            identity = SglangAdapter().identity(self._slot, self._target, self._hardware)
            check_known_answer(identity, speculation, self._serve_known)
            self._passed = True
        return self._servers.lend(drafter, speculation)

    def native_layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """The ids that make this engine capture exactly `boundaries`."""
        reader = Reader("sglang", self._found.version, self._target.model_class)
        return native_layer_ids(reader, boundaries, self._target.num_blocks)

    def _start_server(
        self, drafter: Path | None, speculation: Speculation | None, wanted: Callable[[], bool]
    ) -> ServerEndpoint:
        name = "sglang-serve.log" if drafter is None else "sglang-serve-drafter.log"
        return serve(self._launch(self._target, self._job.longest, name), drafter, speculation, wanted)

    def _serve_known(self, target: Target, drafter: Path, speculation: Speculation) -> ServerEndpoint:
        if not self.can_serve_both:
            self._servers.close()  # the memory may not hold one more
        return serve(self._launch(target, LONGEST, "sglang-known-answer.log"), drafter, speculation)

    def _launch(self, target: Target, longest: int, log_name: str) -> Launch:
        """How a server is started: alike for the real target and for the known-answer pair."""
        slot, hardware = self._slot, self._hardware
        attention = SglangAdapter().identity(slot, target, hardware)["attention"]
        return Launch(
            self._found,
            target,
            arguments(slot, target, hardware, attention, longest),
            self._environment(target),
            hardware.device,
            attention,
            reported_quantization(slot, target, hardware),
            self._job.logs / log_name,
            slot.backend.start_timeout,
            slot.backend.port,
        )

    def _environment(self, target: Target) -> dict[str, str]:
        return environment(self._slot, self._hardware) | only_models(self._found.python, target.model_class)

    def _worker(self, purpose: str | tuple[int, ...]) -> OfflineSglang:
        """The worker for text, or for states at these boundaries; one for something else is ended first."""
        if self._offline is not None and self._offline_for == purpose:
            return self._offline
        self._close()  # servers too: not everything fits into the memory together
        slot, target, hardware, longest = self._slot, self._target, self._hardware, self._job.longest
        identity = SglangAdapter().identity(slot, target, hardware)
        asked = arguments(slot, target, hardware, identity["attention"], longest)
        variables = self._environment(target)
        if isinstance(purpose, tuple):
            ids = self.native_layer_ids(purpose)
            tokens = max(longest, asked["chunked_prefill_size"], asked["max_prefill_tokens"])
            fewer = "chunked_prefill_size and max_prefill_tokens"
            self._ring = states_ring(tokens, len(ids) + 1, target.hidden_size, identity["dtype"], fewer)
            asked["disable_cuda_graph"] = True  # a replayed graph runs no hook
            variables |= capture_environment(ids, self._ring)
        name = "sglang-generate.log" if purpose == GENERATING else "sglang-capture.log"
        self._offline = OfflineSglang(self._found.python, asked, variables, self._job.logs / name)
        self._offline_for = purpose
        _require_honoured(self._offline.info, asked, identity, reported_quantization(slot, target, hardware))
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


def _require_honoured(
    info: dict[str, Any], asked: dict[str, Any], identity: dict[str, Any], quantization: str | None
) -> None:
    """What runs must be what the identity says, or an artifact would carry a false name.

    Raises:
        EagleError: names what was asked for and what runs.
    """
    reported = read(info)
    wrong = {
        name: (wanted, found)
        for name, wanted, found in (
            ("version", identity["version"].split("+")[0], reported.version.split("+")[0]),
            ("attention", [identity["attention"]], sorted(reported.attention)),
            ("quantization", quantization, reported.quantization),
            ("tensor_parallel", asked["tp_size"], reported.tensor_parallel),
            ("kv_cache_dtype", asked["kv_cache_dtype"], reported.kv_cache_dtype),
            ("dtype", asked["dtype"], reported.dtype),
            ("prefix cache", False, reported.prefix_cache),
        )
        if wanted != found
    }
    if wrong:
        said = ", ".join(f"{name} {found} instead of {wanted}" for name, (wanted, found) in wrong.items())
        raise EagleError(f"SGLang does not run what it was asked for: {said}")


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


def numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 23) of "0.5.23+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
