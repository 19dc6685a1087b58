"""Draft trees: how they are laid out for verification, and which path the target accepts.

A tree has n nodes per request: node 0 is the last verified token, nodes 1..n-1 are drafts. Nodes are linked by their
first child (`retrieve_next_token`) and next sibling (`retrieve_next_sibling`), -1 for none; `retrieve_index` is a
node's row among all B*n rows. A chain is the tree in which node i+1 is the only child of node i.
"""

from __future__ import annotations

import torch
from torch import Tensor

QLEN_ONLY = 1
"""SGLang's `TreeMaskMode` in which a mask is [n, n] per request, without the tokens before; the one it uses on CPUs."""


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Lay out the drafts that were selected among all candidates; the tensors from `tree_mask` on are written.

    Args:
        parent_list: [B, .], for each group of topk candidates the candidate that they follow (group 0: node 0).
        selected_index: [B, n-1], the candidates that became nodes 1..n-1; candidate c is in group c // topk.
        verified_seq_len: [B], tokens of each request before node 0.
        tree_mask: bool [B*n*n], node i attends to node j: its ancestors and itself.
        positions: [B*n], position of each node in the text.
        retrieve_index: [B, n].
        retrieve_next_token: [B, n].
        retrieve_next_sibling: [B, n].
        topk: candidates per group.
        depth: drafting steps, the longest path from node 0.
        draft_token_num: n.
        tree_mask_mode: must be QLEN_ONLY.
    """
    if int(tree_mask_mode) != QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {tree_mask_mode}: SGLang uses {QLEN_ONLY} (QLEN_ONLY) on CPUs")
    n = draft_token_num
    requests = verified_seq_len.numel()
    masks = tree_mask.view(requests, n, n)
    index = retrieve_index.view(requests, n)
    index.copy_(torch.arange(requests * n).view(requests, n))
    groups = parent_list.tolist() if parent_list.numel() else [[]] * requests
    for request, (length, chosen) in enumerate(zip(verified_seq_len.tolist(), selected_index.tolist(), strict=True)):
        parents = [None, *(_parent(c // topk, groups[request], chosen) for c in chosen)]
        first_child, next_sibling = [-1] * n, [-1] * n
        for node in range(n - 1, 0, -1):
            parent = parents[node]
            if parent is not None:
                next_sibling[node], first_child[parent] = first_child[parent], node
        retrieve_next_token.view(requests, n)[request] = torch.tensor(first_child)
        retrieve_next_sibling.view(requests, n)[request] = torch.tensor(next_sibling)
        for node in range(n):
            path = _path(node, parents, depth)
            row = torch.zeros(n, dtype=masks.dtype)
            row[[0, *path]] = 1
            masks[request, node] = row
            positions.view(requests, n)[request, node] = length + len(path)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree from node 0 along the children that the target would have written itself.

    Written: `predicts` [B*n], the target's token after each node of the path; `accept_index` [B, .], the rows of the
    path's nodes from node 0 on; `accept_token_num` [B], the drafts among them. `candidates` [B, n] are the nodes'
    tokens, `target_predict` [B, n] the target's argmax after each node; the other three as built above (spelled so by
    SGLang).
    """
    wanted = target_predict.flatten().tolist()
    trees = zip(
        candidates.tolist(), retrive_index.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist(),
        strict=True,
    )  # fmt: skip
    for request, (tokens, rows, first_child, next_sibling) in enumerate(trees):
        path, node = [rows[0]], 0
        while len(path) < accept_index.shape[1]:
            node = first_child[node]
            while node != -1 and tokens[node] != wanted[path[-1]]:
                node = next_sibling[node]
            if node == -1:
                break
            path.append(rows[node])
        accept_index[request, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[request] = len(path) - 1
        for row in path:
            predicts[row] = wanted[row]


def _parent(group: int, group_parents: list[int], chosen: list[int]) -> int | None:
    """Node that the group's candidates follow; None if that candidate was not selected."""
    if group == 0:
        return 0
    candidate = group_parents[group]
    return chosen.index(candidate) + 1 if candidate in chosen else None


def _path(node: int, parents: list[int | None], depth: int) -> list[int]:
    """The node and its ancestors below node 0, at most `depth`."""
    path: list[int] = []
    step: int | None = node
    while step and len(path) < depth:
        path.append(step)
        step = parents[step]
    return path
