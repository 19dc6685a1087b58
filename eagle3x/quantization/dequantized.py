"""A quantized checkpoint as a transformers model that computes in floating point what engines compute with its codes.

Weights are what their codes stand for. Where a scheme rounds a layer's inputs too (W8A8), they are rounded token by
token before each product. A sum of products of codes is exact in an engine and rounded here: the rest is the same.

Shapes: B sequences, T tokens, I input channels of a layer.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from eagle3x.quantization.stored import quantization_config
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from eagle3x.targets import Target

INT8_MAX = 127
"""Engines divide by this (vLLM csrc/cpu/dnnl_kernels.cpp, SGLang int8_kernel.py); the library would by 127.5."""


def load(target: Target, dtype: torch.dtype, attention: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The target on the CPU, quantized or not, ready to run.

    Raises:
        EagleError: it cannot be loaded, lacks weights, or is quantized by a method that is not read here.
    """
    found = quantization_config(target)
    settings: dict[str, Any] = {}
    try:
        if found:
            if found["quant_method"] != "compressed-tensors":
                raise EagleError(
                    f"target {target.name} is quantized by {found['quant_method']}: only compressed-tensors is read"
                )
            config = AutoConfig.from_pretrained(target.path, trust_remote_code=trust_remote_code)
            config.quantization_config["dequantize"] = True
            settings["config"] = config
        # The library draws two progress bars of its own.
        with contextlib.redirect_stderr(io.StringIO()) if found else contextlib.nullcontext():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                target.path,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                **settings,
            )
            model, info = loaded
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise EagleError(f"target {target.name} in {target.path} cannot be loaded: {error}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise EagleError(f"target {target.name} in {target.path} lacks weights: {', '.join(missing[:5])}")
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _round_inputs_as_engines_do(module)
    return model.eval().requires_grad_(False)


def _round_inputs_as_engines_do(layer: Any) -> None:
    """Where a layer's inputs are rounded to 8-bit integers token by token: with the engines' scale.

    The library's own forward, which rounds inputs too, is right for all other schemes.
    """
    inputs = layer.quantization_scheme.input_activations
    if inputs is None or (inputs.type, inputs.num_bits, inputs.strategy) != ("int", 8, "token") or not inputs.dynamic:
        return
    layer.quantization_enabled = False
    layer.register_forward_pre_hook(lambda _, args: (rounded_tokens(args[0]), *args[1:]))


def rounded_tokens(inputs: Tensor) -> Tensor:
    """[B, T, I]: each token's inputs as multiples of a 127th of the largest of them."""
    scale = inputs.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / INT8_MAX
    return (inputs / scale).round() * scale
