"""What a starting vLLM logs of itself. (HTTP tells none of this outside its development mode, whose other endpoints let
anyone on the machine call into the workers.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from eagle3x.types import EagleError

# Read in vLLM 0.26.0 and 0.32.0. Where: v1/engine/core.py (`engine`), VllmConfig.__str__ in config/vllm.py (what the
# line of `engine` says, each a single match), v1/worker/*_worker.py (`runner`), v1/worker/gpu_model_runner.py and
# v1/worker/gpu/spec_decode/eagle/eagle3_utils.py (`aux_layers`), and the layers' extra_repr (`attention`), which
# VLLM_LOG_MODEL_INSPECTION=1 prints of each model as it was loaded, the target first.
ENGINE = re.compile(r"Initializing a V1 LLM engine \(v(?P<version>\S+)\) with config: (?P<config>.*)")
DTYPE = re.compile(r", dtype=(?:torch\.)?(\w+),")
QUANTIZATION = re.compile(r", quantization=([^,]+),")
TENSOR_PARALLEL = re.compile(r", tensor_parallel_size=(\d+),")
KV_CACHE_DTYPE = re.compile(r", kv_cache_dtype=([^,]+),")
SPECULATION = re.compile(r", speculative_config=SpeculativeConfig\(method='(\w+)', .*?num_spec_tokens=(\d+)\)")
RUNNER_V2 = "Using V2 Model Runner"
AUX_LAYERS = re.compile(r"Using (?:Eagle3 )?auxiliary layers from (?:speculative config|config|model): \(([\d, ]*)\)")
MODEL = "vLLM model structure:"
ATTENTION = re.compile(r"\bnum_kv_heads=.*\bbackend=(\w+)")
# A layer names the class that computes, not the backend.
BACKENDS = {
    "CPU_ATTN": "CPUAttentionBackendImpl",
    "CPU_MLA": "CPUMLAImpl",
    "AMX_MLA": "AMXMLAImpl",
    "FLASH_ATTN": "FlashAttentionImpl",
    "FLASHINFER": "FlashInferImpl",
    "TRITON_ATTN": "TritonAttentionImpl",
    "FLEX_ATTENTION": "FlexAttentionImpl",
    "FLASH_ATTN_MLA": "FlashAttnMLAImpl",
    "FLASHINFER_MLA": "FlashInferMLAImpl",
    "FLASHMLA": "FlashMLAImpl",
    "CUTLASS_MLA": "CutlassMLAImpl",
    "TRITON_MLA": "TritonMLAImpl",
}


@dataclass(frozen=True)
class Logged:
    """What the log says, in vLLM's words.

    `attention`: backends of the target's layers. `speculation`: method and number of speculative tokens. `aux_layers`:
    the boundaries fed to the drafter; None if it fell back on its default without a word (runner V1).
    """

    version: str
    runner: Literal["v1", "v2"]
    attention: frozenset[str]
    dtype: str
    quantization: str | None
    tensor_parallel: int
    kv_cache_dtype: str
    speculation: tuple[str, int] | None
    aux_layers: tuple[int, ...] | None


def read(log: str) -> Logged:
    """Read the log of one server, from its start until it was ready.

    Raises:
        EagleError: a line that every known version writes is missing.
    """
    engine = ENGINE.search(log)
    if engine is None:
        raise EagleError("vLLM's log does not say how its engine was configured: this version logs in another way")
    config = f", {engine['config']}"
    quantization = _field(QUANTIZATION, config)
    speculation = SPECULATION.search(config)
    layers = {match[1] for match in AUX_LAYERS.finditer(log)}
    if len(layers) > 1:
        raise EagleError(f"vLLM's workers feed their drafters different layers: {' and '.join(sorted(layers))}")
    return Logged(
        version=engine["version"],
        runner="v2" if RUNNER_V2 in log else "v1",
        attention=_attention(log),
        dtype=_field(DTYPE, config),
        quantization=None if quantization == "None" else quantization.strip("'"),
        tensor_parallel=int(_field(TENSOR_PARALLEL, config)),
        kv_cache_dtype=_field(KV_CACHE_DTYPE, config),
        speculation=None if speculation is None else (speculation[1], int(speculation[2])),
        aux_layers=tuple(map(int, re.findall(r"\d+", layers.pop()))) if layers else None,
    )


def _field(pattern: re.Pattern[str], config: str) -> str:
    found = pattern.search(config)
    if found is None:
        raise EagleError(f"vLLM's log of its configuration has no match for {pattern.pattern}: it has another form")
    return found[1]


def _attention(log: str) -> frozenset[str]:
    """Backends of the layers of the model that was loaded first; a class without a known backend names itself."""
    _, *models = log.split(MODEL)
    names = {implementation: backend for backend, implementation in BACKENDS.items()}
    return frozenset(names.get(found[1], found[1]) for found in ATTENTION.finditer(models[0] if models else ""))
