"""Writes the states of each forward to a file, before SGLang answers the requests in it."""

from __future__ import annotations

import inspect
import json
import os
from itertools import count
from typing import Any

import torch
from safetensors.torch import save_file
from sglang.srt.layers.logits_processor import LogitsProcessor
from torch import Tensor

from .order import AUX, LAST, ROWS, TOKENS, CaptureOrder

SIGNATURE = inspect.signature(LogitsProcessor.forward)


class ForwardWriter:
    """A forward pre-hook of a model's logits processor.

    The file is written within the forward: when a request is answered, the states of its tokens are there, and what
    goes wrong ends the engine instead of leaving a gap. All tensor-parallel ranks hold the same states; rank 0 writes.
    """

    def __init__(self, order: CaptureOrder) -> None:
        self._order = order
        self._numbers = count()

    def __call__(self, processor: LogitsProcessor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write the rows of the requests that the order asks for; decoding and SGLang's own dry runs have none."""
        given = SIGNATURE.bind(processor, *args, **kwargs).arguments
        batch = given["logits_metadata"]
        if not batch.forward_mode.is_extend() or not batch.rids:
            return
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        lengths = [int(n) for n in batch.extend_seq_lens_cpu]
        starts = [int(n) for n in batch.extend_prefix_lens_cpu]
        rows = list(zip(batch.rids, starts, lengths, strict=True))
        wanted = [rid.startswith(self._order.prefix) for rid in batch.rids]
        if not any(wanted):
            return
        tensors = {
            AUX: self._captured(given.get("aux_hidden_states")),
            LAST: given["hidden_states"],
            TOKENS: given["input_ids"].long(),
        }
        self._check(tensors, sum(lengths))
        if not all(wanted):
            chosen = torch.repeat_interleave(torch.tensor(wanted), torch.tensor(lengths)).to(tensors[LAST].device)
            tensors = {name: tensor[chosen] for name, tensor in tensors.items()}
            rows = [row for row, asked in zip(rows, wanted, strict=True) if asked]
        self._save({name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, rows)

    def _captured(self, aux: Tensor | list[Tensor] | None) -> Tensor:
        if aux is None:
            raise RuntimeError("the model passed no captured states to its logits processor")
        return aux if isinstance(aux, Tensor) else torch.cat(list(aux), dim=-1)

    def _check(self, tensors: dict[str, Tensor], tokens: int) -> None:
        hidden = tensors[LAST].shape[-1]
        expected = {
            AUX: (tokens, len(self._order.layer_ids) * hidden),
            LAST: (tokens, hidden),
            TOKENS: (tokens,),
        }
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != expected:
            raise RuntimeError(
                f"a forward of {tokens} tokens, captured at layer ids {list(self._order.layer_ids)}, has states of"
                f" shapes {found}, not {expected}: an id that this model does not capture, or tokens that are spread"
                " over ranks or padded (data-parallel attention, sequence parallelism)"
            )

    def _save(self, tensors: dict[str, Tensor], rows: list[tuple[str, int, int]]) -> None:
        # Data-parallel replicas have processes of their own, all of rank 0.
        name = f"forward-{os.getpid()}-{next(self._numbers):08d}.safetensors"
        part = self._order.folder / f".{name}.part"
        save_file(tensors, part, metadata={ROWS: json.dumps(rows)})
        part.replace(self._order.folder / name)
