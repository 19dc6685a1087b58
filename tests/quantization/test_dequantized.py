"""A quantized checkpoint as a float model: against weights that are unpacked here, and inputs rounded by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from eagle3x.quantization import dequantized, rounding
from eagle3x.targets import Target
from eagle3x.types import EagleError

IDS = torch.tensor([[17, 40, 9, 22, 3, 99, 64, 31]])


def unpacked(parts: dict[str, Tensor]) -> Tensor:
    """Weights from codes: 8-bit ones as they are, 4-bit ones from the lowest bits of each word on."""
    if "weight" in parts:
        codes = parts["weight"].float()
    else:
        words = parts["weight_packed"].to(torch.int64)
        codes = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], -1).flatten(1) - 8
    scale = parts["weight_scale"].float()
    return codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)


def by_hand(target: Target, directory: Path, inputs: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits of the plain target with its weights and every layer's inputs replaced."""
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32, attn_implementation="eager").eval()
    stored = load_file(directory / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            parts = {k.removeprefix(f"{name}."): v for k, v in stored.items() if k.startswith(f"{name}.")}
            module.weight.data = unpacked(parts)
            module.register_forward_pre_hook(lambda _, args: (inputs(args[0]),))
    with torch.inference_mode():
        return model(IDS).logits


def rounded_to_127ths(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale) * scale


def rounded_to_e4m3(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize(
    ("scheme", "inputs"), [("int8", rounded_to_127ths), ("int4", lambda x: x), ("fp8", rounded_to_e4m3)]
)
def test_it_computes_what_codes_and_rounded_inputs_say(
    scheme: str, inputs: Callable[[Tensor], Tensor], tiny_target: Target, tmp_path: Path
) -> None:
    rounding.write(tiny_target.path, scheme, tmp_path / scheme)
    model = dequantized.load(replace(tiny_target, path=tmp_path / scheme), torch.float32, "eager")
    with torch.inference_mode():
        logits = model(IDS).logits
    torch.testing.assert_close(logits, by_hand(tiny_target, tmp_path / scheme, inputs), rtol=1e-5, atol=1e-5)
    plain = dequantized.load(tiny_target, torch.float32, "eager")
    with torch.inference_mode():
        assert (logits - plain(IDS).logits).norm() > 0.01 * logits.norm()  # rounding is seen in the logits


def test_a_tokens_inputs_are_127ths_of_its_largest() -> None:
    tokens = torch.tensor([[[254.0, -3.1, 1.0, 0.9], [0.0, 0.0, 0.0, 0.0]]])
    assert dequantized.rounded_tokens(tokens).tolist() == [[[254.0, -4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]


def test_what_is_not_read(tiny_target: Target, tmp_path: Path, quantized_copy: Callable[..., Target]) -> None:
    with pytest.raises(EagleError, match="quantized by awq: only compressed-tensors is read"):
        dequantized.load(quantized_copy(tmp_path, {"quant_method": "awq", "bits": 4}), torch.float32, "eager")
