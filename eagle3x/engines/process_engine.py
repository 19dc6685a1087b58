"""An engine with an environment and processes of its own: workers for text and for states, servers, one after another.

Nothing here imports torch or the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from eagle3x.capture import native_layer_ids
from eagle3x.engines.known_answer_check import LONGEST, check_known_answer
from eagle3x.engines.offline import OfflineEngine, OfflineStart
from eagle3x.engines.resolved import ENGINES, both_fit
from eagle3x.engines.servers import Servers
from eagle3x.quantization.in_slot import NONE, ONLINE
from eagle3x.types import Completion, EagleError, HiddenStates, LastNorm, Request, TokenSample

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.config import Hardware
    from eagle3x.engines.base import Endpoint
    from eagle3x.engines.config import Job, Slot
    from eagle3x.engines.interpreter import EngineInterpreter
    from eagle3x.engines.process_adapter import ProcessAdapter
    from eagle3x.engines.server_endpoint import ServerEndpoint
    from eagle3x.targets import Target

Boundaries = tuple[int, ...]
TEXT: Boundaries = ()
"""What a worker for text captures."""


class ProcessEngine(ABC):
    """What vLLM and SGLang share of `eagle3x.engines.base.Engine`.

    One worker process at a time: for text, or for states at certain boundaries. `last_norm`: of the states it captures.
    """

    last_norm: ClassVar[LastNorm]
    can_serve_plain = True

    def __init__(
        self,
        adapter: ProcessAdapter,
        slot: Slot,
        target: Target,
        hardware: Hardware,
        job: Job,
        found: EngineInterpreter,
    ) -> None:
        self._adapter, self._found = adapter, found
        self._slot, self._target, self._hardware, self._job = slot, target, hardware, job
        self._name = ENGINES[adapter.name]
        self._offline: OfflineEngine | None = None
        self._offline_for: Boundaries = TEXT
        self.can_serve_both = slot.backend.port is None and both_fit(slot, target, hardware)
        self._passed = False
        self._servers = Servers(self._serve_target, 2 if self.can_serve_both else 1)

    @abstractmethod
    def _offline_start(self, identity: dict[str, Any], boundaries: Boundaries) -> OfflineStart:
        """How a worker for text starts, or one for states at `boundaries` if there are any."""

    @abstractmethod
    def _honoured(
        self, identity: dict[str, Any], start: OfflineStart, report: dict[str, Any]
    ) -> dict[str, tuple[Any, Any]]:
        """What a worker was asked for, and what its loaded engine reports: an artifact must not carry a false name."""

    @abstractmethod
    def _start_server(
        self,
        target: Target,
        longest: int,
        log: Path,
        drafter: Path | None,
        speculation: Speculation | None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> ServerEndpoint:
        """A server for sequences of at most `longest` tokens, alike for the real target and the known-answer pair.

        `wanted`: asked while it starts; False ends it.
        """

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answer the requests, at most `batch_size` at a time.

        Raises:
            EagleError: the engine could not load or failed. EngineDied: it ended; with the end of its log.
        """
        if requests:
            yield from self._worker(TEXT).generate(requests, self._target.eos_token_ids)

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        """States of each sample, on the CPU: aux [T, A*H] at ascending `boundaries`, last [T, H].

        Raises:
            EagleError: a sample longer than the engine was opened for, or it failed. EngineDied: it ended.
        """
        for sample in samples:
            if not 0 < len(sample.token_ids) <= self._job.longest:
                raise EagleError(f"{sample.id}: {len(sample.token_ids)} tokens, should be 1 to {self._job.longest}")
        if samples:
            yield from self._worker(tuple(boundaries)).capture(samples, self.last_norm)

    def serve(self, drafter: Path | None, speculation: Speculation | None) -> Endpoint:
        """Serve the target through the engine's own server, with the exported drafter in directory `drafter` if given.

        The server is kept for the next time it is asked for. The first one with a drafter has to pass the known-answer
        check, unless this way of serving has passed it before.

        Raises:
            EagleError: the server runs in another way than was asked. EngineDied: it ended; with the end of its log.
        """
        self._close_offline()
        if self.can_serve_both:
            self._servers.prepare(drafter, speculation)  # while the known-answer pair is served
        if speculation is not None and not self._passed:
            check_known_answer(self._pair_identity(), speculation, self._serve_known)
            self._passed = True
        return self._servers.lend(drafter, speculation)

    def native_layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """The ids that make this engine capture exactly `boundaries`."""
        reader = self._adapter.reader(self._found.version, self._slot, self._target)
        return native_layer_ids(reader, boundaries, self._target.num_blocks)

    def _identity(self, target: Target) -> dict[str, Any]:
        return self._adapter.identity(self._slot, target, self._hardware)

    def _pair_identity(self) -> dict[str, Any]:
        """Of the server for the known-answer pair: not quantized, unless the engine quantizes whatever it loads."""
        quantization = self._slot.quantization if self._slot.quantization.scheme == ONLINE else NONE
        return self._adapter.identity(replace(self._slot, quantization=quantization), self._target, self._hardware)

    def _log(self, what: str) -> Path:
        return self._job.logs / f"{self._adapter.name}-{what}.log"

    def _serve_target(
        self, drafter: Path | None, speculation: Speculation | None, wanted: Callable[[], bool]
    ) -> ServerEndpoint:
        log = self._log("serve" if drafter is None else "serve-drafter")
        return self._start_server(self._target, self._job.longest, log, drafter, speculation, wanted)

    def _serve_known(self, target: Target, drafter: Path, speculation: Speculation) -> ServerEndpoint:
        if not self.can_serve_both:
            self._servers.close()  # the memory may not hold one more
        return self._start_server(target, LONGEST, self._log("known-answer"), drafter, speculation)

    def _worker(self, boundaries: Boundaries) -> OfflineEngine:
        """The worker for text, or for states at these boundaries; one for something else is ended first."""
        if self._offline is not None and self._offline_for == boundaries:
            return self._offline
        self._close()  # servers too: not everything fits into the memory together
        identity = self._identity(self._target)
        start, log = self._offline_start(identity, boundaries), self._log("capture" if boundaries else "generate")
        offline = OfflineEngine(f"{self._name} {self._found.version}", self._found.python, start, log)
        try:
            asked = self._honoured(identity, start, offline.report)
            if wrong := {name: pair for name, pair in asked.items() if pair[0] != pair[1]}:
                said = ", ".join(f"{name} {found} instead of {wanted}" for name, (wanted, found) in wrong.items())
                raise EagleError(f"{self._name} does not run what it was asked for: {said}")
        except BaseException:
            offline.close()
            raise
        self._offline, self._offline_for = offline, boundaries
        return offline

    def _close(self) -> None:
        self._servers.close()
        self._close_offline()

    def _close_offline(self) -> None:
        if self._offline is not None:
            self._offline.close()
            self._offline = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
