"""States are put together from files laid out by hand: 3 samples over 3 forwards, H=2, 2 layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3x.engines.inside.sglang_capture.order import AUX, LAST, ROWS, TOKENS, CaptureOrder
from eagle3x.engines.sglang_states import read_states
from eagle3x.types import EagleError, TokenSample

A, B, C = TokenSample("a", (11, 12, 13)), TokenSample("b", (21,)), TokenSample("c", (31, 32, 33, 34, 35))
Rows = list[tuple[str, int, int]]


def write(folder: Path, number: int, rows: Rows, tokens: list[int]) -> None:
    """A file whose states say which token they are of: aux row t = t + .1, .2, .3, .4; last row t = -t, -t."""
    ids = torch.tensor(tokens)
    aux = ids[:, None] + torch.tensor([0.1, 0.2, 0.3, 0.4])
    last = -ids[:, None].repeat(1, 2).float()
    file = folder / f"forward-77-{number:08d}.safetensors"
    save_file({AUX: aux, LAST: last, TOKENS: ids}, file, metadata={ROWS: json.dumps(rows)})


def test_pieces_of_mixed_forwards_are_joined_by_position(tmp_path: Path) -> None:
    write(tmp_path, 0, [("p-a", 0, 3), ("p-c", 0, 2)], [11, 12, 13, 31, 32])
    write(tmp_path, 1, [("p-c", 2, 2), ("p-b", 0, 1)], [33, 34, 21])
    write(tmp_path, 2, [("p-b", 1, 1), ("p-c", 4, 1)], [99, 35])  # b's own output, decoded in the same forward
    states = list(read_states(tmp_path, "p-", [A, B, C]))
    assert [s.id for s in states] == ["a", "b", "c"]
    for found in states:
        ids = torch.tensor(found.token_ids)
        torch.testing.assert_close(found.aux, ids[:, None] + torch.tensor([0.1, 0.2, 0.3, 0.4]))
        torch.testing.assert_close(found.last, -ids[:, None].repeat(1, 2).float())
        assert found.last_norm == "post_norm"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("forwards", "message"),
    [
        ([([("p-a", 0, 3)], [11, 12, 13])], "no states for 1 of 2 samples, among them b with 0 of 1"),
        ([([("p-b", 0, 1), ("p-a", 1, 2)], [21, 12, 13])], "among them a with 2 of 3"),
        ([([("p-a", 0, 3)], [11, 13, 12])], "a: tokens 0 to 3 are not those"),
        ([([("p-a", 0, 2)], [11, 12]), ([("p-a", 1, 2)], [12, 13])], "a: SGLang wrote states of tokens 1 to 3 twice"),
        ([([("p-a", 0, 3)], [11, 12, 13]), ([("p-a", 0, 3)], [11, 12, 13])], "tokens 0 to 3 twice"),
        ([([("p-z", 0, 1)], [5])], "request p-z, which was not asked for"),
    ],
)
def test_what_does_not_fit_is_an_error(tmp_path: Path, forwards: list[tuple[Rows, list[int]]], message: str) -> None:
    for number, (rows, tokens) in enumerate(forwards):
        write(tmp_path, number, rows, tokens)
    with pytest.raises(EagleError, match=message):
        list(read_states(tmp_path, "p-", [A, B]))


def test_a_half_written_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / ".forward-77-00000000.safetensors.part").write_bytes(b"half")
    write(tmp_path, 1, [("p-b", 0, 1)], [21])
    assert [s.id for s in read_states(tmp_path, "p-", [B])] == ["b"]


def test_an_order_survives_the_environment() -> None:
    order = CaptureOrder((1, 13, 25), Path("some folder"), "p-")
    assert CaptureOrder.from_json(order.to_json()) == order
