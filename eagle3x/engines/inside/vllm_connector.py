"""A vLLM KV connector that writes the captured hidden states of each engine step to one file.

Runs inside vLLM, loaded by its `kv_connector_module_path`; imports vLLM, torch, safetensors and the standard
library only.

`extract_hidden_states` stores the states of a step's tokens in a KV cache group of their own. The scheduler's side of
this connector knows which slots hold which request; the worker's side gathers them as soon as the step has run, on the
engine's own stream (so no later step can have overwritten them) and writes them from a thread. A step's file is there
when its step is done: no request has to follow for the last one to be flushed.

Shapes: N tokens of one step, S states of a token (boundaries, and the last hidden state), H hidden size.
    step-00000007.safetensors   states [N, S, H], the requests one after another
    step-00000007.error         instead, if it could not be written: why
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import extract_from_kv_cache
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

WRITERS = 2
"""Threads that copy to the file; one waits for the disk while the other copies."""


@dataclass
class Step(KVConnectorMetadata):
    """What one engine step computes: `slots` [N] in the cache of hidden states, and the file that they go to."""

    file: str | None = None
    slots: torch.Tensor | None = None


class StatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only: nothing is ever loaded from it. `kv_connector_extra_config.folder` is where the files go."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._folder = Path(self._kv_transfer_config.get_from_extra_config("folder", None))
        groups = kv_cache_config.kv_cache_groups
        own = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
        if not own and len(groups) == 1:  # layers of one page size share a group, whatever they hold
            own = [0]
        if len(own) != 1:
            raise ValueError(f"{len(own)} of {len(groups)} KV cache groups hold hidden states: exactly one is needed")
        self._group = own[0]
        self._block_size = groups[self._group].kv_cache_spec.block_size
        self._steps = 0
        self._places: dict[str, dict[str, Any]] = {}
        self._cache: torch.Tensor | None = None
        self._writers: ThreadPoolExecutor | None = None

    # --- the scheduler's side ---

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Name this step's file and slots. Raises if a prompt is not computed in one step."""
        slots, start = [], 0
        file = str(self._folder / f"step-{self._steps:08d}.safetensors")
        for request in scheduler_output.scheduled_new_reqs:
            tokens = len(request.prompt_token_ids)
            scheduled = scheduler_output.num_scheduled_tokens[request.req_id]
            if request.num_computed_tokens or scheduled != tokens:
                raise RuntimeError(
                    f"{scheduled} of {tokens} prompt tokens of {request.req_id} are computed in this step: states need"
                    " whole prompts (no chunked prefill, no prefix cache)"
                )
            blocks = torch.tensor(request.block_ids[self._group])
            places = blocks[:, None] * self._block_size + torch.arange(self._block_size)
            slots.append(places.flatten()[:tokens])
            self._places[request.req_id] = {"file": file, "start": start, "tokens": tokens}
            start += tokens
        if not slots:
            return Step()
        self._steps += 1
        return Step(file, torch.cat(slots))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Where the request's states are; its blocks may be freed at once."""
        return False, self._places.pop(request.request_id, None)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """As above, for a cache of one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    # --- the worker's side ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the cache of hidden states. With tensor parallel every rank has all states: the first one writes."""
        if get_tensor_model_parallel_rank() != 0:
            return
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        (name,) = layers
        self._cache = kv_caches[name]
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="eagle3x-states")

    def wait_for_save(self) -> None:
        """Called once the step's states are in the cache: gather them, and write them from a thread."""
        if self._cache is None or self._writers is None or not self.has_connector_metadata():
            return
        step = self._get_connector_metadata()
        if not isinstance(step, Step) or step.file is None or step.slots is None:
            return
        cuda = self._cache.is_cuda
        slots = step.slots.pin_memory().to(self._cache.device, non_blocking=True) if cuda else step.slots
        states_NSH = extract_from_kv_cache(self._cache, slots, len(slots)).contiguous()
        ready = None
        if cuda:
            on_host = torch.empty(states_NSH.shape, dtype=states_NSH.dtype, pin_memory=True)
            on_host.copy_(states_NSH, non_blocking=True)
            states_NSH, ready = on_host, torch.cuda.Event()
            ready.record()
        self._writers.submit(_write, states_NSH, ready, Path(step.file))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The model has stored the states already."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None: `extract_from_kv_cache` is the installed version's own, and reads its layout."""
        return None


def _write(states_NSH: torch.Tensor, ready: torch.cuda.Event | None, file: Path) -> None:
    """Write under another name first: a file that exists is whole."""
    try:
        if ready is not None:
            ready.synchronize()
        unfinished = file.with_suffix(".unfinished")
        save_file({"states": states_NSH}, unfinished)
        unfinished.replace(file)
    except BaseException as error:
        file.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
        raise
