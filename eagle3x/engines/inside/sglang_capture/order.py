"""What SGLang is told to capture, and the layout of the files that it writes. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "EAGLE3X_SGLANG_CAPTURE"
"""Environment variable that holds the order as JSON: SGLang's scheduler processes inherit it."""

SWITCH = "set_eagle3_layers_to_capture"
"""Method of SGLang's model classes that takes layer ids, in the class's own numbering."""

AUX, LAST, TOKENS = "aux", "last", "tokens"
"""Tensors of a file. For N tokens of one forward, A layers and hidden size H: the captured states [N, A*H] in
ascending order of layers, the final hidden states as the head reads them [N, H], and the token ids [N] int64."""

ROWS = "rows"
"""Metadata of a file, JSON: [[request id, position of its first token here, number of its tokens here], ...], in the
order of the rows. A request has rows in several files if its prefill was cut into chunks."""

PATTERN = "forward-*.safetensors"


@dataclass(frozen=True)
class CaptureOrder:
    """Capture at `layer_ids`, of requests whose id starts with `prefix`, into `folder`."""

    layer_ids: tuple[int, ...]
    folder: Path
    prefix: str

    def to_json(self) -> str:
        """The value of VARIABLE."""
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @staticmethod
    def from_json(text: str) -> CaptureOrder:
        """The inverse."""
        fields = json.loads(text)
        return CaptureOrder(tuple(fields["layer_ids"]), Path(fields["folder"]), fields["prefix"])
