"""How a running SGLang says that it is set: /server_info has its arguments, as it resolved them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3x.benchmark.config import Speculation
from eagle3x.types import EagleError

ALGORITHM = "EAGLE3"
"""`EAGLE` would feed an EAGLE-3 drafter the last hidden state alone, without a word: every draft is then wrong."""


@dataclass(frozen=True)
class Reported:
    """In SGLang's words. `attention`: backends of prefill and of decode. `kv_tokens`: of its KV cache.

    `algorithm`, `drafter` (its path), what it quantizes that with, and `speculation`: None if it does not speculate.
    """

    version: str
    model_path: str
    served_model_name: str
    device: str
    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    attention: frozenset[str]
    tensor_parallel: int
    prefix_cache: bool
    metrics: bool
    kv_tokens: int
    algorithm: str | None
    drafter: str | None
    drafter_quantization: str | None
    speculation: Speculation | None


def read(info: Mapping[str, Any]) -> Reported:
    """Read the JSON of /server_info.

    Raises:
        EagleError: it lacks something, or it speculates in a way that is none of ours.
    """
    try:
        base, algorithm = info["attention_backend"], info["speculative_algorithm"]
        return Reported(
            version=info["version"],
            model_path=info["model_path"],
            served_model_name=info["served_model_name"],
            device=info["device"],
            dtype=info["dtype"],
            kv_cache_dtype=info["kv_cache_dtype"],
            quantization=info["quantization"],
            attention=frozenset(info[f"{phase}_attention_backend"] or base for phase in ("prefill", "decode")),
            tensor_parallel=info["tp_size"],
            prefix_cache=not info["disable_radix_cache"],
            metrics=info["enable_metrics"],
            kv_tokens=info["max_total_num_tokens"],
            algorithm=algorithm,
            drafter=None if algorithm is None else info["speculative_draft_model_path"],
            drafter_quantization=None if algorithm is None else info["speculative_draft_model_quantization"],
            speculation=None if algorithm is None else _speculation(info),
        )
    except KeyError as error:
        raise EagleError(f"/server_info lacks {error}: no SGLang, or one that reports in another way") from error


def _speculation(info: Mapping[str, Any]) -> Speculation:
    steps, topk, tokens = (info[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens"))
    try:
        nodes = None if topk == 1 and tokens == steps + 1 else tokens
        return Speculation(num_speculative_tokens=steps, topk=topk, num_draft_tokens=nodes)
    except (TypeError, ValueError) as error:
        raise EagleError(
            f"the server speculates by {info['speculative_algorithm']} with speculative_num_steps={steps},"
            f" speculative_eagle_topk={topk}, speculative_num_draft_tokens={tokens}: no chain and no tree of ours"
        ) from error
