"""Draft trees drawn by hand: a chain, and a tree of two branches."""

from __future__ import annotations

import pytest
import torch
from sgl_kernel.draft_tree import QLEN_ONLY, build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu
from torch import Tensor


def build(parents: list[list[int]], chosen: list[list[int]], lengths: list[int], topk: int, depth: int, n: int):
    requests = len(lengths)
    mask = torch.zeros(requests * n * n, dtype=torch.bool)
    positions = torch.full((requests * n,), -9)
    index, child, sibling = (torch.full((requests, n), -1) for _ in range(3))
    build_tree_kernel_efficient_cpu(
        torch.tensor(parents), torch.tensor(chosen), torch.tensor(lengths), mask, positions, index, child, sibling,
        topk, depth, n, QLEN_ONLY,
    )  # fmt: skip
    return mask.view(requests, n, n), positions.view(requests, n), index, child, sibling


def test_chains() -> None:
    mask, positions, index, child, sibling = build([[-1, 0, 1]] * 2, [[0, 1, 2]] * 2, [7, 30], topk=1, depth=3, n=4)
    assert torch.equal(mask, torch.ones(2, 4, 4).tril().bool())
    assert positions.tolist() == [[7, 8, 9, 10], [30, 31, 32, 33]]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert child.tolist() == [[1, 2, 3, -1]] * 2
    assert sibling.tolist() == [[-1] * 4] * 2


#       0
#      / \        candidates 0 and 1 follow node 0; 2 and 3 (group 1) follow candidate 0; 4 and 5 (group 2) candidate 1.
#     1   2       Chosen: 0, 1, 2, 3.
#    / \
#   3   4
TREE = {"parents": [[-1, 0, 1]], "chosen": [[0, 1, 2, 3]], "lengths": [10], "topk": 2, "depth": 2, "n": 5}


def test_tree() -> None:
    mask, positions, _, child, sibling = build(**TREE)  # type: ignore[arg-type]
    assert mask[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert positions.tolist() == [[10, 11, 11, 12, 12]]
    assert child.tolist() == [[1, 3, -1, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, 4, -1]]


def verify(drafts: list[list[int]], target: list[list[int]], links: tuple[Tensor, Tensor, Tensor], width: int):
    predicts = torch.full((sum(map(len, drafts)),), -1, dtype=torch.int32)
    accepted = torch.full((len(drafts), width), -1, dtype=torch.int32)
    number = torch.zeros(len(drafts), dtype=torch.int32)
    verify_tree_greedy_cpu(predicts, accepted, number, torch.tensor(drafts), *links, torch.tensor(target))
    return predicts.tolist(), accepted.tolist(), number.tolist()


def test_a_chain_is_accepted_up_to_the_first_other_token() -> None:
    _, _, *links = build([[-1, 0, 1]] * 2, [[0, 1, 2]] * 2, [7, 30], topk=1, depth=3, n=4)
    drafts = [[5, 11, 12, 13], [6, 21, 22, 23]]
    target = [[11, 12, 99, 14], [88, 22, 23, 24]]
    predicts, accepted, number = verify(drafts, target, tuple(links), width=4)  # type: ignore[arg-type]
    assert number == [2, 0]
    assert accepted == [[0, 1, 2, -1], [4, -1, -1, -1]]
    assert predicts == [11, 12, 99, -1, 88, -1, -1, -1]


@pytest.mark.parametrize(
    ("target", "path", "tokens"),
    [
        ([1, 4, 0, 0, 7], [0, 1, 4], [1, 4, -1, -1, 7]),  # the second child of node 1
        ([2, 4, 9, 0, 7], [0, 2], [2, -1, 9, -1, -1]),  # the other branch, which has no children
        ([8, 4, 9, 0, 7], [0], [8, -1, -1, -1, -1]),
    ],
)
def test_a_tree_is_walked_where_the_target_goes(target: list[int], path: list[int], tokens: list[int]) -> None:
    _, _, *links = build(**TREE)  # type: ignore[arg-type]
    predicts, accepted, number = verify([[0, 1, 2, 3, 4]], [target], tuple(links), width=3)  # type: ignore[arg-type]
    assert predicts == tokens
    assert accepted == [path + [-1] * (3 - len(path))]
    assert number == [len(path) - 1]


def test_other_masks_are_refused() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    with pytest.raises(NotImplementedError, match="QLEN_ONLY"):
        build_tree_kernel_efficient_cpu(empty, empty, empty, empty, empty, empty, empty, empty, 1, 1, 2, 0)
