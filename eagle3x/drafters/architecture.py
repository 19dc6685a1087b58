"""The shape of an EAGLE-3 drafter, as its `config.json` (`LlamaForCausalLMEagle3`) tells it. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eagle3x.types import EagleError

FORMAT = "LlamaForCausalLMEagle3"


@dataclass(frozen=True)
class Architecture:
    """One Llama-style block over fused boundaries, with a head over the draft vocabulary.

    The four variants carry the names, and follow the maths, of vLLM's and SGLang's `llama_eagle3.py`:
    `norm_before_residual`: the residual is the normed hidden state (SGLang ignores this key);
    `norm_before_fc`: one norm over the concatenated boundaries (`input_norm`);
    `fc_norm`: one norm for each boundary (`fc_norm.<j>`);
    `norm_output`: the next draft step reads the state after the final norm instead of before it (EAGLE-3.1).
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_aux: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise EagleError(f"drafter: {self.num_heads} heads cannot share {self.num_kv_heads} key-value heads")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise EagleError(f"drafter: draft_vocab_size {self.draft_vocab_size} must be in 1..{self.vocab_size}")
        if self.norm_before_fc and self.fc_norm:
            raise EagleError("drafter: norm_before_fc and fc_norm exclude each other")

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Architecture:
        """Read a drafter's config as both engines do.

        Raises EagleError if the format is another one, or has a part that this model has not: it would be served
        wrong, not slightly worse.
        """
        _refuse_what_differs(raw)
        eagle = raw.get("eagle_config") or {}
        ids = eagle.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids")
        hidden, heads, vocab = raw["hidden_size"], raw["num_attention_heads"], raw["vocab_size"]
        return cls(
            hidden_size=hidden,
            intermediate_size=raw["intermediate_size"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(_rope(raw).get("rope_theta") or raw.get("rope_theta") or 10000.0),
            max_position_embeddings=raw["max_position_embeddings"],
            vocab_size=vocab,
            draft_vocab_size=raw.get("draft_vocab_size") or vocab,
            target_hidden_size=raw.get("target_hidden_size") or hidden,
            num_aux=raw.get("num_aux_hidden_states") or (len(ids) if ids else 3),
            norm_before_residual=bool(raw.get("norm_before_residual", False)),
            norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
            fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm", False)),
            norm_output=bool(raw.get("norm_output", False)),
        )

    def to_config(self) -> dict[str, Any]:
        """The keys of `config.json` that describe the architecture (boundary ids are the export's)."""
        own = asdict(self)
        return {
            "architectures": [FORMAT],
            "model_type": "llama",
            "hidden_act": "silu",
            "num_hidden_layers": 1,
            "num_attention_heads": own.pop("num_heads"),
            "num_key_value_heads": own.pop("num_kv_heads"),
            "num_aux_hidden_states": own.pop("num_aux"),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **own,
        }


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """RoPE parameters under either of the names that transformers gave them."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _refuse_what_differs(raw: Mapping[str, Any]) -> None:
    required = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    missing = [key for key in required if raw.get(key) is None]
    if missing:
        raise EagleError(f"drafter config lacks {', '.join(missing)}")
    rope_type = _rope(raw).get("rope_type") or _rope(raw).get("type") or "default"
    wrong = {
        "architectures": (raw.get("architectures") or [None])[0] != FORMAT,
        "num_hidden_layers": raw.get("num_hidden_layers", 1) != 1,
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "bias": bool(raw.get("bias")),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings")),
        "rope_parameters": rope_type != "default",
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            shown = _rope(raw) if key == "rope_parameters" else raw.get(key)
            raise EagleError(
                f"drafter config: {key}={shown!r} is not supported: a drafter is {FORMAT} with one"
                " Llama block (silu, no biases, plain RoPE, a head of its own)"
            )
