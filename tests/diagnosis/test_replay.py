"""Replay against a walk worked out by hand and against a step-by-step speculative loop that shares no code with it."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3x.diagnosis import replay as module
from eagle3x.diagnosis.replay import ReplaySample, VerifyStep, counters, replay, replay_detailed, replay_lengths, walk
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.kernels.layout import Layout
from eagle3x.targets import Target
from eagle3x.types import EagleError, Request, SpecCounters, TokenSample

BOUNDARIES = (1, 2, 3)
VOCAB, DRAFT_VOCAB = 7, 5


def test_walk() -> None:
    # Row 0 accepts 2 and jumps to row 3, which accepts none; row 4 accepts 3 and passes the stop.
    assert walk([2, 9, 9, 0, 3, 9]) == [0, 3, 4]
    assert walk([0, 0, 0]) == [0, 1, 2]
    assert walk([3]) == [0]
    assert walk([]) == []


def test_counters() -> None:
    steps = [VerifyStep(4, 2, 0.1), VerifyStep(7, 0, 0.1), VerifyStep(8, 3, 0.1)]
    assert counters(steps, 3) == SpecCounters(3, 9, (2, 2, 1))
    assert counters([], 2) == SpecCounters(0, 0, (0, 0))


def architecture(**variant: bool) -> Architecture:
    flags = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False} | variant
    return Architecture(
        hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=4, rms_norm_eps=1e-5,
        rope_theta=100.0, max_position_embeddings=256, vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB,
        target_hidden_size=16, num_aux=3, **flags,
    )  # fmt: skip


def make_drafter(seed: int, **variant: bool) -> Eagle3:
    torch.manual_seed(seed)
    drafter = Eagle3(architecture(**variant)).double()
    for p in drafter.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.4)
    drafter.d2t.copy_(torch.tensor([0, 0, 1, 1, 2]))  # draft ids 0..4 are target ids 0, 1, 3, 4, 6
    return drafter


class ChainDrafter:
    """Rows are computed by hand-written recursion from parameters alone: row r at position r, tokens as given."""

    def __init__(self, drafter: Eagle3) -> None:
        self.w = {name: p.detach() for name, p in [*drafter.named_parameters(), *drafter.named_buffers()]}
        self.arch = drafter.arch

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.arch.rms_norm_eps) * self.w[name]

    def rope(self, x: Tensor, position: int) -> Tensor:
        """Each head [d] as d/2 complex numbers, turned by position * theta^(-2i/d)."""
        half = self.arch.head_dim // 2
        z = torch.complex(x[:, :half], x[:, half:])
        frequency = torch.tensor([self.arch.rope_theta ** (-i / half) for i in range(half)], dtype=torch.float64)
        turned = z * torch.polar(torch.ones(half, dtype=torch.float64), position * frequency)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def rows(self, hidden: list[Tensor], tokens: list[int]) -> tuple[Tensor, Tensor]:
        """State handed on and draft logits of the last row."""
        a, keys, values = self.arch, [], []
        x = residual = torch.empty(0)
        for position, (h, token) in enumerate(zip(hidden, tokens, strict=True)):
            normed = self.norm(h, "midlayer.hidden_norm.weight")
            residual = normed if a.norm_before_residual else h
            embedded = self.norm(self.w["embed_tokens.weight"][token], "midlayer.input_layernorm.weight")
            x = torch.cat([embedded, normed])
            key = (self.w["midlayer.self_attn.k_proj.weight"] @ x).view(a.num_kv_heads, a.head_dim)
            keys.append(self.rope(key, position))
            values.append((self.w["midlayer.self_attn.v_proj.weight"] @ x).view(a.num_kv_heads, a.head_dim))
        query = (self.w["midlayer.self_attn.q_proj.weight"] @ x).view(a.num_heads, a.head_dim)
        query = self.rope(query, len(hidden) - 1)
        out = []
        for n in range(a.num_heads):
            g = n * a.num_kv_heads // a.num_heads
            scores = torch.stack([query[n] @ key[g] for key in keys]) / math.sqrt(a.head_dim)
            out.append(sum(w * v[g] for w, v in zip(scores.softmax(0), values, strict=True)))
        stream = residual + self.w["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)
        y = self.norm(stream, "midlayer.post_attention_layernorm.weight")
        gate, up = self.w["midlayer.mlp.gate_proj.weight"] @ y, self.w["midlayer.mlp.up_proj.weight"] @ y
        stream = stream + self.w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        normed = self.norm(stream, "norm.weight")
        return (normed if a.norm_output else stream), self.w["lm_head.weight"] @ normed

    def draft(self, aux: Tensor, tokens: list[int], k: int) -> list[int]:
        """k greedy tokens after `tokens`; aux [len(tokens) - 1, A*H] of all but the last of them."""
        hidden = [self.w["fc.weight"] @ row for row in aux]
        known, drafted = tokens[1:], []
        for _ in range(k):
            state, logits = self.rows(hidden, [*known, *drafted])
            best = int(logits.argmax())
            drafted.append(best + int(self.w["d2t"][best]))
            hidden.append(state)
        return drafted


def forward(target: LlamaForCausalLM, tokens: list[int]) -> tuple[list[int], Tensor]:
    with torch.no_grad():
        out = target(torch.tensor([tokens]), output_hidden_states=True)
    return out.logits[0].argmax(-1).tolist(), torch.cat([out.hidden_states[b][0] for b in BOUNDARIES], -1)


def speculate(
    target: LlamaForCausalLM, drafter: ChainDrafter, prompt: list[int], k: int, max_tokens: int, stop: int | None
) -> tuple[list[int], SpecCounters, list[tuple[int, int]]]:
    """Chain speculation as an engine does it, with the target run from scratch at every step."""
    text = [*prompt, forward(target, prompt)[0][-1]]
    result, steps = SpecCounters.zero(k), []

    def done() -> bool:
        output = text[len(prompt) :]
        return len(output) >= max_tokens or stop in output

    while not done():
        _, aux = forward(target, text)
        drafts = drafter.draft(aux[:-1], text, k)
        greedy = forward(target, text + drafts)[0][len(text) - 1 :]
        accepted = 0
        while accepted < k and drafts[accepted] == greedy[accepted]:
            accepted += 1
        result += SpecCounters(1, k, tuple(int(accepted >= i) for i in range(1, k + 1)))
        steps.append((len(text) - 1, accepted))
        text += greedy[: accepted + 1]
    output = text[len(prompt) :]
    end = output.index(stop) + 1 if stop in output else max_tokens
    return output[: min(end, max_tokens)], result, steps


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=256, initializer_range=0.5, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def sample(target: LlamaForCausalLM, name: str, prompt: list[int], response: list[int], more: int) -> ReplaySample:
    """The greedy text, carried on `more` tokens past the response."""
    text = prompt + response
    for _ in range(more):
        text = [*text, forward(target, text)[0][-1]]
    return ReplaySample(name, torch.tensor(text), forward(target, text)[1], len(prompt), len(response))


@pytest.mark.parametrize(
    ("k", "variant"),
    [(3, {}), (1, {}), (5, {}), (3, {"norm_output": True}), (3, {"norm_before_residual": True})],
)
def test_against_a_step_by_step_loop(k: int, variant: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS_PER_FORWARD", 40)  # several forwards
    target, drafter = tiny_model(), make_drafter(3, **variant)
    reference = ChainDrafter(drafter)
    generator = torch.Generator().manual_seed(11)
    samples, expected, expected_steps = [], [], []
    for i in range(7):
        prompt = torch.randint(0, VOCAB, (2 + i,), generator=generator).tolist()
        stop = i % VOCAB if i % 2 else None
        response, counted, steps = speculate(target, reference, prompt, k, max_tokens=2 + i, stop=stop)
        samples.append(sample(target, str(i), prompt, response, more=k + i % 3))
        expected.append(counted)
        expected_steps.append(steps)
    assert replay(drafter, samples, k) == expected
    detailed = replay_detailed(drafter, samples, k)
    assert [[(s.anchor, s.accepted) for s in steps] for steps in detailed] == expected_steps
    assert replay_lengths(drafter, samples, k) == {
        shorter: replay(drafter, samples, shorter) for shorter in range(1, k + 1)
    }
    # The test says something only if drafts were accepted, some of them past the stop.
    accepted = sum((c for c in expected), SpecCounters.zero(k))
    assert 0 < accepted.accepted < accepted.drafted
    assert any(c.verify_steps + c.accepted > s.response_tokens - 1 for c, s in zip(expected, samples, strict=True))


class Scripted(Eagle3):
    """An Eagle3 whose logits at TTT step j and position p are given: the walk over known drafts, worked out by hand."""

    def __init__(self, drafts: list[list[int]], start: int) -> None:
        super().__init__(architecture())
        self.drafts, self.start = drafts, start

    def ttt(self, aux_TF: Tensor, token_ids_T: Tensor, layout: Layout, steps: int) -> Tensor:
        rows = layout.rows.tolist()
        return torch.tensor([[[float(self.drafts[r - self.start][j])] for r in rows] for j in range(steps)])

    def unit_logits(self, unit: Tensor) -> Tensor:
        best = torch.nn.functional.one_hot(unit[:, 0].long(), DRAFT_VOCAB).double()
        return best * 0.25 * (1 + unit)


def test_hand_made_text() -> None:
    """P=2, R=5, k=2; draft ids are token ids here. Rows are positions 1..4, anchors 2..5."""
    text = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])  # prompt 0 1, response 2 3 4 0 1(stop), continuation 2
    drafts = [
        [3, 0],  # anchor 2 (token 2): text goes on 3 4 -> accepts 1, next anchor 4
        [4, 0],  # anchor 3: skipped
        [0, 1],  # anchor 4 (token 4): text goes on 0 1 -> accepts 2, next anchor 7: past the stop at 6
        [1, 2],  # anchor 5: skipped
    ]
    states = torch.zeros(8, 48)
    steps = replay_detailed(Scripted(drafts, start=1), [ReplaySample("x", text, states, 2, 5)], 2)
    # gaps are 0.25 * (1 + id) of the drafts up to the first that is wrong: ids 3, 0 and then 0, 1
    assert steps == [(VerifyStep(2, 1, 0.25), VerifyStep(4, 2, 0.25))]
    assert counters(steps[0], 2) == SpecCounters(2, 4, (2, 1))
    # anchor 2 accepts none, anchor 3 both (4 0): the next anchor is the stop, so the rows 4 and 5 start no step
    drafts[0] = [1, 0]
    steps = replay_detailed(Scripted(drafts, start=1), [ReplaySample("x", text, states, 2, 5)], 2)
    # gaps: draft 1 alone was judged at anchor 2 (0.25 * 2); 4 and 0 at anchor 3
    assert steps == [(VerifyStep(2, 0, 0.5), VerifyStep(3, 2, 0.25))]


def test_one_token_is_no_verify_step() -> None:
    """The prefill yields it."""
    states = torch.zeros(4, 48, dtype=torch.float64)
    short = ReplaySample("stop at once", torch.tensor([1, 2, 3, 4]), states, 3, 1)
    assert replay(make_drafter(0), [short], 3) == [SpecCounters(0, 0, (0, 0, 0))]
    assert replay(make_drafter(0), [], 3) == []


def test_text_must_go_on() -> None:
    tokens, states = torch.tensor([1, 2, 3, 4, 5, 6]), torch.zeros(6, 48, dtype=torch.float64)
    replay(make_drafter(0), [ReplaySample("enough", tokens, states, 2, 2)], 3)
    with pytest.raises(EagleError, match=r"too short: 6 tokens, but replay of 4 drafts needs 7"):
        replay(make_drafter(0), [ReplaySample("too short", tokens, states, 2, 2)], 4)
    with pytest.raises(EagleError, match="states of 5"):
        replay(make_drafter(0), [ReplaySample("x", tokens, states[:5], 2, 2)], 3)
    with pytest.raises(ValueError, match="at least one"):
        replay(make_drafter(0), [], 0)


@pytest.mark.parametrize(("k", "variant"), [(3, {}), (5, {"norm_output": True})])
def test_against_the_reference_engine(k: int, variant: dict[str, bool]) -> None:
    """The transformers engine drafts token by token, batched, with caches, in float32: every counter is the same."""
    from eagle3x.engines.transformers_capture import capture
    from eagle3x.engines.transformers_decoding import decode
    from eagle3x.engines.transformers_model import GROUPED_SDPA, TargetModel
    from eagle3x.engines.transformers_speculation import ServedDrafter

    model = tiny_model().float()
    model.set_attn_implementation(GROUPED_SDPA)
    target = cast(Target, SimpleNamespace(eos_token_ids=(3,), max_position_embeddings=256, name="tiny"))
    engine, drafter = TargetModel(model, "sdpa"), make_drafter(1, **variant).float()
    rng = random.Random(k)
    requests = [
        Request(str(i), tuple(rng.randrange(VOCAB) for _ in range(rng.randint(2, 20))), rng.randint(1, 40))
        for i in range(40)
    ]
    served = {c.id: c for c in decode(engine, target, requests, 8, ServedDrafter(drafter, BOUNDARIES, k))}
    texts = {r.id: r.prompt_ids + served[r.id].token_ids for r in requests}
    more = [Request(r.id, texts[r.id], k, ignore_eos=True) for r in requests]
    texts = {c.id: texts[c.id] + c.token_ids for c in decode(engine, target, more, 8, None)}
    states = capture(engine, target, [TokenSample(i, text) for i, text in texts.items()], BOUNDARIES, 8)
    aux = {s.id: s.aux for s in states}
    samples = [
        ReplaySample(r.id, torch.tensor(texts[r.id]), aux[r.id], len(r.prompt_ids), len(served[r.id].token_ids))
        for r in requests
    ]
    assert replay(drafter, samples, k) == [served[r.id].counters for r in requests]
    finishes = {c.finish for c in served.values()}
    assert finishes == {"stop", "length"}
