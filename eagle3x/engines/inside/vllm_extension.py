"""What a running vLLM says of itself. Mixed into its workers by `worker_extension_cls`; imports nothing of eagle3x."""

from __future__ import annotations

from typing import Any

STATES_ONLY = "CACHE_ONLY_ATTN"
"""The layer that stores captured states: no attention is computed there."""


class Report:
    """`LLM.collective_rpc("eagle3x_report")` calls it in every worker."""

    def eagle3x_report(self) -> dict[str, Any]:
        """Attention backends of the layers, the model runner, dtypes and quantization: as loaded, not as asked."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]  # the worker's
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        layers = config.compilation_config.static_forward_context.values()
        backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
        # V1 lives in worker/{gpu,cpu}_model_runner.py, V2 in worker/{gpu,cpu}/model_runner.py.
        module = type(runner).__module__
        return {
            "attention": sorted(backends - {STATES_ONLY}),
            "runner": "v2" if module.endswith(".model_runner") else "v1",
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "quantization": config.model_config.quantization,
            "kv_cache_dtype": config.cache_config.cache_dtype,
        }
