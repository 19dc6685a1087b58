"""What SGLang is told to capture. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

VARIABLE = "EAGLE3X_SGLANG_CAPTURE"
"""Environment variable that holds the order as JSON: SGLang's scheduler processes inherit it."""

SWITCH = "set_eagle3_layers_to_capture"
"""Method of SGLang's model classes that takes layer ids, in the class's own numbering."""

PREFIX = "eagle3x-states-"
"""What the ids of requests whose states are wanted begin with; the sample's number follows. SGLang's warm-up has other
ids."""


@dataclass(frozen=True)
class CaptureOrder:
    """Capture at `layer_ids`, and leave the states in the memory that a `RingWriter` opens at `ring`."""

    layer_ids: tuple[int, ...]
    ring: str

    def to_json(self) -> str:
        """The value of VARIABLE."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> CaptureOrder:
        """The inverse."""
        fields = json.loads(text)
        return CaptureOrder(tuple(fields["layer_ids"]), fields["ring"])
