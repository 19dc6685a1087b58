"""Hidden states of given text, with forward hooks at the boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from eagle3x.engines.transformers_batches import by_length, right_padded
from eagle3x.engines.transformers_model import TargetModel
from eagle3x.types import EagleError, HiddenStates, TokenSample

if TYPE_CHECKING:
    from eagle3x.targets import Target


def capture(
    model: TargetModel, target: Target, samples: Sequence[TokenSample], boundaries: Sequence[int], batch_size: int
) -> Iterator[HiddenStates]:
    """See `TransformersEngine.capture`. Checks everything before the first forward."""
    n = model.num_blocks
    taps = tuple(boundaries)
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > n:
        raise EagleError(f"boundaries must be ascending, without repeats, in 0..{n}, not {list(taps)}")
    for sample in samples:
        if not 0 < len(sample.token_ids) <= target.max_position_embeddings:
            raise EagleError(
                f"sample {sample.id} has {len(sample.token_ids)} tokens; target {target.name} reads 1 to"
                f" {target.max_position_embeddings}"
            )
    return _capture(model, samples, taps, batch_size)


@torch.no_grad()  # not inference_mode, whose tensors could never be trained on
def _capture(
    model: TargetModel, samples: Sequence[TokenSample], taps: tuple[int, ...], batch_size: int
) -> Iterator[HiddenStates]:
    for batch in by_length([len(s.token_ids) for s in samples], batch_size):
        ids_BT = right_padded([samples[i].token_ids for i in batch], model.device)
        positions_BT = torch.arange(ids_BT.shape[1], device=model.device).expand_as(ids_BT)
        last_BTH, tapped = model.forward(ids_BT, positions_BT, None, None, taps)
        aux_BTA = torch.cat(tapped, dim=-1).cpu()
        last_BTH = last_BTH.cpu()
        for row, index in enumerate(batch):
            sample = samples[index]
            tokens = len(sample.token_ids)
            # Copies: a view would keep the whole padded batch alive for as long as one sample is.
            aux, last = aux_BTA[row, :tokens].clone(), last_BTH[row, :tokens].clone()
            yield HiddenStates(sample.id, sample.token_ids, aux, last, "post_norm")
