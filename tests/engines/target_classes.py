"""Targets of other model classes, random and as small as their kernels allow: 6 blocks, 128 tokens, float32."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from eagle3x.config import TargetConfig
from eagle3x.targets import Target, resolve

BLOCKS = 6
SHARED = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def llama() -> PreTrainedConfig:
    return transformers.LlamaConfig(**SHARED, head_dim=16)


def qwen2() -> PreTrainedConfig:
    return transformers.Qwen2Config(**SHARED)


def qwen3() -> PreTrainedConfig:
    return transformers.Qwen3Config(**SHARED, head_dim=16)


def qwen3_moe() -> PreTrainedConfig:
    """Every block has 4 experts, of which a token takes 2."""
    return transformers.Qwen3MoeConfig(
        **SHARED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


def deepseek_v3() -> PreTrainedConfig:
    """Latent attention; one dense block, then 4 experts of which a token takes 2, and a shared one."""
    latent = SHARED | {"num_key_value_heads": 4}
    return transformers.DeepseekV3Config(
        **latent, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=32, moe_layer_freq=1, routed_scaling_factor=1.5, norm_topk_prob=True,
        topk_method="noaux_tc", scoring_func="sigmoid",  # what its published config says besides, and SGLang reads
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    )  # fmt: skip


def gpt_oss() -> PreTrainedConfig:
    """Attention with sinks, every second block in a window of 32; 4 experts, of which a token takes 2."""
    return transformers.GptOssConfig(
        **SHARED, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


CLASSES: dict[str, Callable[[], PreTrainedConfig]] = {
    "LlamaForCausalLM": llama,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "GptOssForCausalLM": gpt_oss,
}


def write(name: str, folder: Path, tokenizer_of: Target) -> Target:
    """A random target of this class in `folder`, with the tokenizer of another target."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(CLASSES[name]()).float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 and bool((parameter == 0).all()):  # biases start at nothing
                parameter.normal_(0, 0.2)
            if parameter_name.endswith("sinks"):  # SGLang keeps them in bfloat16
                parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    for file in tokenizer_of.path.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copyfile(file, folder / file.name)
    target = resolve(
        TargetConfig(
            name=name, path=str(folder), wheel=None, hub_id=None, revision=None, trust_remote_code=False,
            aux_layer_ids=(2, 3, 5),
        )
    )  # fmt: skip
    assert target.model_class == name
    return target
