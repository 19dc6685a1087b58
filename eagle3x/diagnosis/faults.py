"""How the planted faults are made: what a wrong exporter, a wrong engine or a wrong client would do.

Shapes: T tokens, A boundaries, H hidden size of the target, D draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3x.diagnosis.attention_weights import KEY, QUERY, VALUE, other_inputs, to_neighbours
from eagle3x.diagnosis.planted import Fault
from eagle3x.drafters.checkpoint import EMBEDDING, WEIGHTS
from eagle3x.types import HiddenStates, Response, TokenSample

if TYPE_CHECKING:
    from eagle3x.engines.base import Engine
    from eagle3x.targets import Target

WRONG_THETA = 10.0
"""A RoPE base that no target has."""
LATE = 2
"""Blocks: ids that were boundaries already, taken for ids that are one less, twice."""


def tamper(directory: Path, faults: Sequence[Fault], target: Target) -> None:
    """Rewrite the exported checkpoint in `directory` with the faults; its hard-linked original stays as it is."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(directory / WEIGHTS)
    draws = torch.Generator().manual_seed(0)
    for fault in faults:
        match fault:
            case "columns_swapped":
                first, *others = tensors["fc.weight"].chunk(config["num_aux_hidden_states"], dim=1)
                tensors["fc.weight"] = torch.cat([*others, first], dim=1)
            case "inputs_swapped":
                tensors |= {name: other_inputs(tensors[name]) for name in (QUERY, KEY, VALUE)}
            case "interleaved_pairs":  # as Meta's own Llama checkpoints have them
                head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
                tensors |= {name: to_neighbours(tensors[name], head_dim) for name in (QUERY, KEY)}
            case "norm_variant":
                config["norm_output"] = not config.get("norm_output", False)
            case "random_embedding":
                scale = target.embedding().std()
                tensors[EMBEDDING] = torch.randn(target.embedding().shape, generator=draws) * scale
            case "embedding_shifted":  # of a tokenizer with one more token, in front
                tensors[EMBEDDING] = target.embedding().roll(1, dims=0)
            case "d2t_missing":
                _map(tensors, torch.arange(len(tensors["d2t"])))
            case "d2t_shifted":
                _map(tensors, _target_ids(tensors).roll(1))
            case "stale_vocabulary":
                chosen = torch.randperm(len(tensors["t2d"]), generator=draws)[: len(tensors["d2t"])]
                _map(tensors, chosen.sort().values)
            case "rope_base":
                config["rope_theta"] = WRONG_THETA
            case "other_target":
                _turn(tensors, config["num_aux_hidden_states"], target, draws)
            case "fc_lost":
                tensors["fc.weight"] = torch.zeros_like(tensors["fc.weight"])
            case "final_norm_lost":  # as a module that was never loaded has it
                tensors["norm.weight"] = torch.ones_like(tensors["norm.weight"])
            case "projections_exchanged":  # as one qkv matrix that was cut in another order
                tensors[KEY], tensors[VALUE] = tensors[VALUE], tensors[KEY]
            case _:
                raise ValueError(f"{fault} is not planted in a checkpoint")
    partial = directory / f"{WEIGHTS}.partial"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})
    partial.replace(directory / WEIGHTS)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def capture(
    engine: Engine, samples: Sequence[TokenSample], boundaries: Sequence[int], faults: Sequence[Fault], target: Target
) -> Iterator[HiddenStates]:
    """What an engine would capture that is wrong in this way, and calls it `boundaries`."""
    late = LATE if "captured_late" in faults else 0
    gain = target.final_norm() if "normed_states" in faults else None
    for states in engine.capture(samples, [b + late for b in boundaries]):
        if gain is None:
            yield replace(states, norms=None)
            continue
        parts = [_normed(part.float(), gain, target.rms_norm_eps) for part in states.aux.chunk(len(boundaries), -1)]
        yield replace(states, aux=torch.cat(parts, dim=-1).to(states.aux.dtype), norms=None)


def without_template(response: Response, target: Target) -> Response:
    """The prompt as a client sends it that does not know the template: the same words without its markers."""
    tokenizer = target.tokenizer
    words = tokenizer.decode(list(response.token_ids[: response.prompt_tokens]), skip_special_tokens=True)
    prompt = tuple(tokenizer.encode(words, add_special_tokens=False))
    return replace(
        response, token_ids=prompt, loss_mask=(False,) * len(prompt), prompt_tokens=len(prompt), response_tokens=0
    )


def _target_ids(tensors: dict[str, Tensor]) -> Tensor:
    return torch.arange(len(tensors["d2t"])) + tensors["d2t"]


def _map(tensors: dict[str, Tensor], ids: Tensor) -> None:
    """Write the vocabulary map whose row i means target token ids[i]."""
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros_like(tensors["t2d"])
    tensors["t2d"][ids] = True


def _turn(tensors: dict[str, Tensor], num_aux: int, target: Target, draws: torch.Generator) -> None:
    """A drafter of a target of the same shapes that has another basis for its hidden states."""
    size = target.hidden_size
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=draws))
    columns = tensors["fc.weight"].float().chunk(num_aux, dim=1)
    tensors["fc.weight"] = torch.cat([column @ basis for column in columns], dim=1)
    tensors[EMBEDDING] = target.embedding() @ basis


def _normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """[T, H]: what the target's final norm makes of it."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain
