"""Inference engines behind one seam (`eagle3x.engines.base`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle3x.types import ConfigError

if TYPE_CHECKING:
    from eagle3x.engines.base import Adapter
    from eagle3x.engines.config import EngineName


def adapter(name: EngineName) -> Adapter:
    """The adapter of the engine called `name`; imports neither torch nor the engine.

    Raises:
        ConfigError: this version of eagle3x has no adapter for that engine.
    """
    match name:
        case "transformers":
            from eagle3x.engines.transformers import TransformersAdapter

            return TransformersAdapter()
        case "vllm":
            from eagle3x.engines.vllm import VllmAdapter

            return VllmAdapter()
        case "sglang":
            raise ConfigError(
                f"backend={name}: this version of eagle3x has no adapter for it;"
                " use backend=transformers or backend=vllm"
            )
