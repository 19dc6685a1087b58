"""vLLM without a server: generating text and capturing states, in a worker process of vLLM's own environment.

The states of one engine step come as one safetensors file in a scratch folder (shared memory, if it has the room), are
mapped, and handed on without a copy; the file is removed once it is mapped. The worker pauses while too many wait.
Shapes: N tokens of one step, S states of a token, H hidden size, T tokens of one sample, A boundaries.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from eagle3x.engines.child import Worker
from eagle3x.progress import log
from eagle3x.types import Completion, EagleError, HiddenStates, Request, Timing, TokenSample

if TYPE_CHECKING:
    from torch import Tensor

INSIDE = Path(__file__).parent / "inside"
"""What runs in vLLM's environment. A folder of its own: beside it lies vllm.py, which must not be vLLM to anyone."""
FILES_ALIVE = 8
"""Steps whose states can exist at once: waiting, being written, mapped by the reader."""
POLL_SECONDS = 0.001


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

    def capture(self, samples: Sequence[TokenSample], num_boundaries: int) -> Iterator[HiddenStates]:
        """States of each sample. The last of the captured states is the last hidden state, before the final norm."""
        tokens = {sample.id: sample.token_ids for sample in samples}
        asked = [{"id": sample.id, "token_ids": sample.token_ids} for sample in samples]
        for reply in self._worker.request({"op": "capture", "samples": asked}):
            states_NSH = self._mapped(Path(reply["file"]))
            for id_, start, length in reply["rows"]:
                rows = states_NSH[start : start + length]
                if len(rows) != length or length != len(tokens[id_]):
                    raise EagleError(f"{id_}: vLLM captured {len(rows)} states of {len(tokens[id_])} tokens")
                aux = rows[:, :num_boundaries].flatten(1)  # [T, A*H], a view
                yield HiddenStates(id_, tokens[id_], aux, rows[:, -1], "pre_norm")

    def _mapped(self, file: Path) -> Tensor:
        """[N, S, H], once the file is there; its name is gone afterwards."""
        from safetensors import safe_open

        failed = file.with_suffix(".error")
        while not file.exists():
            if failed.exists():
                raise EagleError(f"vLLM could not write captured states to {file.parent}: {failed.read_text()}")
            self._worker.require_running("vLLM, while it captured states,")
            time.sleep(POLL_SECONDS)
        with safe_open(file, framework="pt") as opened:
            states = opened.get_tensor("states")
        file.unlink()
        return states

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.stop()


def capture_arguments(layer_ids: Sequence[int], folder: Path, longest: int, batch_tokens: int) -> dict[str, Any]:
    """Arguments that make vLLM capture these layers, whole prompts at a time, into `folder`."""
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
            "kv_connector_extra_config": {"folder": str(folder)},
        },
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(longest, batch_tokens),
    }
