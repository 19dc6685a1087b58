"""SGLang without a server: generating text and capturing states, in a worker process of SGLang's own environment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from eagle3x.engines.captured import captured
from eagle3x.engines.child import Worker
from eagle3x.engines.inside.sglang_capture.order import VARIABLE, CaptureOrder
from eagle3x.progress import log
from eagle3x.types import Completion, HiddenStates, Request, Timing, TokenSample

if TYPE_CHECKING:
    from eagle3x.engines.inside.states_ring import RingReader

INSIDE = Path(__file__).parent / "inside"
"""What runs in SGLang's environment. A folder of its own: beside it lies sglang.py, which must not be SGLang to
anyone."""
PACKAGE = "sglang_capture"
"""The package in it that has SGLang's models, capturing."""


class OfflineSglang:
    """A worker with SGLang loaded; a context manager that ends it.

    `info`: what the loaded engine says of itself, as `sglang_report` reads it.
    """

    def __init__(
        self, python: Path, arguments: Mapping[str, Any], environment: Mapping[str, str], logfile: Path
    ) -> None:
        """Start and load.

        Raises:
            EagleError: SGLang could not load. EngineDied: it ended. The message has the end of its log.
        """
        path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")]))
        self._worker = Worker(
            [str(python), str(INSIDE / "sglang_worker.py")],
            logfile,
            {**environment, "PYTHONPATH": path},
        )
        try:
            started = time.monotonic()
            (loaded,) = list(self._worker.request({"op": "load", "arguments": {"log_level": "info", **arguments}}))
            self.info: dict[str, Any] = loaded["info"]
            log(f"SGLang {self.info['version']} loaded in {time.monotonic() - started:.0f} s")
        except BaseException:
            self._worker.stop()
            raise

    def generate(self, requests: Sequence[Request], stop_token_ids: Sequence[int]) -> Iterator[Completion]:
        """Answer the requests, in order of completion."""
        asked = [asdict(request) for request in requests]
        for reply in self._worker.request({"op": "generate", "requests": asked, "stop": list(stop_token_ids)}):
            answer = reply["completion"]
            yield Completion(answer["id"], tuple(answer["token_ids"]), answer["finish"], Timing(*answer["timing"]))

    def capture(self, samples: Sequence[TokenSample], boundaries: int, ring: RingReader) -> Iterator[HiddenStates]:
        """States of each sample, in memory of `ring`, which the worker was loaded with (`capture_environment`).

        The last hidden state is the one after the final norm.
        """
        return captured(self._worker, ring, samples, boundaries, "post_norm")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.stop()


def capture_environment(layer_ids: Sequence[int], ring: RingReader) -> dict[str, str]:
    """Environment variables that make SGLang's models capture at these layers into `ring`."""
    order = CaptureOrder(tuple(layer_ids), ring.path)
    return {VARIABLE: order.to_json(), "SGLANG_EXTERNAL_MODEL_PACKAGE": PACKAGE}
