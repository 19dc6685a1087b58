"""Inference engines behind one seam (`eagle3x.engines.base`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle3x.engines.base import Adapter
    from eagle3x.engines.config import EngineName


def adapter(name: EngineName) -> Adapter:
    """The adapter of the engine called `name`; imports neither torch nor the engine."""
    match name:
        case "transformers":
            from eagle3x.engines.transformers import TransformersAdapter

            return TransformersAdapter()
        case "vllm":
            from eagle3x.engines.vllm import VllmAdapter

            return VllmAdapter()
        case "sglang":
            from eagle3x.engines.sglang import SglangAdapter

            return SglangAdapter()
