"""Every key that a published drafter's config.json may have: used, ignored for a reason, or allowed one value only.

A key that is not here is refused: it may change what the drafter computes, and would be served wrong, not slightly
worse. docs/drafters.md shows this table. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eagle3x.types import EagleError

FORMAT = "LlamaForCausalLMEagle3"
"""Our format's `architectures`: what SpecForge, ModelOpt and vLLM call a drafter of one Llama block."""
SPECULATORS = ("Eagle3DraftModel", "Eagle3Speculator")
"""What the same drafter is called in speculators' format, new and old."""
EAGLE_CONFIG = "eagle_config"


@dataclass(frozen=True)
class Key:
    """What is done with a config key. `values`: with use=`only`, the values that it may have; `why` says what for."""

    use: Literal["used", "ignored", "only"]
    why: str
    values: tuple[Any, ...] = ()


def _used(why: str) -> Key:
    return Key("used", why)


def _ignored(why: str) -> Key:
    return Key("ignored", why)


def _only(*values: Any, why: str) -> Key:
    return Key("only", why, values)


TRAINING = "says how it was trained, changes nothing afterwards"
TEXT = "of text, which the target's tokenizer and generation config decide"
WRITER = "of the program that wrote the file"
ONE_BLOCK = "one block; no engine serves a deeper drafter of this format"
NO_PARALLEL = "drafts one token after the other (P-EAGLE and Medusa heads are other drafters)"
NOT_NULL_FOR_MOE = "the drafter's block is dense"

KEYS: dict[str, Key] = {
    "hidden_size": _used("width of the block"),
    "intermediate_size": _used("width of its MLP"),
    "num_attention_heads": _used("heads of its attention"),
    "num_key_value_heads": _used("default: as many as heads"),
    "head_dim": _used("default: hidden_size / num_attention_heads"),
    "rms_norm_eps": _used("default: 1e-6, transformers' own"),
    "rope_theta": _used("default: 10000, transformers' own"),
    "rope_scaling": _used("linear, llama3 and yarn; others are refused"),
    "rope_parameters": _used("transformers 5's name for rope_theta and rope_scaling together"),
    "max_position_embeddings": _used("the export raises it to the target's"),
    "vocab_size": _used("must be the target's"),
    "draft_vocab_size": _used("default: vocab_size, with the target's head if the checkpoint has none"),
    "target_hidden_size": _used("must be the target's; default: hidden_size"),
    "num_aux_hidden_states": _used("how many boundaries fc reads; default: as many as layer ids, else 3"),
    "norm_before_residual": _used("vLLM reads it, SGLang does not"),
    "norm_before_fc": _used("here or in eagle_config"),
    "fc_norm": _used("one norm for each boundary, before fc"),
    "use_aux_norm": _used("SGLang's older name for fc_norm"),
    "norm_output": _used("as the engines read it; SpecForge means another thing (drafter.made_by=specforge)"),
    "eagle_aux_hidden_state_layer_ids": _used("layer ids; which boundaries they mean depends on who wrote them"),
    EAGLE_CONFIG: _used("its keys are those with `eagle_config.` below"),
    "eagle_config.eagle_aux_hidden_state_layer_ids": _used("as above"),
    "eagle_config.layer_ids": _used("vLLM's runner V2 alone reads it; kept with serve.capture=published"),
    "eagle_config.norm_before_fc": _used("wins over the key of the same name"),
    "eagle_config.use_aux_hidden_state": _only(True, why="EAGLE-3 reads boundaries; false is EAGLE-1"),
    "eagle_config.use_input_layernorm_in_first_layer": _only(True, why="no engine leaves that norm out"),
    "eagle_config.use_last_layernorm": _only(True, why="no engine leaves the final norm out"),
    "eagle_config.use_mtp_layernorm": _only(False, why="no engine has that norm"),
    "eagle_config.next_layer_regular": _only(True, why="of further blocks, of which there are none"),
    "eagle_config.parallel_draft_step": _only(0, 1, why=NO_PARALLEL),
    "eagle_config.parallel_draft_heads_num_layers": _ignored("of parallel drafts, which parallel_draft_step refuses"),
    "architectures": _only(FORMAT, *SPECULATORS, why="MLA (Eagle3DeepseekV2ForCausalLM) and other drafters are other"
                           " models"),
    "model_type": _only("llama", "qwen2", "qwen3", "phi3", "mistral",
                        why="written by trainers whatever the target; the block is Llama's (q_norm and k_norm among"
                        " the weights are refused)"),
    "num_hidden_layers": _only(1, why=ONE_BLOCK),
    "hidden_act": _only("silu", why="the one activation that all readers have"),
    "attention_bias": _only(False, why="SGLang has no biases there"),
    "mlp_bias": _only(False, why="SGLang has no biases there"),
    "bias": _only(False, why="vLLM's fc has no bias"),
    "tie_word_embeddings": _only(False, why="a head over the draft vocabulary is no embedding"),
    "pretraining_tp": _only(1, why="cuts products into parts, which rounds otherwise"),
    "use_sliding_window": _only(False, why="no window in the drafter's attention"),
    "sliding_window": _ignored("only counts with use_sliding_window or layer_types"),
    "layer_types": _only(["full_attention"], why="no window in the drafter's attention"),
    "partial_rotary_factor": _only(1.0, why="the whole head rotates"),
    "quantization_config": _only(why="a quantized drafter is not read; publish it unquantized"),
    "logit_scale": _only(1.0, why="SGLang does not scale logits"),
    "parallel_drafting": _only(False, why=NO_PARALLEL),
    "decoder_sparse_step": _ignored(NOT_NULL_FOR_MOE),
    "max_window_layers": _ignored("only counts with use_sliding_window"),
    "attention_dropout": _ignored(TRAINING),
    "initializer_range": _ignored(TRAINING),
    "embed_requires_grad": _ignored(TRAINING),
    "target_model_type": _ignored("SpecForge's note on the target; the target itself is at hand"),
    "speculators_config": _ignored("speculators' names for the target and for what is drafted at a time"),
    "speculators_model_type": _only("eagle3", why="other types are other drafters"),
    "speculators_version": _ignored(WRITER),
    "transformer_layer_config": _used("speculators' place for the block's keys, which are read as if they stood here"),
    "torch_dtype": _ignored("each tensor has its own"),
    "dtype": _ignored("each tensor has its own"),
    "bos_token_id": _ignored(TEXT),
    "eos_token_id": _ignored(TEXT),
    "pad_token_id": _ignored(TEXT),
    "use_cache": _ignored(TEXT),
    "transformers_version": _ignored(WRITER),
    "name_or_path": _ignored(WRITER),
    "_name_or_path": _ignored(WRITER),
    "_attn_implementation": _ignored("a kernel of training"),
    "_attn_implementation_autoset": _ignored("a kernel of training"),
    "has_no_defaults_at_init": _ignored(WRITER),
    "auto_map": _ignored("names code beside the weights, which is never run"),
    "chunk_size_feed_forward": _ignored(TRAINING),
    "id2label": _ignored("of classifiers"),
    "label2id": _ignored("of classifiers"),
    "problem_type": _ignored("of classifiers"),
    "is_encoder_decoder": _ignored("transformers' general key"),
    "output_attentions": _ignored("transformers' general key"),
    "output_hidden_states": _ignored("transformers' general key"),
    "return_dict": _ignored("transformers' general key"),
}  # fmt: skip

REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")


def understood(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the block's keys at the top level (speculators nests them), once every key is known.

    Raises EagleError naming each key that is unknown, has a value that cannot be served, or is missing.
    """
    flat = flattened(raw)
    problems = [f"lacks {', '.join(missing)}"] if (missing := [k for k in REQUIRED if flat.get(k) is None]) else []
    nested = flat.get(EAGLE_CONFIG) or {}
    named = {**flat, **{f"{EAGLE_CONFIG}.{key}": value for key, value in nested.items()}}
    for name, value in named.items():
        key = KEYS.get(name)
        if key is None:
            problems.append(f"{name}={value!r} is not known: it may change what the drafter computes")
        elif key.use == "only" and value is not None and not _allowed(name, value, key.values):
            allowed = " or ".join(map(repr, key.values)) or "none"
            problems.append(f"{name}={value!r} is not supported, only {allowed}: {key.why}")
    if "architectures" not in raw:
        problems.append(f"lacks architectures: [{FORMAT!r}] is right for a drafter of one Llama block")
    if is_speculators(raw) and "norm_before_residual" not in raw:
        problems.append("lacks norm_before_residual: speculators takes it for false, and vLLM for true")
    if problems:
        raise EagleError(f"drafter config {'; '.join(problems)}")
    return flat


def ignored(raw: Mapping[str, Any]) -> list[str]:
    """The keys of a config that change nothing here."""
    return sorted(key for key in flattened(raw) if key in KEYS and KEYS[key].use == "ignored")


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a config is in speculators' format."""
    return "speculators_model_type" in raw


def flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """speculators' config with what it says of the block beside what it says of the drafter; others as they are."""
    block = raw.get("transformer_layer_config")
    if not isinstance(block, Mapping):
        return dict(raw)
    own = {key: value for key, value in raw.items() if key != "transformer_layer_config"}
    return {**block, **{key: value for key, value in own.items() if value is not None or key not in block}}


def _allowed(name: str, value: Any, allowed: tuple[Any, ...]) -> bool:
    if name == "architectures":
        return isinstance(value, list) and bool(value) and value[0] in allowed
    return value in allowed
