"""An engine without a server: generating text and capturing states, in a worker process of the engine's environment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.engines.captured import captured
from eagle3x.engines.child import Worker
from eagle3x.progress import log
from eagle3x.types import Completion, EagleError, HiddenStates, LastNorm, Request, Timing, TokenSample

if TYPE_CHECKING:
    from eagle3x.engines.inside.states_ring import RingReader

INSIDE = Path(__file__).parent / "inside"
"""What runs in the engines' environments. A folder of its own: beside it lie vllm.py and sglang.py, which must not be
vLLM and SGLang to anyone."""


@dataclass(frozen=True)
class OfflineStart:
    """How a worker is started: `script` in `INSIDE`, the engine's arguments by name, and what is added to this
    process's environment. `ring`: where its states come, if it is to capture."""

    script: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    ring: RingReader | None = None


class OfflineEngine:
    """A worker with the engine loaded.

    `report`: what the loaded engine says of itself.
    """

    def __init__(self, name: str, python: Path, start: OfflineStart, logfile: Path) -> None:
        """Start and load.

        Raises:
            EagleError: the engine, called `name`, could not load. EngineDied: it ended. The message has the end of its
                log.
        """
        self._name, self._ring = name, start.ring
        path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")]))
        argv = [str(python), str(INSIDE / start.script)]
        self._worker = Worker(argv, logfile, {**start.environment, "PYTHONPATH": path})
        try:
            started = time.monotonic()
            (loaded,) = list(self._worker.request({"op": "load", "arguments": dict(start.arguments)}))
            self.report: dict[str, Any] = loaded["report"]
            log(f"{name} loaded in {time.monotonic() - started:.0f} s")
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[Request], stop_token_ids: Sequence[int]) -> Iterator[Completion]:
        """Answer the requests, in order of completion."""
        asked = [asdict(request) for request in requests]
        for reply in self._worker.request({"op": "generate", "requests": asked, "stop": list(stop_token_ids)}):
            answer = reply["completion"]
            yield Completion(answer["id"], tuple(answer["token_ids"]), answer["finish"], Timing(*answer["timing"]))

    def capture(self, samples: Sequence[TokenSample], last_norm: LastNorm) -> Iterator[HiddenStates]:
        """States of each sample, in the order in which they become complete, in memory of the ring."""
        if self._ring is None:
            raise EagleError(f"this worker of {self._name} was loaded for text")
        return captured(self._worker, self._ring, samples, last_norm)

    def close(self) -> None:
        """End the worker; states that were handed out stay."""
        self._worker.stop()
        if self._ring is not None:
            self._ring.close()
