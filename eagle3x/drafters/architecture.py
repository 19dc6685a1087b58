"""The shape of an EAGLE-3 drafter, as its `config.json` (`LlamaForCausalLMEagle3`) tells it. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eagle3x.drafters.config_keys import EAGLE_CONFIG, FORMAT, understood
from eagle3x.drafters.rope import scaling
from eagle3x.types import EagleError

MadeBy = Literal["eagle", "specforge", "torchspec", "modelopt", "automodel", "speculators"]
"""Trainers whose numbering of layers is known."""


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
    rope_scaling: Mapping[str, Any] | None = None
    """None: plain RoPE. Else `rope_type` with its values, as in a config (rope.py)."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise EagleError(f"drafter: {self.num_heads} heads cannot share {self.num_kv_heads} key-value heads")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise EagleError(f"drafter: draft_vocab_size {self.draft_vocab_size} must be in 1..{self.vocab_size}")
        if self.norm_before_fc and self.fc_norm:
            raise EagleError("drafter: norm_before_fc and fc_norm exclude each other")

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], made_by: MadeBy | None = None) -> Architecture:
        """Read a drafter's config as both engines do; every key of it is looked at (config_keys.py).

        made_by: the trainer, where its config means another thing than the engines read in it. SpecForge's
        `norm_output` is the norm before the head, which every drafter here has: its next draft step reads the state
        before that norm whatever the key says.

        Raises EagleError if the format is another one, or has a part that this model has not: it would be served
        wrong, not slightly worse.
        """
        config = understood(raw)
        eagle = config.get(EAGLE_CONFIG) or {}
        ids = eagle.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
        hidden, heads, vocab = config["hidden_size"], config["num_attention_heads"], config["vocab_size"]
        norm_output = config.get("norm_output")
        if made_by == "specforge":
            if norm_output is False:
                raise EagleError(
                    "drafter config: norm_output=False is SpecForge's head without a norm; no engine has it"
                )
            norm_output = False
        rope_theta, rope_scaling = scaling(config)
        return cls(
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=config["max_position_embeddings"],
            vocab_size=vocab,
            draft_vocab_size=config.get("draft_vocab_size") or vocab,
            target_hidden_size=config.get("target_hidden_size") or hidden,
            num_aux=config.get("num_aux_hidden_states") or (len(ids) if ids else 3),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
            fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
            norm_output=bool(norm_output),
        )

    def to_config(self) -> dict[str, Any]:
        """The keys of `config.json` that describe the architecture (boundary ids are the export's)."""
        own = {key: value for key, value in asdict(self).items() if key != "rope_scaling" or value is not None}
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
