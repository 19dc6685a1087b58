"""A safetensors file written from pieces of its tensors, hashed on the way: each byte is touched once.

`safetensors.save_file` wants whole tensors and says nothing of the content, so samples would be joined, written, and
read again for the checksum; on a GPU's states that is the slowest part of capturing them. The format is eight bytes
(the header's length), a JSON header, and the tensors: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

BLOCK_BYTES = 1 << 19
"""Copied, hashed and written together: they stay in a core's own cache between those."""
ALIGNMENT = 8
"""The header is padded with spaces to a multiple of it, as the format's own writer does."""


def write_pieces(file: Path, tensors: Mapping[str, Sequence[Tensor]]) -> str:
    """Write each tensor as its pieces one below the other (same dtype and row shape), and wait for the disk.

    Returns the SHA-256 of the file, hex. Element sizes must not grow from one tensor to the next (alignment).

    Raises:
        ValueError: pieces of one tensor differ in dtype or in the shape of their rows, or there are none.
        OSError: as writing a file does.
    """
    header = _header(tensors)
    content = hashlib.sha256(header)
    block = np.empty(BLOCK_BYTES, np.uint8)
    with file.open("wb", buffering=0) as stream:
        _write_all(stream.fileno(), memoryview(header))
        for pieces in tensors.values():
            for piece in pieces:
                for rows in _bytes(piece, block):
                    content.update(rows)
                    _write_all(stream.fileno(), rows)
        os.fsync(stream.fileno())
    return content.hexdigest()


def _bytes(piece: Tensor, block: NDArray[np.uint8]) -> Iterator[memoryview]:
    """Its elements, row by row; a view is good until the next one, for what is not contiguous is copied to `block`.

    With NumPy: torch would take all cores for each copy. Into one place: fresh memory costs more than the copy.
    """
    import torch

    if piece.dtype is torch.bfloat16:  # which NumPy has not
        piece = piece.view(torch.int16)
    rows = piece.numpy()
    if rows.flags.c_contiguous:
        yield rows.reshape(-1).view(np.uint8).data
        return
    row_bytes = rows[:1].nbytes
    step = max(1, len(block) // row_bytes)
    if row_bytes > len(block):
        block = np.empty(row_bytes, np.uint8)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        copy = block[: part.nbytes].view(rows.dtype).reshape(part.shape)
        np.copyto(copy, part)
        yield copy.reshape(-1).view(np.uint8).data


def _header(tensors: Mapping[str, Sequence[Tensor]]) -> bytes:
    import torch

    names = {
        torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"
    }  # fmt: skip
    entries, end = {}, 0
    for name, pieces in tensors.items():
        kinds = {(piece.dtype, piece.shape[1:]) for piece in pieces}
        if len(kinds) != 1:
            raise ValueError(f"{name}: pieces of one tensor must be alike, not {sorted(map(str, kinds))}")
        ((dtype, row),) = kinds
        start, end = end, end + sum(piece.nbytes for piece in pieces)
        shape = [sum(len(piece) for piece in pieces), *row]
        entries[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_all(descriptor: int, rest: memoryview) -> None:
    """A write may take less than it was given, and takes at most 2 GiB."""
    while rest:
        rest = rest[os.write(descriptor, rest) :]
