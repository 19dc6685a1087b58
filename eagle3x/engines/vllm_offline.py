"""vLLM without a server: generating text and capturing states, in a worker process of vLLM's own environment.

The states of one engine step come in shared memory (`inside/states_ring.py`) and are handed on without a copy; the
engine pauses while all of that memory waits for its reader.
Shapes: N tokens of one step, S states of a token, H hidden size, T tokens of one sample, A boundaries.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from eagle3x.engines.child import Worker
from eagle3x.engines.resolved import DTYPE_BYTES
from eagle3x.progress import log
from eagle3x.types import Completion, EagleError, HiddenStates, Request, Timing, TokenSample

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3x.engines.inside.states_ring import RingReader

INSIDE = Path(__file__).parent / "inside"
"""What runs in vLLM's environment. A folder of its own: beside it lies vllm.py, which must not be vLLM to anyone."""
GIB = 1024**3
STEPS_ALIVE = 8
"""Steps whose states can exist at once: being computed, waiting, being written to shards."""
POLL_SECONDS = 0.0002


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

    def capture(self, samples: Sequence[TokenSample], num_boundaries: int, ring: RingReader) -> Iterator[HiddenStates]:
        """States of each sample, in memory of `ring`, which the worker was loaded with (`capture_arguments`).

        The last of the captured states is the last hidden state, before the final norm.
        """
        tokens = {sample.id: sample.token_ids for sample in samples}
        asked = [{"id": sample.id, "token_ids": sample.token_ids} for sample in samples]
        for reply in self._worker.request({"op": "capture", "samples": asked}):
            while not ring.written(reply["place"]):
                self._worker.require_running("vLLM, while it captured states,")
                time.sleep(POLL_SECONDS)
            # Nothing here refers to the states afterwards: what is not kept is free for the next steps.
            yield from _samples(ring.read(reply["place"]), reply["rows"], tokens, num_boundaries)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.stop()


def _samples(
    states_NSH: Tensor, rows: Sequence[tuple[str, int, int]], tokens: Mapping[str, tuple[int, ...]], num_boundaries: int
) -> Iterator[HiddenStates]:
    """One step's states by sample: id, first row and length of each."""
    for id_, start, length in rows:
        part = states_NSH[start : start + length]
        if len(part) != length or length != len(tokens[id_]):
            raise EagleError(f"{id_}: vLLM captured {len(part)} states of {len(tokens[id_])} tokens")
        aux = part[:, :num_boundaries].flatten(1)  # [T, A*H], a view
        yield HiddenStates(id_, tokens[id_], aux, part[:, -1], "pre_norm")


def capture_arguments(layer_ids: Sequence[int], ring: RingReader, longest: int, batch_tokens: int) -> dict[str, Any]:
    """Arguments that make vLLM capture these layers, whole prompts at a time, into `ring`."""
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
            "kv_connector_extra_config": {"ring": ring.path, "places": ring.slots},
        },
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(longest, batch_tokens),
    }


def states_ring(longest: int, batch_tokens: int, num_states: int, hidden_size: int, dtype: str) -> RingReader:
    """Memory for the states of `STEPS_ALIVE` steps, for a worker with such `capture_arguments`.

    Raises:
        EagleError: the machine has not that much.
    """
    from eagle3x.engines.inside.states_ring import RingReader

    step = max(longest, batch_tokens) * num_states * hidden_size * DTYPE_BYTES[dtype]
    free = available_memory()
    if STEPS_ALIVE * step > free:
        raise EagleError(
            f"captured states on their way to disk need {STEPS_ALIVE * step / GIB:.1f} GiB of memory, {free / GIB:.1f}"
            " GiB are free: make room, or lower backend.engine_args.max_num_batched_tokens"
        )
    return RingReader(STEPS_ALIVE, step)


def available_memory() -> int:
    """Bytes that this machine's programs can still take, as Linux estimates it."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise EagleError("/proc/meminfo does not say how much memory is available")
    return int(found[1]) * 1024
