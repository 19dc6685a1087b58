"""The capture probe on planted tensors: each mistake must be named, on a random Llama and on the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eagle3x.diagnosis.probe import CaptureVerdict, identify, judge, probe_capture
from eagle3x.diagnosis.reference import Candidate, Kind, Reference, run_reference
from eagle3x.engines.base import Engine
from eagle3x.targets import Target
from eagle3x.types import EagleError, HiddenStates, LastNorm, TokenSample

KINDS = {
    "stream", "final_normed", "input_normed", "block_output", "mlp_output", "before_mlp", "row_before", "row_after",
}  # fmt: skip


def tiny_llama() -> LlamaForCausalLM:
    """8 blocks; norm weights are random, so that no two norms are the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, p in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def tiny() -> Reference:
    return run_reference(tiny_llama(), torch.arange(48) * 7 % 64)


@pytest.fixture(scope="module")
def real(smollm2: Target) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32).eval()
    text = "Write a short story about a lighthouse keeper who finds a letter in a bottle. The letter says: " * 3
    return run_reference(model, smollm2.tokenizer(text)["input_ids"][:48])


def noisy(states: Tensor, amount: float) -> Tensor:
    """bf16 rounding on top of a relative error of `amount` per token."""
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    scaled = noise * states.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    return (states + amount * scaled).to(torch.bfloat16)


def verdict(
    reference: Reference, columns: Sequence[Tensor], asked: Sequence[int], last: Tensor | None = None,
    last_norm: LastNorm = "post_norm",
) -> CaptureVerdict:  # fmt: skip
    if last is None:
        last = reference.of(reference.num_blocks, "final_normed")
    return judge(torch.cat(list(columns), 1), last, last_norm, asked, reference)


def test_the_reference_is_the_model(tiny: Reference) -> None:
    """Against a forward written out here, block by block."""
    model = tiny_llama()
    ids = (torch.arange(48) * 7 % 64)[None]
    with torch.no_grad():
        x = model.model.embed_tokens(ids)
        rotary = model.model.rotary_emb(x, torch.arange(48)[None])
        mask = torch.full((48, 48), float("-inf")).triu(1)[None, None]
        for b, block in enumerate(model.model.layers):
            torch.testing.assert_close(tiny.of(b), x[0])
            torch.testing.assert_close(tiny.of(b, "input_normed"), block.input_layernorm(x)[0])
            mixed = x + block.self_attn(block.input_layernorm(x), rotary, mask)[0]
            mlp = block.mlp(block.post_attention_layernorm(mixed))
            torch.testing.assert_close(tiny.of(b + 1, "before_mlp"), mixed[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(tiny.of(b + 1, "mlp_output"), mlp[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(tiny.of(b + 1, "block_output"), (mixed + mlp - x)[0], rtol=1e-4, atol=1e-4)
            x = mixed + mlp
        torch.testing.assert_close(tiny.of(8), x[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tiny.of(8, "final_normed"), model.model.norm(x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("name", ["tiny", "real"])
def test_every_candidate_is_named(name: str, noise: float, request: pytest.FixtureRequest) -> None:
    """Each of the candidates, planted where another boundary was wanted."""
    reference: Reference = request.getfixturevalue(name)
    n = reference.num_blocks
    assert {c.boundary for c in reference.candidates if c.kind == "stream"} == set(range(n + 1))
    assert {c.kind for c in reference.candidates} == KINDS
    step = 1 if name == "tiny" else 5  # 5 and the 8 kinds of a boundary have no common factor: all kinds are met
    for candidate, states in list(zip(reference.candidates, reference.states, strict=True))[::step]:
        planted = noisy(states, noise) if noise else states
        expected = Candidate((candidate.boundary + 2) % n, "stream")
        finding = identify(planted, expected, reference)
        assert candidate in (finding.nearest, *finding.alike), (candidate, finding)
        # What is alike is the same vector: block 1's output without an MLP, and such.
        assert len(finding.alike) == 0, finding
        assert finding.verdict == "wrong"
        assert identify(planted, candidate, reference).verdict == "matched"


@pytest.mark.parametrize("name", ["tiny", "real"])
def test_matched(name: str, request: pytest.FixtureRequest) -> None:
    reference: Reference = request.getfixturevalue(name)
    asked = (2, reference.num_blocks // 2, reference.num_blocks - 3)
    for noise in (0.0, 0.01):
        columns = [noisy(reference.of(b), noise) if noise else reference.of(b) for b in asked]
        result = verdict(reference, columns, asked)
        assert result.matched, result.describe()
        assert result.found == asked
        assert not result.permuted
        assert result.describe().startswith(f"capture probe: matched, boundaries {list(asked)}")
        assert all(f.cosine > 0.99 for f in result.columns)


def test_off_by_one(real: Reference) -> None:
    result = verdict(real, [real.of(b) for b in (3, 15, 27)], (2, 14, 26))
    assert not result.matched
    assert result.found == (3, 15, 27)
    assert "asked for boundaries [2, 14, 26], got [3, 15, 27], each off by +1" in result.describe()
    early = verdict(real, [noisy(real.of(b), 0.02) for b in (1, 13, 25)], (2, 14, 26))
    assert "each off by -1" in early.describe()


def test_permuted_columns(real: Reference) -> None:
    result = verdict(real, [real.of(b) for b in (26, 2, 14)], (2, 14, 26))
    assert result.permuted
    assert "columns are permuted: asked for [2, 14, 26], got [26, 2, 14]" in result.describe()
    repeated = verdict(real, [real.of(b) for b in (2, 2, 26)], (2, 14, 26))
    assert not repeated.permuted
    assert repeated.found == (2, 2, 26)


def test_stream_without_its_residual(real: Reference) -> None:
    """The two halves of the pair that engines pass from block to block."""
    for kind, words in (
        ("mlp_output", "MLP output before boundary 14"),
        ("before_mlp", "stream at boundary 14 without"),
    ):
        columns = [real.of(2), real.of(14, cast(Kind, kind)), real.of(26)]
        result = verdict(real, columns, (2, 14, 26))
        assert [f.verdict for f in result.columns] == ["matched", "wrong", "matched"]
        assert result.found is None
        assert words in result.describe()


@pytest.mark.parametrize(
    ("declared", "kind", "matched"),
    [
        ("post_norm", "final_normed", True),
        ("pre_norm", "stream", True),
        ("post_norm", "stream", False),
        ("pre_norm", "final_normed", False),
    ],
)
@pytest.mark.parametrize("name", ["tiny", "real"])
def test_last_hidden_state(
    name: str, declared: LastNorm, kind: Kind, matched: bool, request: pytest.FixtureRequest
) -> None:
    reference: Reference = request.getfixturevalue(name)
    n = reference.num_blocks
    result = verdict(reference, [reference.of(2)], (2,), noisy(reference.of(n, kind), 0.01), declared)
    assert result.matched == matched
    assert result.last.nearest == Candidate(n, kind)


def test_last_boundary_before_and_after_the_norm(real: Reference) -> None:
    assert verdict(real, [real.of(30)], (30,)).matched
    after = verdict(real, [real.of(30, "final_normed")], (30,))
    assert after.columns[0].nearest == Candidate(30, "final_normed")
    assert after.verdict == "wrong"


def test_massive_activations_hide_nothing(real: Reference) -> None:
    """Near 25,000 at the sink: there a maximum absolute difference says more about rounding than about layers."""
    states = real.of(14)
    assert states.abs().max() > 1000
    column = states.clone()
    column[:4] *= 1.05  # an error of some hundreds at the sink, twice as large as anything else in the stream
    assert verdict(real, [column], (14,)).matched
    column[20] *= 1e-3  # one token later on that is quite wrong: a mean would be of it alone
    assert verdict(real, [column], (14,)).matched
    one_late = real.of(15).clone()
    one_late[:4] = states[:4]
    assert verdict(real, [one_late], (14,)).found == (15,)


def test_strong_drift_still_names_the_boundary(real: Reference) -> None:
    """A quantized target drifts by tens of percent; neighbours lie that far apart too."""
    for b in (2, 14, 26):
        finding = identify(noisy(real.of(b), 0.3), Candidate(b, "stream"), real)
        assert finding.verdict == "matched", finding


def test_shifted_rows(real: Reference) -> None:
    """States of the token before or after, which have much in common with the right ones."""
    for b in (2, 14, 26):
        before = torch.cat([real.of(b)[:1], real.of(b)[:-1]])
        assert identify(noisy(before, 0.05), Candidate(b, "stream"), real).nearest == Candidate(b, "row_before")
        after = torch.cat([real.of(b)[1:], real.of(b)[-1:]])
        assert identify(noisy(after, 0.05), Candidate(b, "stream"), real).nearest == Candidate(b, "row_after")


def test_garbage_is_near_nothing(real: Reference) -> None:
    noise = torch.randn(48, 576, generator=torch.Generator().manual_seed(2)) * real.of(14).norm() / 48
    for column in (noise, torch.zeros(48, 576)):
        finding = identify(column, Candidate(14, "stream"), real)
        assert finding.nearest is None, finding
        assert "nothing is near" in str(finding)
        assert finding.verdict == "wrong"


def test_states_of_other_tokens_never_match(real: Reference) -> None:
    """All states of a layer have a common part, so these are nearer to it than garbage is."""
    shuffled = torch.cat([torch.arange(4), 4 + torch.randperm(44, generator=torch.Generator().manual_seed(3))])
    for b in range(1, 30):
        for rows in (shuffled, torch.arange(48).flip(0)):
            assert identify(real.of(b)[rows], Candidate(b, "stream"), real).verdict != "matched"


def test_halfway_cannot_be_told(tiny: Reference) -> None:
    """Half of the tokens are boundary 3, the others boundary 4."""
    mixed = torch.where(torch.arange(48)[:, None] % 2 == 0, tiny.of(3), tiny.of(4))
    finding = identify(mixed, Candidate(3, "stream"), tiny)
    assert finding.verdict == "cannot tell"
    result = verdict(tiny, [mixed], (3,))
    assert result.verdict == "cannot tell"
    assert not result.matched
    assert "probe more tokens" in result.describe()


def test_alike_candidates_are_not_held_against_a_capture() -> None:
    """A last block that writes nothing: boundary 8 is boundary 7."""
    model = tiny_llama()
    block = model.model.layers[7]
    torch.nn.init.zeros_(block.self_attn.o_proj.weight)
    torch.nn.init.zeros_(block.mlp.down_proj.weight)
    reference = run_reference(model, torch.arange(48) * 7 % 64)
    for asked in (7, 8):
        result = verdict(reference, [reference.of(7)], (asked,))
        assert result.matched, result.describe()
        assert result.found == (asked,)


def test_not_comparable(tiny: Reference) -> None:
    with pytest.raises(EagleError, match="not finite"):
        verdict(tiny, [tiny.of(3) * float("nan")], (3,))
    with pytest.raises(EagleError, match="shapes"):
        verdict(tiny, [tiny.of(3)], (3, 4))


def test_as_dict_is_json(tiny: Reference) -> None:
    result = verdict(tiny, [tiny.of(3), torch.randn(48, 32)], (2, 4)).as_dict()
    assert json.loads(json.dumps(result))["columns"][0]["nearest"] == "boundary 3"
    assert result["columns"][1]["nearest"] is None
    assert result["verdict"] == "wrong"


class FakeEngine:
    """Captures with the model itself, wrongly if told so."""

    def __init__(self, target: Target, shift: int = 0, swap: bool = False, mix: bool = False) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
        self.shift, self.swap, self.mix = shift, swap, mix

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        for index, sample in enumerate(samples):
            read = samples[0].token_ids[-len(sample.token_ids) :] if self.mix and index else sample.token_ids
            with torch.no_grad():
                out: Any = self.model.model(torch.tensor([list(read)]), output_hidden_states=True)
            columns = [out.hidden_states[b + self.shift][0] for b in boundaries]
            aux = torch.cat(columns[::-1] if self.swap else columns, 1)
            yield HiddenStates(sample.id, sample.token_ids, aux, out.last_hidden_state[0], "post_norm")


TOKENS = [3 + i * 11 % 120 for i in range(48)]


def test_probe_of_an_engine(tiny_target: Target) -> None:
    def probe(**fault: Any) -> CaptureVerdict:
        return probe_capture(cast(Engine, FakeEngine(tiny_target, **fault)), tiny_target, (1, 3, 4), TOKENS)

    assert probe().matched
    assert probe(shift=1).found == (2, 4, 5)
    assert probe(swap=True).permuted
    assert probe(mix=True).verdict == "wrong"  # the second sample of the batch got states of another text
    with pytest.raises(EagleError, match="at least 20 tokens"):
        probe_capture(cast(Engine, FakeEngine(tiny_target)), tiny_target, (1,), TOKENS[:19])


class WrongTokens(FakeEngine):
    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        for states in super().capture(samples, boundaries):
            yield HiddenStates(states.id, states.token_ids[:-1], states.aux, states.last, states.last_norm)


class Forgetful(FakeEngine):
    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        return super().capture(samples[:1], boundaries)


def test_probe_of_an_engine_that_answers_something_else(tiny_target: Target) -> None:
    with pytest.raises(EagleError, match="other tokens"):
        probe_capture(cast(Engine, WrongTokens(tiny_target)), tiny_target, (1, 3, 4), TOKENS)
    with pytest.raises(EagleError, match="1 of 2 samples"):
        probe_capture(cast(Engine, Forgetful(tiny_target)), tiny_target, (1, 3, 4), TOKENS)
