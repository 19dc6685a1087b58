"""The reference of a target that does not fit: one block at a time from its checkpoint, run on every text, dropped.

The target's own model is built without weights. It is run once for each text with blocks that only note what they are
called with, which gives x_0 and the model's own masks, positions and rotary embeddings; then each block is filled, run
on all texts, and emptied:

    model without weights --- texts --> x_0 and what each block is called with besides
    for b in 0..n-1:   fill block b;  x_{b+1} = block_b(x_b, ..) of each text;  empty block b

So there is never more than one block of it in memory, in float32 and, where a checkpoint stores experts one by one,
twice while they are put together. The embedding comes and goes before the first block. Results are kept on disk.

Shapes: T tokens, H hidden, n blocks, A boundaries asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from eagle3x.capture import Reader, native_layer_ids
from eagle3x.diagnosis.reference import CPU, Reference, named
from eagle3x.diagnosis.reference_cache import ReferenceCache
from eagle3x.diagnosis.stored_weights import StoredWeights
from eagle3x.progress import track
from eagle3x.quantization.dequantized import rounded_tokens
from eagle3x.types import EagleError, HiddenStates, TokenSample

if TYPE_CHECKING:
    from eagle3x.targets import Target

META = torch.device("meta")


class StreamedTarget:
    """Captures as an `Engine` does, for targets that no engine here can hold in float32."""

    def __init__(self, target: Target, device: torch.device = CPU) -> None:
        """device: where a block is while it is run."""
        self._target = target
        self._device = device
        self._kept = ReferenceCache(target, device.type)

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        """States of each sample, on the CPU: aux [T, A*H] at ascending `boundaries`, last [T, H] post-norm, float32.

        All samples go through the target together; what was captured before comes from the disk. Raises EagleError for
        boundaries that the target has not, and for a target that cannot be streamed.
        """
        taps = tuple(native_layer_ids(Reader("transformers"), boundaries, self._target.num_blocks))
        known = {s.id: self._kept.load_states(s.token_ids, taps) for s in samples}
        missing = [s for s in samples if known[s.id] is None]
        if missing:
            captured = self._captured([s.token_ids for s in missing], taps)
            for sample, (aux, last) in zip(missing, captured, strict=True):
                self._kept.keep_states(sample.token_ids, taps, aux, last)
                known[sample.id] = aux, last
        for sample in samples:
            found = known.pop(sample.id)
            assert found is not None
            yield HiddenStates(sample.id, sample.token_ids, *found, "post_norm")

    def references(self, texts: Sequence[Sequence[int]]) -> Iterator[Reference]:
        """All candidates of each text, as `reference.run_reference` finds them, on the CPU as it does.

        Raises EagleError as `capture`.
        """
        kept = ReferenceCache(self._target, CPU.type)
        known = [kept.load_reference(text) for text in texts]
        missing = [i for i, found in enumerate(known) if found is None]
        if missing:
            for i, reference in zip(missing, self._references([texts[i] for i in missing]), strict=True):
                kept.keep_reference(texts[i], reference)
                known[i] = reference
        for found in known:
            assert found is not None
            yield found

    @torch.no_grad()
    def _captured(self, texts: Sequence[Sequence[int]], taps: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        with StoredWeights(self._target) as weights:
            model, hidden = _Skeleton(self._target, weights, self._device), self._target.hidden_size
            # What is kept has its place before the first block comes: small tensors between the large ones of blocks
            # that go would keep the room of those from being used again.
            aux = [torch.empty(len(text), len(taps), hidden) for text in texts]
            last = [torch.empty(len(text), hidden) for text in texts]
            for at in model.run(texts):
                for i, stream in enumerate(at.streams):
                    if at.boundary in taps:
                        aux[i][:, taps.index(at.boundary)] = stream[0]
                    if at.block is None:
                        last[i][:] = model.norm(stream)[0]
            return [(columns.flatten(1), normed) for columns, normed in zip(aux, last, strict=True)]

    @torch.no_grad()
    def _references(self, texts: Sequence[Sequence[int]]) -> list[Reference]:
        with StoredWeights(self._target) as weights:
            model, hidden = _Skeleton(self._target, weights, CPU), self._target.hidden_size
            count = self._target.num_blocks + 1
            places = [[torch.empty(count, 1, len(text), hidden) for text in texts] for _ in range(3)]
            found: list[list[dict[int, Tensor]]] = [[{} for _ in texts] for _ in places]

            def keep(kind: int, text: int, boundary: int, state: Tensor) -> None:
                places[kind][text][boundary] = state.reshape(1, -1, hidden)
                found[kind][text][boundary] = places[kind][text][boundary]

            for at in model.run(texts):
                for i, stream in enumerate(at.streams):
                    keep(0, i, at.boundary, stream)
                    if at.mlp_outputs:
                        keep(1, i, at.boundary, at.mlp_outputs[i])
                    if hasattr(at.block, "input_layernorm"):
                        keep(2, i, at.boundary, at.block.input_layernorm(stream))
            return [
                named(list(streams.values()), mlp_outputs, normed, model.norm)
                for streams, mlp_outputs, normed in zip(*found, strict=True)
            ]


@dataclass(frozen=True)
class _AtBoundary:
    """The streams [1, T, H] of all texts, the MLP outputs of the block before (none if it has no `mlp`), and the block
    that reads them next, which is filled; None at the last boundary."""

    boundary: int
    streams: list[Tensor]
    mlp_outputs: list[Tensor]
    block: Any


_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block is called with besides the stream."""


class _Skeleton:
    """The target's own model, its weights on the meta device but for those that are needed now."""

    def __init__(self, target: Target, weights: StoredWeights, device: torch.device) -> None:
        self._name = target.name
        self._weights = weights
        self._device = device
        self._model: PreTrainedModel = _without_weights(target)
        decoder: Any = self._model.get_decoder()
        self._decoder = decoder
        self.blocks: nn.ModuleList = decoder.layers
        self.norm: nn.Module = decoder.norm
        self._mapping = get_model_conversion_mapping(self._model)
        self._parameters = self._model.state_dict()
        self._stored: dict[str, list[str]] = {}
        for name in weights.names:
            self._stored.setdefault(self._parameter(name), []).append(name)

    def run(self, texts: Sequence[Sequence[int]]) -> Iterator[_AtBoundary]:
        """Boundaries 0..n in their order; the final norm is there from the first one on."""
        outer = [child for name, child in self._decoder.named_children() if name != "layers"]
        for module in outer:
            self._fill(module)
        started = [self._started(text) for text in texts]
        for module in outer:
            if module is not self.norm:
                module.to_empty(device=META)
        streams, mlp_outputs = [stream for stream, _ in started], list[Tensor]()
        for b, block in enumerate(track(list(self.blocks), f"{self._name}, block by block", len(self.blocks))):
            self._fill(block)
            yield _AtBoundary(b, streams, mlp_outputs, block)
            mlp_outputs = []
            hook = _keep_outputs(block, mlp_outputs)
            streams = [
                _stream(block(stream, *calls[b][0], **calls[b][1]))
                for stream, (_, calls) in zip(streams, started, strict=True)
            ]
            if hook is not None:
                hook.remove()
            block.to_empty(device=META)
        yield _AtBoundary(len(self.blocks), streams, mlp_outputs, None)

    def _started(self, text: Sequence[int]) -> tuple[Tensor, list[_Call]]:
        """x_0 [1, T, H] of a text, and what each block is called with.

        Raises EagleError for a decoder that does more than hand the stream from block to block and norm what is left.
        """
        calls: list[_Call] = []
        streams: list[Tensor] = []

        def note(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            streams.append(hidden_states)
            calls.append((args, kwargs))
            return hidden_states

        for block in self.blocks:
            block.forward = note
        try:
            ids = torch.tensor([list(text)], device=self._device)
            last = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            for block in self.blocks:
                del block.forward
        handed_on = len(streams) == len(self.blocks) and all(stream is streams[0] for stream in streams)
        if not handed_on or not torch.equal(self.norm(streams[0]), last):
            raise EagleError(
                f"{self._name} ({type(self._model).__name__}) does more than hand its stream from block to block and"
                " norm what is left: its reference cannot be streamed"
            )
        return streams[0], calls

    def _fill(self, module: nn.Module) -> None:
        """Read the weights below `module`, and compute the buffers that no checkpoint has. EagleError if one lacks."""
        prefix = next(name for name, found in self._model.named_modules() if found is module) + "."
        wanted = {name for name in self._parameters if name.startswith(prefix)}
        state = {name: self._weights.read(name) for key in wanted for name in self._stored.get(key, ())}
        settings = LoadStateDictConfig(
            device_map={"": self._device}, dtype=torch.float32, weight_mapping=cast(Any, self._mapping)
        )
        info, _ = convert_and_load_state_dict_in_model(self._model, state, settings)
        wrong = sorted(map(str, [*(info.missing_keys & wanted), *info.mismatched_keys, *info.conversion_errors]))
        if wrong:
            raise EagleError(f"{self._name}: weights missing or of another shape: {', '.join(wrong[:5])}")
        self._compute_buffers(module)
        if self._weights.rounds_inputs:
            self._round_inputs(module)

    def _round_inputs(self, module: nn.Module) -> None:
        """Of the layers whose weights are stored quantized, as W8A8 kernels do."""
        names = {part: name for name, part in self._model.named_modules()}
        for part in module.modules():
            stored = self._stored.get(f"{names[part]}.weight", [])
            if isinstance(part, nn.Linear) and any(map(self._weights.is_quantized, stored)):
                part.register_forward_pre_hook(lambda _, args: (rounded_tokens(args[0]), *args[1:]))

    def _compute_buffers(self, module: nn.Module) -> None:
        """Such as rotary frequencies: `_init_weights` is where transformers computes them."""
        for part in module.modules():
            names = part._non_persistent_buffers_set & part._buffers.keys()
            for name in names:
                setattr(part, name, torch.full_like(getattr(part, name), float("nan"), device=self._device))
            if names:
                self._model._init_weights(part)
            if any(getattr(part, name).isnan().any() for name in names):
                raise EagleError(
                    f"{self._name}: nothing says how {type(part).__name__} computes {', '.join(sorted(names))}"
                )

    def _parameter(self, name: str) -> str:
        """The model's parameter that a stored weight becomes, or becomes part of."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        prefix = self._model.base_model_prefix
        found, _ = rename_source_key(name, renamings, converters, prefix, self._parameters)
        return found if found in self._parameters else name


def _without_weights(target: Target) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(target.path, local_files_only=True, trust_remote_code=target.trust_remote_code)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            part.__dict__.pop("quantization_config")  # weights come in float32
    transformers_logging.disable_progress_bar()  # it would show one for each block
    with META:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=target.trust_remote_code
        )
    return model.eval().requires_grad_(False)


def _keep_outputs(block: Any, outputs: list[Tensor]) -> Any:
    """A hook that appends what the block's MLP puts out."""
    if not hasattr(block, "mlp"):
        return None
    return block.mlp.register_forward_hook(lambda _module, _args, output: outputs.append(_stream(output)))


def _stream(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
