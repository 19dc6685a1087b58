"""The reference: an independent transformers forward in float32, and all that a wrong capture could yield.

Shapes: T tokens, H hidden, n blocks, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from eagle3x.quantization import dequantized
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eagle3x.targets import Target

Kind = Literal[
    "stream", "final_normed", "input_normed", "block_output", "mlp_output", "before_mlp", "row_before", "row_after"
]

NAMES: dict[Kind, str] = {
    "stream": "boundary {b}",
    "final_normed": "boundary {b} after the final norm",
    "input_normed": "boundary {b} after the next block's input norm",
    "block_output": "what the block before boundary {b} adds, without the stream",
    "mlp_output": "the MLP output before boundary {b}, without the stream",
    "before_mlp": "the stream at boundary {b} without the MLP output before it",
    "row_before": "boundary {b} of the token before",
    "row_after": "boundary {b} of the token after",
}


@dataclass(frozen=True)
class Candidate:
    """Something that could have been captured: a boundary, or what is left of it after a mistake."""

    boundary: int
    kind: Kind

    def __str__(self) -> str:
        return NAMES[self.kind].format(b=self.boundary)


@dataclass(frozen=True)
class Reference:
    """States of one text, float32 on the CPU: states [C, T, H], of `candidates` in the same order."""

    num_blocks: int
    candidates: tuple[Candidate, ...]
    states: Tensor

    def of(self, boundary: int, kind: Kind = "stream") -> Tensor:
        """[T, H]."""
        return self.states[self.candidates.index(Candidate(boundary, kind))]


def reference_states(target: Target, token_ids: Sequence[int]) -> Reference:
    """Load the target in float32, run it once on `token_ids`, and forget it."""
    return run_reference(reference_model(target), token_ids)


def reference_model(target: Target) -> PreTrainedModel:
    """The target in float32, on the CPU; a quantized one as `quantization.dequantized` says."""
    return dequantized.load(target, torch.float32, "eager", target.trust_remote_code)


@torch.inference_mode()
def run_reference(model: PreTrainedModel, token_ids: Sequence[int]) -> Reference:
    """The candidates of a loaded model on one text.

    Boundaries are transformers' own `hidden_states`; the last, which it returns normed, is what its final norm read.
    """
    decoder: Any = model.get_decoder()
    blocks, norm = decoder.layers, decoder.norm
    n = len(blocks)
    before_norm: list[Tensor] = []
    mlp_outputs: dict[int, Tensor] = {}

    def keep_input(_module: nn.Module, args: tuple[Any, ...]) -> None:
        before_norm.append(args[0])

    def keep_output(boundary: int) -> Any:
        def keep(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            mlp_outputs[boundary] = output[0] if isinstance(output, tuple) else output

        return keep

    hooks = [norm.register_forward_pre_hook(keep_input)]
    hooks += [
        block.mlp.register_forward_hook(keep_output(i + 1)) for i, block in enumerate(blocks) if hasattr(block, "mlp")
    ]
    try:
        ids = torch.tensor([list(token_ids)], device=model.device)
        streams = list(decoder(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states)
    finally:
        for hook in hooks:
            hook.remove()
    if (
        len(streams) != n + 1
        or len(before_norm) != 1
        or not torch.allclose(norm(before_norm[0]), streams[n], rtol=1e-4)
    ):
        raise EagleError(
            f"{type(model).__name__}: transformers' hidden_states are not the stream at boundaries 0..{n - 1} and the"
            " normed last one, so this target has no reference"
        )
    streams[n] = before_norm[0]

    found: dict[Candidate, Tensor] = {}
    for b, stream in enumerate(streams):
        found[Candidate(b, "stream")] = stream
        found[Candidate(b, "row_before")] = torch.cat([stream[:, :1], stream[:, :-1]], dim=1)
        found[Candidate(b, "row_after")] = torch.cat([stream[:, 1:], stream[:, -1:]], dim=1)
        found[Candidate(b, "final_normed")] = norm(stream)
        if b < n and hasattr(blocks[b], "input_layernorm"):
            found[Candidate(b, "input_normed")] = blocks[b].input_layernorm(stream)
        if b > 0:
            found[Candidate(b, "block_output")] = stream - streams[b - 1]
        if b in mlp_outputs:
            found[Candidate(b, "mlp_output")] = mlp_outputs[b].reshape(stream.shape)
            found[Candidate(b, "before_mlp")] = stream - found[Candidate(b, "mlp_output")]
    states = torch.stack([state[0].float().cpu() for state in found.values()])
    return Reference(n, tuple(found), states)
