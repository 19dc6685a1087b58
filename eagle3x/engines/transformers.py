"""The transformers engine: the reference, and the embedded default. In process, on every machine.

Nothing here imports torch before `open` loads the target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from eagle3x.engines.base import chains_only
from eagle3x.engines.gpus import compute_capability
from eagle3x.quantization import in_slot, support
from eagle3x.types import Completion, EagleError, HiddenStates, Request, TokenSample

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.config import Hardware
    from eagle3x.engines.base import DrafterPlan, Endpoint
    from eagle3x.engines.config import Job, Slot
    from eagle3x.engines.transformers_model import TargetModel
    from eagle3x.targets import Target

RUNNER = "in_process"
ATTENTION = ("auto", "sdpa", "eager")


def resolved_attention(slot: Slot) -> str:
    """`auto` is sdpa."""
    return "sdpa" if slot.attention.name == "auto" else slot.attention.name


def resolved_dtype(slot: Slot, hardware: Hardware) -> str:
    """`auto` is float32 on the CPU (bfloat16 is slow or absent there) and bfloat16 on a GPU."""
    if slot.backend.dtype != "auto":
        return slot.backend.dtype
    return "float32" if hardware.device == "cpu" else "bfloat16"


def unsupported_layers(target: Target) -> list[str]:
    """Kinds of attention layer, other than full attention, that the target's config names."""
    text = json.loads((target.path / "config.json").read_text())
    kinds = set(text.get("layer_types") or ())
    # Some configs carry a window that their own `use_sliding_window` switches off.
    if not kinds and text.get("sliding_window") and text.get("use_sliding_window", True):
        kinds = {"sliding_attention"}
    return sorted(kinds - {"full_attention"})


class TransformersAdapter:
    """What is known of the engine before it is loaded."""

    name = "transformers"

    def identity(self, slot: Slot, target: Target, hardware: Hardware) -> dict[str, Any]:
        """What decides the floats. `batch_size` too: which rows are computed together moves the last bits."""
        return {
            "engine": self.name,
            "version": version("transformers"),
            "torch": version("torch"),
            "runner": RUNNER,
            "attention": resolved_attention(slot),
            "quantization": slot.quantization.scheme,
            "dtype": resolved_dtype(slot, hardware),
            "kv_cache_dtype": resolved_dtype(slot, hardware),
            "device": hardware.device,
            "sm": compute_capability(hardware) if hardware.device == "cuda" else None,
            "tensor_parallel": slot.backend.tensor_parallel,
            "batch_size": slot.backend.batch_size,
            "batch_invariant": False,
            "chunked_prefill": False,
            "prefix_cache": False,
            **in_slot.identity(slot, target, hardware),
        }

    def refusals(self, slot: Slot, target: Target, hardware: Hardware) -> list[str]:
        """Every reason why this combination cannot run here, each with what would be right."""
        backend = slot.backend
        reasons: list[str] = []
        for package in ("torch", "transformers"):
            try:
                version(package)
            except PackageNotFoundError:
                reasons.append(f"the package {package} is not installed: pip install {package}")
        reasons += support.refusals(self.name, slot, target, hardware)
        if slot.attention.name not in ATTENTION:
            reasons.append(
                f"attention={slot.attention.name}: the transformers engine has {', '.join(ATTENTION[:-1])}"
                f" and {ATTENTION[-1]}"
            )
        if backend.kv_cache_dtype != "auto":
            reasons.append(
                f"backend.kv_cache_dtype={backend.kv_cache_dtype}: the transformers engine keeps keys and values in"
                " the dtype of the model; use auto"
            )
        if backend.tensor_parallel != 1:
            reasons.append(
                f"backend.tensor_parallel={backend.tensor_parallel}: the transformers engine runs on one device; use 1"
            )
        if backend.engine_args:
            reasons.append(
                f"backend.engine_args: the transformers engine takes none, not {', '.join(sorted(backend.engine_args))}"
            )
        if backend.runner != "auto":
            reasons.append(
                f"backend.runner={backend.runner}: the transformers engine has no choice of runners; use auto"
            )
        for field in ("url", "python", "port"):
            if getattr(backend, field) is not None:
                reasons.append(
                    f"backend.{field}={getattr(backend, field)}: the transformers engine runs in this process"
                    " and attaches to nothing; use null"
                )
        if hardware.device == "cuda" and compute_capability(hardware) is None:
            reasons.append("hardware.device=cuda: the driver reports no GPU; use hardware=cpu")
        if hardware.device == "cuda" and hardware.devices is not None and len(hardware.devices) != 1:
            reasons.append(
                f"hardware.devices={list(hardware.devices)}: the transformers engine runs on one device; name one"
            )
        if target.trust_remote_code:
            reasons.append(
                "target.trust_remote_code: the transformers engine needs a model class of transformers itself,"
                " whose layers it knows; use trust_remote_code=false"
            )
        if kinds := unsupported_layers(target):
            reasons.append(
                f"target {target.name} has {', '.join(kinds)} layers: the transformers engine decodes targets"
                " whose layers are all full_attention"
            )
        return reasons

    def drafter_refusals(self, slot: Slot, target: Target, hardware: Hardware, plan: DrafterPlan) -> list[str]:
        """Trees. It serves whatever is trained here, and checks the fed boundaries when it loads a drafter."""
        return chains_only("transformers", plan.speculation)

    def open(self, slot: Slot, target: Target, hardware: Hardware, job: Job) -> TransformersEngine:
        """Load the target.

        Raises:
            EagleError: the target cannot be loaded, or is no model that this engine understands.
        """
        from eagle3x.engines.transformers_model import load

        support.warn(self.name, slot, hardware)
        target = in_slot.in_slot(slot, target, hardware)
        model = load(target, resolved_attention(slot), resolved_dtype(slot, hardware), hardware)
        return TransformersEngine(model, target, slot.backend.batch_size)


class TransformersEngine:
    """A loaded target."""

    can_serve_both = True  # they share its weights
    can_serve_plain = True

    def __init__(self, model: TargetModel, target: Target, batch_size: int) -> None:
        self._model: TargetModel | None = model
        self._target = target
        self._batch_size = batch_size

    @property
    def model(self) -> TargetModel:
        """The loaded model.

        Raises:
            EagleError: the engine is closed.
        """
        if self._model is None:
            raise EagleError(f"the transformers engine of target {self._target.name} is closed")
        return self._model

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answer the requests, `batch_size` at a time; a finished row makes room for the next request.

        Yields completions in order of completion; `top2_gaps` are given for requests at temperature 0.

        Raises:
            EagleError: an empty prompt, or a request longer than the target's context.
        """
        from eagle3x.engines.transformers_decoding import decode

        # Rows of similar length share a batch: attention reads as many slots as the longest row has.
        longest_first = sorted(requests, key=lambda r: len(r.prompt_ids) + r.max_tokens, reverse=True)
        return decode(self.model, self._target, longest_first, self._batch_size, None)

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        """States of each sample, on the CPU: aux [T, A*H] at ascending `boundaries`, last [T, H] post-norm.

        Samples of similar length are computed together, so they come in another order than they went in.

        Raises:
            EagleError: an empty or too long sample, or boundaries that the target does not have.
        """
        from eagle3x.engines.transformers_capture import capture

        return capture(self.model, self._target, samples, boundaries, self._batch_size)

    def serve(self, drafter: Path | None, speculation: Speculation | None) -> Endpoint:
        """Serve the target in process, with the exported drafter in directory `drafter` if one is given.

        Raises:
            EagleError: the drafter cannot be loaded, or does not fit the boundaries that its config makes us feed.
        """
        from eagle3x.engines.transformers_speculation import TransformersEndpoint, load_served_drafter

        if (drafter is None) != (speculation is None):
            raise EagleError("serve needs a drafter and its speculation settings, or neither")
        if drafter is None or speculation is None:
            return TransformersEndpoint(self.model, self._target, None)
        k = speculation.num_speculative_tokens
        return TransformersEndpoint(self.model, self._target, load_served_drafter(drafter, self._target, self.model, k))

    def native_layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """The ids that make this engine capture exactly `boundaries`."""
        from eagle3x.capture import Reader, native_layer_ids

        return native_layer_ids(Reader("transformers"), boundaries, self._target.num_blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model = None
