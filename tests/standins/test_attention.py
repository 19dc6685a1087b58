"""The stand-in's attention against a softmax written out, query by query, over keys in order."""

from __future__ import annotations

import math

import pytest
import torch
from sgl_kernel.attention import decode_attention_cpu, extend_attention_cpu
from torch import Tensor

H, G, D, E = 4, 2, 8, 6
SCALE = D**-0.5
POOL = 64


class Requests:
    """Tokens of several requests, keys and values strewn over a pool whose unused slots are NaN."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.tensor(lengths)
        self.keys = [torch.randn(n, G, D, generator=generator) for n in lengths]
        self.values = [torch.randn(n, G, E, generator=generator) for n in lengths]
        self.queries = [torch.randn(n, H, D, generator=generator) for n in lengths]
        self.pool_rows = torch.tensor([2 * i + 1 for i in range(len(lengths))])
        slots = torch.randperm(POOL, generator=generator)[: sum(lengths)].split(lengths)
        self.slots = slots
        unused = next(s for s in range(POOL) if s not in torch.cat(slots).tolist())
        self.table = torch.full((2 * len(lengths) + 1, 40), unused, dtype=torch.int32)
        self.key_buffer = torch.full((POOL, G, D), math.nan)
        self.value_buffer = torch.full((POOL, G, E), math.nan)
        for row, own, keys, values in zip(self.pool_rows, slots, self.keys, self.values, strict=True):
            self.table[row, : len(own)] = own.int()
            self.key_buffer[own], self.value_buffer[own] = keys, values

    def expected(self, request: int, query: int, seen: list[int], sinks: Tensor | None = None) -> Tensor:
        """[H, E]: softmax over the tokens `seen` and a sink, each query head reading the key head of its group."""
        out = torch.zeros(H, E)
        for head in range(H):
            group = head // (H // G)
            weights = [
                math.exp(SCALE * float(self.queries[request][query, head] @ self.keys[request][j, group])) for j in seen
            ]
            whole = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head])))
            for weight, j in zip(weights, seen, strict=True):
                out[head] += weight / whole * self.values[request][j, group]
        return out


def decode(requests: Requests, **changed: object) -> Tensor:
    given: dict[str, object] = {
        "key_scale": 1.0, "value_scale": 1.0, "logit_cap": 0.0, "is_cross_attn": False, "sliding_window": 0,
        "encoder_lens": None, "sinks": None, "key": None, "value": None, "loc": torch.tensor([]),
    }  # fmt: skip
    output = torch.empty(len(requests.lengths), H, E)
    decode_attention_cpu(
        query=torch.stack([q[-1] for q in requests.queries]), key_buffer=requests.key_buffer,
        value_buffer=requests.value_buffer, output=output, attn_logits=torch.empty(0), req_to_token=requests.table,
        req_pool_indices=requests.pool_rows, seq_lens=requests.lengths, sm_scale=SCALE, **(given | changed),
    )  # fmt: skip
    return output


def extend(
    requests: Requests,
    news: list[int],
    tree_mask: Tensor | None,
    is_causal: bool = True,
    sliding_window: int = 0,
    sinks: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
) -> list[Tensor]:
    queries = [q[len(q) - new :] for q, new in zip(requests.queries, news, strict=True)]
    output = torch.empty(sum(news), H, E)
    extend_attention_cpu(
        query=torch.cat(queries), key=key, value=value, output=output, key_buffer=requests.key_buffer,
        value_buffer=requests.value_buffer, key_scale=1.0, value_scale=1.0, req_to_token=requests.table,
        req_pool_indices=requests.pool_rows, seq_lens=requests.lengths, extend_seq_lens=torch.tensor(news),
        extend_start_loc=torch.tensor([0, *news]).cumsum(0)[:-1], max_extend_len=max(news), sm_scale=SCALE,
        logit_cap=0.0, is_cross_attn=False, sliding_window=sliding_window, encoder_lens=None, sinks=sinks,
        tree_mask=tree_mask, is_causal=is_causal,
    )  # fmt: skip
    return list(output.split(news))


def test_decode_reads_each_requests_own_slots() -> None:
    requests = Requests([5, 1, 9])
    output = decode(requests)
    for i, length in enumerate([5, 1, 9]):
        torch.testing.assert_close(output[i], requests.expected(i, length - 1, list(range(length))))


def test_decode_writes_the_new_key_and_value_first() -> None:
    requests = Requests([5, 3])
    last = torch.stack([own[-1] for own in requests.slots])
    key, value = requests.key_buffer[last].flatten(1), requests.value_buffer[last].flatten(1)
    wanted = decode(requests)
    requests.key_buffer[last] = math.nan
    requests.value_buffer[last] = math.nan
    torch.testing.assert_close(decode(requests, key=key, value=value, loc=last), wanted)


@pytest.mark.parametrize("news", [[5, 1, 9], [2, 1, 4], [1, 1, 1]])
def test_extend_is_causal_and_sees_what_was_before(news: list[int]) -> None:
    requests = Requests([5, 1, 9])
    for i, (rows, new) in enumerate(zip(extend(requests, news, None), news, strict=True)):
        before = int(requests.lengths[i]) - new
        for j in range(new):
            torch.testing.assert_close(rows[j], requests.expected(i, before + j, list(range(before + j + 1))))


def test_extend_follows_a_tree_mask_after_the_text_before() -> None:
    requests = Requests([6, 4])
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    chain = torch.ones(3, 3).tril().bool()
    output = extend(requests, [3, 3], torch.cat([tree.flatten(), chain.flatten()]))
    torch.testing.assert_close(output[0][2], requests.expected(0, 5, [0, 1, 2, 3, 5]))
    torch.testing.assert_close(output[0][1], requests.expected(0, 4, [0, 1, 2, 3, 4]))
    torch.testing.assert_close(output[1][2], requests.expected(1, 3, [0, 1, 2, 3]))


def test_extend_without_order_sees_everything() -> None:
    requests = Requests([4])
    (rows,) = extend(requests, [4], None, is_causal=False)
    torch.testing.assert_close(rows[0], requests.expected(0, 0, [0, 1, 2, 3]))


def test_keys_and_values_that_the_pool_does_not_hold_are_read_as_given() -> None:
    """As latent attention computes whole prompts: its pool has other vectors, of another width."""
    requests = Requests([5, 1, 9])
    key, value = (torch.cat(rows).flatten(1) for rows in (requests.keys, requests.values))
    latent = Requests([5, 1, 9], seed=1)
    latent.queries, latent.key_buffer = requests.queries, torch.full((POOL, 1, D + 3), math.nan)
    for i, rows in enumerate(extend(latent, [5, 1, 9], None, key=key, value=value)):
        for j, row in enumerate(rows):
            torch.testing.assert_close(row, requests.expected(i, j, list(range(j + 1))))
    with pytest.raises(NotImplementedError, match="no prefix"):
        extend(latent, [4, 1, 9], None, key=key[:14], value=value[:14])


SINKS = torch.tensor([-1.0, 0.0, 0.5, 2.0])


def test_a_window_and_sinks_in_decoding() -> None:
    requests = Requests([5, 1, 9])
    output = decode(requests, sliding_window=3, sinks=SINKS)
    for i, length in enumerate([5, 1, 9]):
        seen = list(range(max(0, length - 3), length))
        torch.testing.assert_close(output[i], requests.expected(i, length - 1, seen, SINKS))


@pytest.mark.parametrize("news", [[5, 1, 9], [2, 1, 4], [1, 1, 1]])
def test_a_window_and_sinks_in_extending(news: list[int]) -> None:
    requests = Requests([5, 1, 9])
    for i, (rows, new) in enumerate(zip(extend(requests, news, None, True, 3, SINKS), news, strict=True)):
        before = int(requests.lengths[i]) - new
        for j in range(new):
            seen = list(range(max(0, before + j - 2), before + j + 1))
            torch.testing.assert_close(rows[j], requests.expected(i, before + j, seen, SINKS))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"logit_cap": 30.0}, "cap on logits"),
        ({"is_cross_attn": True}, "cross attention"),
        ({"key_scale": 0.5}, "scaled keys"),
    ],
)
def test_what_it_does_not_have_is_refused(changed: dict[str, object], named: str) -> None:
    with pytest.raises(NotImplementedError, match=named):
        decode(Requests([3]), **changed)


def test_both_are_operators_of_torch() -> None:
    assert callable(torch.ops.sgl_kernel.decode_attention_cpu)
    assert callable(torch.ops.sgl_kernel.extend_attention_cpu)
