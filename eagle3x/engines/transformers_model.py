"""A transformers model as the decode loop and the capture see it: blocks, final norm, head, taps at boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import logging as transformers_logging

from eagle3x.engines.transformers_cache import SlotCache
from eagle3x.quantization import dequantized
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from eagle3x.config import Hardware
    from eagle3x.targets import Target

GROUPED_SDPA = "eagle3x_grouped_sdpa"


def _grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """torch's scaled dot product attention that reads grouped key-value heads in place.

    transformers' own `sdpa` copies every key-value head once per query head when there is a mask: with a batch of 64
    rows that copy takes 30 times as long as the attention itself.
    """
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=kwargs.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_SDPA, _grouped_sdpa)


class TargetModel:
    """A loaded target. Legend: B rows, T tokens per row, H hidden, V vocabulary, A taps."""

    def __init__(self, model: PreTrainedModel, attention: str) -> None:
        # Parts that only the model's class declares; `checked` proves that they are what we take them for.
        self.decoder: Any = model.get_decoder()
        self.blocks: nn.ModuleList = self.decoder.layers
        self.norm: nn.Module = self.decoder.norm
        self.head: Any = model.get_output_embeddings()
        self.attention = attention
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._tapped: dict[int, Tensor] = {}

    @property
    def num_blocks(self) -> int:
        """n: boundaries are 0..n."""
        return len(self.blocks)

    def forward(
        self,
        token_ids_BT: Tensor,
        positions_BT: Tensor,
        cache: SlotCache | None,
        length: int | None,
        taps: Sequence[int] = (),
        first_row: int = 0,
    ) -> tuple[Tensor, list[Tensor]]:
        """Post-norm last hidden state [B, T, H], and the stream at each boundary of `taps`, [B, T, H] each.

        `length` None: a prefill, in which row and column are positions. Else each token attends to the first `length`
        slots of its cache row up to its own position.
        """
        if cache is not None:
            cache.aim(first_row, positions_BT, length)
        self._tapped.clear()
        hooks = [self._tap(boundary) for boundary in taps]
        try:
            out = self.decoder(
                input_ids=token_ids_BT,
                attention_mask=self._mask(positions_BT, length),
                position_ids=positions_BT,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        finally:
            for hook in hooks:
                hook.remove()
        tapped = [self._tapped[boundary] for boundary in taps]
        self._tapped.clear()
        return out.last_hidden_state, tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] post-norm to [..., V]."""
        return self.head(hidden)

    def _mask(self, positions_BT: Tensor, length: int | None) -> Tensor | None:
        if length is None:
            if self.attention == "sdpa":
                return None  # _grouped_sdpa is causal without a mask
            length = positions_BT.shape[1]
        slots = torch.arange(length, device=self.device)
        seen = slots <= positions_BT[:, None, :, None]
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min)

    def _tap(self, boundary: int) -> Any:
        """A hook that keeps what block `boundary` reads; for the last boundary, what the final norm reads."""
        module = self.norm if boundary == self.num_blocks else self.blocks[boundary]

        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._tapped[boundary] = args[0] if args else kwargs["hidden_states"]

        return module.register_forward_pre_hook(keep, with_kwargs=True)


def load(target: Target, attention: str, dtype: str, hardware: Hardware) -> TargetModel:
    """Load the target onto its device.

    Raises:
        EagleError: no GPU, weights missing from the checkpoint, or a model without the parts that we tap.
    """
    if hardware.threads is not None:
        torch.set_num_threads(hardware.threads)
    if hardware.device == "cuda" and not torch.cuda.is_available():
        raise EagleError(
            "hardware.device=cuda, but this torch finds no GPU: use hardware=cpu, or a CUDA build of torch"
        )
    index = hardware.devices[0] if hardware.devices else 0
    device = torch.device("cpu") if hardware.device == "cpu" else torch.device("cuda", index)
    transformers_logging.disable_progress_bar()  # one bar per 100 tensors says nothing of the work at hand
    implementation = GROUPED_SDPA if attention == "sdpa" else attention
    model: Any = dequantized.load(target, getattr(torch, dtype), implementation)
    model = model.to(device)
    return checked(model, attention, target.name)


@torch.inference_mode()
def checked(model: PreTrainedModel, attention: str, name: str) -> TargetModel:
    """Wrap a model whose structure is proved by content: stream, final norm and head give its own logits.

    Raises:
        EagleError: the model has other parts, or does more to its logits than its head does (soft caps, scales).
    """
    wrong = EagleError(
        f"target {name} ({type(model).__name__}): the transformers engine needs a decoder with `layers` and `norm`"
        " whose last hidden state times the output embedding is the logits"
    )
    try:
        wrapped = TargetModel(model, attention)
        ids = torch.tensor([[3, 1, 2]], device=model.device).clamp_max(wrapped.head.weight.shape[0] - 1)
        positions = torch.arange(3, device=model.device)[None]
        hidden, (stream,) = wrapped.forward(ids, positions, None, None, taps=(wrapped.num_blocks,))
    except (AttributeError, KeyError, TypeError) as error:
        raise wrong from error
    expected = model(input_ids=ids).logits
    same: Callable[[Tensor, Tensor], bool] = lambda a, b: torch.allclose(a, b, rtol=1e-2, atol=1e-3)  # noqa: E731
    if not same(wrapped.logits(hidden), expected) or not same(wrapped.norm(stream), hidden):
        raise wrong
    return wrapped
