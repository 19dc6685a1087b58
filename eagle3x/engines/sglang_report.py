"""How a running SGLang says that it is set: /server_info has its arguments, as it resolved them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3x.benchmark.config import Speculation
from eagle3x.types import EagleError

ALGORITHM = "EAGLE3"
"""`EAGLE` would feed an EAGLE-3 drafter the last hidden state alone, without a word: every draft is then wrong."""

LOSSLESS = {
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "speculative_use_rejection_sampling": False,
}
"""SGLang's defaults. Lower thresholds accept more than the target says; rejection sampling draws the drafts, too."""

KV_CACHE_DTYPES = {"bf16": "bfloat16"}
"""SGLang's two names of one."""


@dataclass(frozen=True)
class Reported:
    """In SGLang's words. `attention`: backends of prefill and of decode. `kv_tokens`: of its KV cache.
    `max_running_requests` and `kv_cache_dtype`: as its scheduler has them, once it knows model and memory.

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
    max_running_requests: int
    algorithm: str | None
    drafter: str | None
    drafter_quantization: str | None
    speculation: Speculation | None
    lossless: bool
    """Whether it accepts a draft as often as the target says it, above temperature 0 too."""


def read(info: Mapping[str, Any]) -> Reported:
    """Read the JSON of /server_info.

    Raises:
        EagleError: it lacks something, or it speculates in a way that is none of ours.
    """
    try:
        base, algorithm = info["attention_backend"], info["speculative_algorithm"]
        scheduler = info["internal_states"][0]
        return Reported(
            version=info["version"],
            model_path=info["model_path"],
            served_model_name=info["served_model_name"],
            device=info["device"],
            dtype=info["dtype"],
            kv_cache_dtype=scheduler["kv_cache_dtype"],
            quantization=info["quantization"],
            attention=frozenset(info[f"{phase}_attention_backend"] or base for phase in ("prefill", "decode")),
            tensor_parallel=info["tp_size"],
            prefix_cache=not info["disable_radix_cache"],
            metrics=info["enable_metrics"],
            kv_tokens=info["max_total_num_tokens"],
            max_running_requests=scheduler["effective_max_running_requests_per_dp"],
            algorithm=algorithm,
            drafter=None if algorithm is None else info["speculative_draft_model_path"],
            drafter_quantization=None if algorithm is None else info["speculative_draft_model_quantization"],
            speculation=None if algorithm is None else _speculation(info),
            lossless=all(info.get(name, value) == value for name, value in LOSSLESS.items()),
        )
    except KeyError as error:
        raise EagleError(f"/server_info lacks {error}: no SGLang, or one that reports in another way") from error


@dataclass(frozen=True)
class Asked:
    """What SGLang was told, by its arguments' names, and what must come of it.

    `version` of the installed package; `attention`: backend of prefill and decode; `quantization`: that of the
    checkpoint, or the one made while loading.
    """

    version: str
    attention: str
    quantization: str | None
    arguments: Mapping[str, Any]


def compared(asked: Asked, info: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> what was asked, and what the SGLang runs with whose /server_info is `info`.

    SGLang resolves its arguments against the model, the device and each other (0.5.14: server_args.py `__post_init__`;
    0.5.23: arg_groups/). What changes nothing that is measured is given as asked:

    - `mem_fraction_static`, `page_size`: what they come to is the tokens of KV cache, which are compared. Some kernels
      have one page size alone.
    - `chunked_prefill_size` -1: prompts are computed whole, where the model allows nothing else.
    - `disable_cuda_graph` true where false was asked: slower on both sides, for models that cannot be replayed.
    - `kv_cache_dtype` auto: written as the model's dtype. An 8-bit one that the checkpoint asks for is a change.
    - `quantization` none where the checkpoint is quantized: most classes read it from there and report what was asked.
    - one attention backend for prefill and one for decode, or one for both.

    Raises:
        EagleError: as `read`.
    """
    reported = read(info)
    quantization = asked.quantization
    if reported.quantization is None and "quantization" not in asked.arguments:
        quantization = None
    found = {
        "version": (asked.version.split("+")[0], reported.version.split("+")[0]),
        "attention": ([asked.attention], sorted(reported.attention)),
        "quantization": (quantization, reported.quantization),
        "tokens of KV cache (a smaller backend.batch_size needs fewer)": (
            asked.arguments["max_total_tokens"],
            reported.kv_tokens,
        ),
    }
    effective = {"kv_cache_dtype": reported.kv_cache_dtype, "max_running_requests": reported.max_running_requests}
    for name, value in asked.arguments.items():
        if name in found or name.endswith("attention_backend"):
            continue
        runs = effective.get(name, info.get(name, "nothing of that name"))
        found[name] = (value, value if _meant(name, value, runs, reported.dtype) else runs)
    return found


def _meant(name: str, asked: Any, runs: Any, dtype: str) -> bool:
    """Whether an argument means what was asked."""
    match name:
        case "mem_fraction_static" | "page_size":
            return True
        case "chunked_prefill_size":
            return runs in (asked, -1)
        case "disable_cuda_graph":
            return runs is True or runs == asked
        case "kv_cache_dtype" if asked == "auto":
            return runs in ("auto", dtype)
        case "kv_cache_dtype":
            return KV_CACHE_DTYPES.get(runs, runs) == KV_CACHE_DTYPES.get(asked, asked)
        case _:
            return runs == asked


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
