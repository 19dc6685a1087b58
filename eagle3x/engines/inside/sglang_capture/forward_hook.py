"""Leaves the states of each forward in shared memory (`states_ring.py`), before SGLang answers the requests in it.

Shapes: N tokens of one forward, A captured layers, H hidden size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from states_ring import RingWriter
from torch import Tensor

from .order import PREFIX, CaptureOrder

SIGNATURE = inspect.signature(LogitsProcessor.forward)


class ForwardHook:
    """A forward pre-hook of a model's logits processor.

    What goes wrong in it ends the engine, instead of leaving a gap. While all of the memory waits for its reader, the
    engine waits here. Nothing here waits for a GPU: which requests a forward has, and how many tokens of each, SGLang
    keeps on the host as well. All tensor-parallel ranks hold the same states; rank 0 writes.
    """

    def __init__(self, order: CaptureOrder) -> None:
        self._order = order
        self._ring: RingWriter | None = None

    def __call__(self, processor: LogitsProcessor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write the forward, if it has requests that are asked for; decoding and SGLang's own dry runs have none."""
        given = SIGNATURE.bind(processor, *args, **kwargs).arguments
        batch = given["logits_metadata"]
        if not batch.forward_mode.is_extend() or not batch.rids:
            return
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        rows, tokens = [], 0
        for rid, position, length in zip(
            batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True
        ):
            if rid.startswith(PREFIX):
                rows.append([int(rid.removeprefix(PREFIX)), tokens, int(position), int(length)])
            tokens += int(length)
        if not rows:
            return
        columns = [*self._captured(given.get("aux_hidden_states")), given["hidden_states"]]
        self._check(columns, given["input_ids"], tokens)
        ring = self._opened(on_gpu=columns[-1].is_cuda)
        slot = ring.take()
        *aux, last = columns
        norms = torch.stack([torch.linalg.vector_norm(c, dim=-1, dtype=torch.float32) for c in columns], dim=-1)
        ring.write(slot, rows, [torch.cat(aux, dim=-1), last.contiguous(), norms, given["input_ids"].contiguous()])

    def _opened(self, *, on_gpu: bool) -> RingWriter:
        """Not before it is needed: a model is made in a mode in which new tensors are the GPU's."""
        if self._ring is None:
            self._ring = RingWriter(self._order.ring)
            if on_gpu:
                self._ring.pin()
        return self._ring

    def _captured(self, aux: Tensor | list[Tensor] | None) -> list[Tensor]:
        """A tensors [N, H]; 0.5.23 has classes that pass them as one [N, A*H]."""
        if aux is None:
            raise RuntimeError("the model passed no captured states to its logits processor")
        return list(aux.chunk(len(self._order.layer_ids), dim=-1)) if isinstance(aux, Tensor) else list(aux)

    def _check(self, columns: list[Tensor], tokens_N: Tensor, tokens: int) -> None:
        last = columns[-1]
        wanted = [(tokens, last.shape[-1], last.dtype)] * (len(self._order.layer_ids) + 1)
        found = [(*column.shape, column.dtype) for column in columns]
        if found != wanted or tokens_N.shape != (tokens,):
            raise RuntimeError(
                f"a forward of {tokens} tokens, captured at layer ids {list(self._order.layer_ids)}, has states of"
                f" shapes {found} and tokens of shape {tuple(tokens_N.shape)}, not {wanted}: an id that this model does"
                " not capture, or tokens that are spread over ranks or padded (data-parallel attention, sequence"
                " parallelism)"
            )
