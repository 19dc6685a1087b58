"""A vLLM KV connector that leaves the captured hidden states of each engine step in shared memory.

Runs inside vLLM, loaded by its `kv_connector_module_path`; imports vLLM, torch and the standard library only.

`extract_hidden_states` stores the states of a step's tokens in a KV cache group of their own. The scheduler's side of
this connector knows which slots of that cache hold which request, and takes a place in the shared memory
(`states_ring.py`) once one is free; the worker's side gathers the states as soon as the step has run, on the engine's
own stream (so no later step can have overwritten them), and copies them there. A step's states are there when its step
is done: no request has to follow for the last one to be flushed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from states_ring import RingWriter
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import extract_from_kv_cache
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec


@dataclass
class Step(KVConnectorMetadata):
    """What one engine step computes: `slots` [N] in the cache of hidden states, their `place` in the ring, and whose
    they are: `rows`, as `eagle3x.engines.captured` reads them."""

    place: int | None = None
    rows: list[list[int]] = field(default_factory=list)
    slots: torch.Tensor | None = None


class StatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only: nothing is ever loaded from it. `kv_connector_extra_config`: the `ring`'s path, and how many of the
    captured states are `boundaries`; the last one captured is the last hidden state, a boundary or not."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._ring = RingWriter(self._kv_transfer_config.get_from_extra_config("ring", None))
        self._boundaries = int(self._kv_transfer_config.get_from_extra_config("boundaries", None))
        groups = kv_cache_config.kv_cache_groups
        own = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
        if not own and len(groups) == 1:  # layers of one page size share a group, whatever they hold
            own = [0]
        if len(own) != 1:
            raise ValueError(f"{len(own)} of {len(groups)} KV cache groups hold hidden states: exactly one is needed")
        self._group = own[0]
        self._block_size = groups[self._group].kv_cache_spec.block_size
        self._cache: torch.Tensor | None = None

    # --- the scheduler's side ---

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's place and slots, once a place is free. Raises if a prompt is not computed in one step."""
        requests = scheduler_output.scheduled_new_reqs
        if not requests:
            return Step()
        rows, slots, start = [], [], 0
        for request in requests:
            tokens = len(request.prompt_token_ids)
            scheduled = scheduler_output.num_scheduled_tokens[request.req_id]
            if request.num_computed_tokens or scheduled != tokens:
                raise RuntimeError(
                    f"{scheduled} of {tokens} prompt tokens of {request.req_id} are computed in this step: states need"
                    " whole prompts (no chunked prefill, no prefix cache)"
                )
            blocks = torch.tensor(request.block_ids[self._group])
            cached = blocks[:, None] * self._block_size + torch.arange(self._block_size)
            slots.append(cached.flatten()[:tokens])
            number = request.sampling_params.extra_args["kv_transfer_params"]["sample"]
            rows.append([number, start, 0, tokens])
            start += tokens
        return Step(self._ring.take(), rows, torch.cat(slots))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """The request's blocks may be freed at once."""
        return False, None

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
        if self._cache.is_cuda:
            self._ring.pin()

    def wait_for_save(self) -> None:
        """Called once the step's states are in the cache: gather them, and copy them out."""
        if self._cache is None or not self.has_connector_metadata():
            return
        step = self._get_connector_metadata()
        if not isinstance(step, Step) or step.place is None or step.slots is None:
            return
        slots = step.slots.pin_memory() if self._cache.is_cuda else step.slots
        slots = slots.to(self._cache.device, non_blocking=True)
        states_NSH = extract_from_kv_cache(self._cache, slots, len(slots))
        kept = [*range(self._boundaries), -1]
        norms = torch.linalg.vector_norm(states_NSH, dim=-1, dtype=torch.float32)[:, kept]
        aux, last = states_NSH[:, : self._boundaries].flatten(1), states_NSH[:, -1].contiguous()
        self._ring.write(step.place, step.rows, [aux, last, norms])

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
