"""A test aid: SGLang's compiled CPU kernels in plain PyTorch, so that SGLang itself runs on any x86 machine.

SGLang's CPU path imports a compiled package of this name, which is not published for CPUs. This package stands in for
it beside sglang 0.5.23: scheduler, EAGLE worker, capture and server are SGLang's own; only these kernels are not. It
covers what a dense Llama-like target and an EAGLE-3 drafter need with the `intel_amx` attention backend, refuses the
rest with NotImplementedError, and is simple rather than fast: never take a throughput of it for SGLang's.

    attention.py     `torch.ops.sgl_kernel.{decode,extend}_attention_cpu`
    cache_slots.py   which slots of the KV pool a request's tokens lie in
    draft_tree.py    building a draft tree, walking it after verification
    token_rows.py    tokens of flattened per-request rows
"""

from .attention import register
from .cache_slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
)
from .draft_tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu
from .token_rows import fill_bonus_tokens_cpu, rotate_input_ids_cpu

__version__ = "0.0.0+standin"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

register()
