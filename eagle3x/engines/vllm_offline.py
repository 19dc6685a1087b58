"""vLLM without a server: generating text and capturing states, in a worker process of vLLM's own environment."""

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
from eagle3x.progress import log
from eagle3x.types import Completion, HiddenStates, Request, Timing, TokenSample

if TYPE_CHECKING:
    from eagle3x.engines.inside.states_ring import RingReader

INSIDE = Path(__file__).parent / "inside"
"""What runs in vLLM's environment. A folder of its own: beside it lies vllm.py, which must not be vLLM to anyone."""


class OfflineVllm:
    """A worker with vLLM loaded; a context manager that ends it.

    `report`: what the loaded engine says of itself (`inside/vllm_extension.py`).
    """

    def __init__(
        self, python: Path, arguments: Mapping[str, Any], environment: Mapping[str, str], logfile: Path
    ) -> None:
        """Start and load.

        Raises:
            EagleError: vLLM could not load; the message has its reason and the end of its log.
        """
        path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")]))
        self._worker = Worker(
            [str(python), str(INSIDE / "vllm_worker.py")],
            logfile,
            {**environment, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
        try:
            started = time.monotonic()
            (loaded,) = list(self._worker.request({"op": "load", "arguments": dict(arguments)}))
            self.report: dict[str, Any] = loaded["report"]
            log(f"vLLM loaded in {time.monotonic() - started:.0f} s: {self.report}")
        except BaseException:
            self._worker.stop()
            raise

    def generate(self, requests: Sequence[Request], stop_token_ids: Sequence[int]) -> Iterator[Completion]:
        """Answer the requests, in order of completion."""
        asked = [{**asdict(request), "stop_token_ids": list(stop_token_ids)} for request in requests]
        for reply in self._worker.request({"op": "generate", "requests": asked}):
            answer = reply["completion"]
            yield Completion(answer["id"], tuple(answer["token_ids"]), answer["finish"], Timing(*answer["timing"]))

    def capture(self, samples: Sequence[TokenSample], boundaries: int, ring: RingReader) -> Iterator[HiddenStates]:
        """States of each sample, in memory of `ring`, which the worker was loaded with (`capture_arguments`).

        The last of the captured states is the last hidden state, before the final norm.
        """
        return captured(self._worker, ring, samples, boundaries, "pre_norm")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.stop()


def capture_arguments(layer_ids: Sequence[int], ring: RingReader, step_tokens: int) -> dict[str, Any]:
    """Arguments that make vLLM capture these layers into `ring`: whole prompts, at most `step_tokens` in a step."""
    spec = {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": spec},
        },
        "kv_transfer_config": {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"ring": ring.path},
        },
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": step_tokens,
    }
