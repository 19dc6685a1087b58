"""Every SGLang model class that can capture for EAGLE-3, as a subclass of the same name that does.

SGLang captures inside its models, where it also knows when a block's output is a partial sum of tensor-parallel ranks
or still lacks its residual; hooks on blocks would see neither. It switches that on by `set_eagle3_layers_to_capture`,
but in serving with a drafter only. So these classes switch it on themselves, and read what their logits processor is
given: the captured states and the final hidden states of all tokens of the forward, whatever the batch is made of.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.models.registry import import_model_classes
from torch import nn

from .forward_hook import ForwardHook
from .order import SWITCH, VARIABLE, CaptureOrder

ORDER = CaptureOrder.from_json(os.environ[VARIABLE])


def capturing(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `base`, of its name, that captures as ORDER says."""

    @functools.wraps(base.__init__)  # SGLang's loader reads the signature
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        base.__init__(self, *args, **kwargs)
        getattr(self, SWITCH)(list(ORDER.layer_ids))
        processors = [module for module in self.modules() if isinstance(module, LogitsProcessor)]
        if not processors:
            raise RuntimeError(f"{base.__name__} has no logits processor: its states cannot be captured here")
        hook = ForwardHook(ORDER)
        for processor in processors:
            processor.register_forward_pre_hook(hook, with_kwargs=True)

    return type(base.__name__, (base,), {"__init__": __init__, "__module__": __name__, "__doc__": base.__doc__})


EntryClass = [capturing(base) for base in import_model_classes("sglang.srt.models").values() if hasattr(base, SWITCH)]
