"""SGLang without a server: generating text and capturing states, in a worker process of SGLang's own environment.

SGLang writes the states of one forward as one safetensors file into a scratch folder (shared memory, if it has the
room; docs/sglang.md). The reader maps it, and removes it. The worker gives the engine no more while too many wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagle3x.engines.child import Worker
from eagle3x.engines.inside.sglang_capture.order import VARIABLE, CaptureOrder
from eagle3x.engines.sglang_states import StatesReader
from eagle3x.progress import log
from eagle3x.types import Completion, HiddenStates, Request, Timing, TokenSample

INSIDE = Path(__file__).parent / "inside"
"""What runs in SGLang's environment. A folder of its own: beside it lies sglang.py, which must not be SGLang to
anyone."""
PACKAGE = "sglang_capture"
"""The package in it that has SGLang's models, capturing."""
PREFIX = "eagle3x-states-"
"""What the ids of requests whose states are wanted begin with; SGLang's own warm-up has other ids."""
FORWARDS_AHEAD = 2
"""Tokens given to the engine beforehand, in units of its largest forward."""
FILES_ALIVE = 8
"""Forwards whose states can exist at once: waiting, being written, mapped by the reader."""


@dataclass(frozen=True)
class Capture:
    """States that a worker is to capture: at SGLang's `layer_ids`, into `folder`, at most `tokens` in one forward."""

    layer_ids: tuple[int, ...]
    folder: Path
    tokens: int

    def environment(self) -> dict[str, str]:
        """What makes SGLang's models capture them."""
        order = CaptureOrder(self.layer_ids, self.folder, PREFIX)
        return {VARIABLE: order.to_json(), "SGLANG_EXTERNAL_MODEL_PACKAGE": PACKAGE}


class OfflineSglang:
    """A worker with SGLang loaded; a context manager that ends it.

    `info`: what the loaded engine says of itself, as `sglang_report` reads it.
    """

    def __init__(
        self,
        python: Path,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        logfile: Path,
        capture: Capture | None = None,
    ) -> None:
        """Start and load; with `capture` for states, without for text.

        Raises:
            EagleError: SGLang could not load. EngineDied: it ended. The message has the end of its log.
        """
        path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")]))
        self._capture = capture
        self._worker = Worker(
            [str(python), str(INSIDE / "sglang_worker.py")],
            logfile,
            {**environment, **(capture.environment() if capture else {}), "PYTHONPATH": path},
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

    def capture(self, samples: Sequence[TokenSample]) -> Iterator[HiddenStates]:
        """States of each sample, in the order in which they became complete."""
        assert self._capture is not None, "this worker was loaded for text"
        reader = StatesReader(self._capture.folder, PREFIX, samples)
        message = {
            "op": "capture",
            "samples": [{"id": sample.id, "token_ids": sample.token_ids} for sample in samples],
            "folder": str(self._capture.folder),
            "prefix": PREFIX,
            "tokens_ahead": FORWARDS_AHEAD * self._capture.tokens,
        }
        for _ in self._worker.request(message):
            yield from reader.written()
        yield from reader.written()
        reader.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.stop()
