"""The reference: an independent transformers forward in float32, and all that a wrong capture could yield.

Shapes: T tokens, H hidden, n blocks, C candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from eagle3x.engines.captured import available_memory
from eagle3x.quantization import dequantized
from eagle3x.quantization.stored import quantization_config
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eagle3x.targets import Target

CPU = torch.device("cpu")
LOADED_WHOLE = 0.5
"""Share of the free memory that a target in float32 may take."""
ONLY_STREAMED = ("fp8", "mxfp4")
"""`quantization_config.quant_method` of checkpoints that transformers does not load in float32 on a CPU."""

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
    """The reference of one text; see `references`."""
    (found,) = references(target, [token_ids])
    return found


def references(target: Target, texts: Sequence[Sequence[int]]) -> Iterator[Reference]:
    """The reference of each text: the target in float32, loaded whole where it fits, else streamed."""
    if must_stream(target):
        from eagle3x.diagnosis.streamed_reference import StreamedTarget

        yield from StreamedTarget(target).references(texts)
        return
    model = reference_model(target)
    for text in texts:
        yield run_reference(model, text)


def must_stream(target: Target, device: torch.device = CPU) -> bool:
    """Whether the target cannot be loaded whole in float32.

    That is if it would take more than half of the device's free memory (its states, and what else runs here, need
    room too), or if its weights are stored in a way that transformers runs on a GPU alone.
    Raises EagleError for a quantization of which nothing is known.
    """
    from eagle3x.diagnosis.stored_weights import StoredWeights

    with StoredWeights(target) as weights:
        needed = weights.elements() * torch.float32.itemsize
    free = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return quantization_config(target).get("quant_method") in ONLY_STREAMED or needed > LOADED_WHOLE * free


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
    normed = {
        b: block.input_layernorm(streams[b]) for b, block in enumerate(blocks) if hasattr(block, "input_layernorm")
    }
    return named(streams, mlp_outputs, normed, norm)


def named(
    streams: Sequence[Tensor], mlp_outputs: Mapping[int, Tensor], input_normed: Mapping[int, Tensor], norm: nn.Module
) -> Reference:
    """All candidates, from the streams [1, T, H] at boundaries 0..n and, by boundary, the MLP outputs before it and
    what the next block's input norm makes of it, as far as the target's blocks have these parts."""
    found: dict[Candidate, Tensor] = {}
    for b, stream in enumerate(streams):
        found[Candidate(b, "stream")] = stream
        found[Candidate(b, "row_before")] = torch.cat([stream[:, :1], stream[:, :-1]], dim=1)
        found[Candidate(b, "row_after")] = torch.cat([stream[:, 1:], stream[:, -1:]], dim=1)
        found[Candidate(b, "final_normed")] = norm(stream)
        if b in input_normed:
            found[Candidate(b, "input_normed")] = input_normed[b]
        if b > 0:
            found[Candidate(b, "block_output")] = stream - streams[b - 1]
        if b in mlp_outputs:
            found[Candidate(b, "mlp_output")] = mlp_outputs[b].reshape(stream.shape)
            found[Candidate(b, "before_mlp")] = stream - found[Candidate(b, "mlp_output")]
    states = torch.stack([state[0].float().cpu() for state in found.values()])
    return Reference(len(streams) - 1, tuple(found), states)
