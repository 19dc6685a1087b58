"""The drafter against an independent dense reference in float64, written with the explicit full mask."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.kernels import layout
from eagle3x.kernels.layout import layout_of
from eagle3x.types import EagleError

ARCH = Architecture(
    hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=4, rms_norm_eps=1e-5,
    rope_theta=100.0, max_position_embeddings=64, vocab_size=32, draft_vocab_size=8, target_hidden_size=12, num_aux=2,
    norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
)  # fmt: skip
VARIANTS = [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}]


def drafter(**variant: bool) -> Eagle3:
    torch.manual_seed(0)
    model = Eagle3(dataclasses.replace(ARCH, **variant)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    return model


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """RoPE of [heads, 4] as multiplication of complex numbers: pairs are (j, j + 2)."""
    z = torch.complex(x[:, :2], x[:, 2:])
    angle = torch.tensor([1.0, 100.0**-0.5], dtype=torch.float64) * position
    z = z * torch.polar(torch.ones(2, dtype=torch.float64), angle)
    return torch.cat([z.real, z.imag], dim=-1)


def reference_ttt(model: Eagle3, fused: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
    """Normed states of one document. All steps' keys side by side, [T * steps] columns, under one boolean mask."""
    weights = dict(model.named_parameters())
    block = {n.removeprefix("midlayer."): p for n, p in weights.items() if n.startswith("midlayer.")}
    length = fused.shape[0]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    hidden = fused
    for step in range(steps):
        queries = []
        residuals = []
        for i in range(length):
            token = tokens[min(i + 1 + step, length - 1)]
            normed = rms(hidden[i], block["hidden_norm.weight"])
            x = torch.cat([rms(weights["embed_tokens.weight"][token], block["input_layernorm.weight"]), normed])
            queries.append(rotate((block["self_attn.q_proj.weight"] @ x).view(4, 4), i + step))
            keys.append(rotate((block["self_attn.k_proj.weight"] @ x).view(2, 4), i + step))
            values.append((block["self_attn.v_proj.weight"] @ x).view(2, 4))
            residuals.append(normed if model.arch.norm_before_residual else hidden[i])
        mask = torch.zeros(length, len(keys), dtype=torch.bool)
        for i in range(length):
            mask[i, : i + 1] = True  # step 0, causal
            for later in range(1, step + 1):
                mask[i, later * length + i] = True  # its own keys of later steps
        out = []
        for i in range(length):
            heads = []
            for head in range(4):
                k = torch.stack([key[head // 2] for key in keys])
                v = torch.stack([value[head // 2] for value in values])
                scores = (k @ queries[i][head]) / 2.0
                heads.append(torch.softmax(scores.masked_fill(~mask[i], float("-inf")), 0) @ v)
            stream = residuals[i] + block["self_attn.o_proj.weight"] @ torch.cat(heads)
            y = rms(stream, block["post_attention_layernorm.weight"])
            gate = block["mlp.gate_proj.weight"] @ y
            stream = stream + block["mlp.down_proj.weight"] @ (
                gate * torch.sigmoid(gate) * (block["mlp.up_proj.weight"] @ y)
            )
            out.append(stream)
        normed = torch.stack([rms(stream, weights["norm.weight"]) for stream in out])
        hidden = normed if model.arch.norm_output else torch.stack(out)
        states.append(normed)
    return states


def reference_fuse(model: Eagle3, aux: Tensor) -> Tensor:
    weights = dict(model.named_parameters())
    if model.arch.norm_before_fc:
        aux = rms(aux, weights["input_norm.weight"])
    if model.arch.fc_norm:
        aux = torch.cat(
            [rms(aux[:, :12], weights["fc_norm.0.weight"]), rms(aux[:, 12:], weights["fc_norm.1.weight"])], 1
        )
    return aux @ weights["fc.weight"].T


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: next(iter(v), "plain"))
def test_ttt_equals_the_dense_reference_forward_and_backward(variant: dict[str, bool]) -> None:
    model = drafter(**variant)
    lengths = [5, 1, 7]
    generator = torch.Generator().manual_seed(1)
    aux = torch.randn(13, 24, dtype=torch.float64, generator=generator)
    tokens = torch.randint(0, 32, (13,), generator=generator)
    cotangents = [torch.randn(13, 16, dtype=torch.float64, generator=generator) for _ in range(3)]
    for step, cotangent in enumerate(cotangents):
        for end in (5, 6, 13):
            cotangent[max(0, end - 1 - step) : end] = 0.0  # rows that read past their document: in no loss

    def gradients(states: list[Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        sum((s * c).sum() for s, c in zip(states, cotangents, strict=True)).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    got_states = model.ttt(aux, tokens, layout_of(torch.arange(13), lengths), 3)
    states = [state * model.norm.weight for state in got_states]
    got = gradients(states)
    expected: list[list[Tensor]] = [[], [], []]
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        for step, state in enumerate(reference_ttt(model, reference_fuse(model, aux[part]), tokens[part], 3)):
            expected[step].append(state)
        start += length
    wanted = [torch.cat(parts) for parts in expected]
    for state, want, cotangent in zip(states, wanted, cotangents, strict=True):
        valid = cotangent.any(dim=1)
        torch.testing.assert_close(state[valid], want[valid], rtol=1e-11, atol=1e-11)
    want_gradients = gradients(wanted)
    assert got.keys() == want_gradients.keys()
    for name, grad in want_gradients.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_asking_for_some_rows_changes_nothing_for_them() -> None:
    model = drafter()
    generator = torch.Generator().manual_seed(2)
    aux = torch.randn(12, 24, dtype=torch.float64, generator=generator)
    tokens = torch.randint(0, 32, (12,), generator=generator)
    rows = torch.tensor([1, 2, 4, 9, 11])
    every = model.ttt(aux, tokens, layout_of(torch.arange(12), [5, 2, 5]), 3)
    some = model.ttt(aux, tokens, layout_of(rows, [5, 2, 5]), 3)
    for a, b in zip(every, some, strict=True):
        torch.testing.assert_close(a[rows], b, rtol=1e-12, atol=1e-12)


def test_blocks_of_queries_change_neither_states_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    aux = torch.randn(12, 24, dtype=torch.float64, generator=generator)
    tokens = torch.randint(0, 32, (12,), generator=generator)

    def run() -> list[Tensor]:
        model = drafter()
        states = model.ttt(aux, tokens, layout_of(torch.arange(12), [7, 5]), 3)
        states.square().sum().backward()
        return [states.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    whole = run()
    monkeypatch.setattr(layout, "QUERY_BLOCK", 2)
    for a, b in zip(whole, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_blocks_end_at_documents_and_at_the_last_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "KEY_BLOCK", 2)
    made = layout_of(torch.tensor([1, 2, 6]), [4, 2, 3])
    # Rows 1 and 2 are slots 0 and 1 of the first document (rows 0..3), row 6 is slot 2 of the third (rows 6..8).
    assert made.slots.tolist() == [-1, 0, 1, -1, -1, -1, 2, -1, -1]
    assert made.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert sorted(made.query_blocks.tolist()) == [[0, 2, 0], [2, 3, 6]]
    # Nobody looks at row 3, nor at the second document. Row 2, as a key, is seen by itself alone.
    assert sorted(made.key_blocks.tolist()) == [[0, 2, 0, 2], [2, 3, 1, 2], [6, 7, 2, 3]]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: next(iter(v), "plain"))
def test_drafting_with_a_cache_equals_ttt_on_the_drafted_text(variant: dict[str, bool]) -> None:
    """Two sequences of different length; three draft steps; then the next verify's rows overwrite the draft's keys."""
    model = drafter(**variant)
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 32, (2, 12), generator=generator)
    aux = torch.randn(2, 12, 24, dtype=torch.float64, generator=generator)
    fused = model.fuse(aux)
    cache = model.new_cache(2, 16)
    for first, last in [([0, 0], [4, 3]), ([5, 4], [7, 5])]:  # rows of a prefill, then of a verify step
        width = max(b - a + 1 for a, b in zip(first, last, strict=True))
        positions = torch.tensor(first)[:, None] + torch.arange(width)
        index = torch.arange(2)[:, None]
        state = model.step(fused[index, positions], text[index, positions + 1], positions, cache)
        row = torch.tensor(last) - torch.tensor(first)
        state = state[torch.arange(2), row][:, None]
        for draft in range(3):
            for b in range(2):
                length = last[b] + 2 + draft  # the text up to the token that the draft has just read
                rows = layout_of(torch.tensor([last[b]]), [length])
                want = model.unit_logits(model.ttt(aux[b, :length], text[b, :length], rows, 3)[draft, 0])
                torch.testing.assert_close(model.logits(state[b, 0]), want, rtol=1e-10, atol=1e-10)
            if draft < 2:
                position = torch.tensor(last)[:, None] + draft + 1
                state = model.step(state, text[index, position + 1], position, cache)


def test_logits_norm_once_and_map_to_target_ids() -> None:
    state = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    plain, normed = drafter(), drafter(norm_output=True)
    want = rms(state, plain.norm.weight) @ plain.lm_head.weight.T
    torch.testing.assert_close(plain.logits(state), want)
    torch.testing.assert_close(normed.logits(rms(state, normed.norm.weight)), want)
    plain.d2t[:] = torch.tensor([0, 1, 1, 4, 4, 4, 10, 24])
    assert plain.to_target_ids(torch.tensor([0, 1, 3, 7])).tolist() == [0, 2, 7, 31]
    assert plain.target_ids().tolist() == [0, 2, 3, 7, 8, 9, 16, 31]


def test_config_round_trip_and_refusals() -> None:
    for variant in VARIANTS:
        arch = dataclasses.replace(ARCH, **variant)
        assert Architecture.from_config(arch.to_config()) == arch
    for key, value in {
        "attention_bias": True, "num_hidden_layers": 2, "tie_word_embeddings": True, "hidden_act": "gelu",
        "architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    }.items():  # fmt: skip
        with pytest.raises(EagleError, match=key if key != "rope_scaling" else "RoPE of type llama3"):
            Architecture.from_config({**ARCH.to_config(), key: value})
    with pytest.raises(EagleError, match="lacks max_position_embeddings"):
        Architecture.from_config({k: v for k, v in ARCH.to_config().items() if k != "max_position_embeddings"})


def test_the_engines_read_the_nested_keys_first() -> None:
    raw = {
        **ARCH.to_config(),
        "eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]},
    }
    del raw["num_aux_hidden_states"]
    arch = Architecture.from_config(raw)
    assert arch.norm_before_fc
    assert arch.num_aux == 4
