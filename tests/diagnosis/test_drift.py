"""Drift by hand, and planted: an offset is named, noise of a known size is measured, batches are compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3x.benchmark.metrics import tau
from eagle3x.benchmark.statistics import Bootstrap
from eagle3x.config import Hardware
from eagle3x.diagnosis.captured_text import CapturedText, Captures, Text, captured
from eagle3x.diagnosis.drift import Cost, batch_drift, cost, drift
from eagle3x.diagnosis.replay import replay
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.engines import adapter
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.targets import Target
from eagle3x.types import EagleError, HiddenStates, LastNorm, TokenSample, total

HIDDEN, BLOCKS, VOCAB = 16, 5, 6
BOUNDARIES = (1, 2, 4)


def text(name: str, tokens: int) -> Text:
    ids = torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(len(name) * 100 + tokens))
    return Text(name, tuple(ids.tolist()), 3, tokens - 8)


def states(of: Text, seed: int) -> dict[int, Tensor]:
    """A stream that grows as a target's does: each block adds a part of its own."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(BLOCKS + 1, len(of.token_ids), HIDDEN, generator=generator)
    return dict(enumerate(parts.cumsum(0)))


def capture(of: Text, columns: dict[int, Tensor], last: Tensor, last_norm: LastNorm = "post_norm") -> CapturedText:
    return CapturedText(of, tuple(columns), torch.cat(list(columns.values()), dim=1), last, last_norm)


@pytest.fixture(scope="module")
def reference() -> list[CapturedText]:
    """Every boundary of three texts."""
    found = []
    for seed, (name, tokens) in enumerate((("a", 40), ("b", 60), ("c", 33))):
        columns = states(of := text(name, tokens), seed)
        found.append(capture(of, columns, columns[BLOCKS] / 7))
    return found


def noisy(state: Tensor, amount: float) -> Tensor:
    """Off by `amount` of its length, in every token."""
    noise = torch.randn(state.shape, generator=torch.Generator().manual_seed(9))
    return state + amount * noise * state.norm(dim=1, keepdim=True) / noise.norm(dim=1, keepdim=True)


def served(reference: Sequence[CapturedText], shift: int, amount: float) -> list[CapturedText]:
    """What an engine captures for BOUNDARIES that reads `shift` blocks late and drifts by `amount`."""
    return [
        capture(r.text, {b: noisy(r.at(b + shift), amount) for b in BOUNDARIES}, noisy(r.last, amount))
        for r in reversed(reference)  # engines answer in an order of their own
    ]


def test_two_tokens_by_hand() -> None:
    """Of six tokens four are left out, whatever they are. |(0, 1)| / |(3, 4)| = 0.2, |(1, 0)| / |(0, 2)| = 0.5."""
    six = Text("six", (1, 2, 3, 4, 5, 0), 1, 5)
    ours = torch.tensor([[9.0, 9.0]] * 4 + [[3.0, 4.0], [0.0, 2.0]])
    theirs = torch.tensor([[-9.0, 1e6]] * 4 + [[3.0, 5.0], [1.0, 2.0]])
    found = drift([capture(six, {2: ours}, ours)], [capture(six, {2: theirs}, ours)])
    (boundary,) = found.boundaries
    assert boundary.own.error == pytest.approx(0.35)  # between the two
    assert boundary.own.error_p99 == pytest.approx(0.2 + 0.99 * 0.3)
    cosines = 29 / (5 * 34**0.5), 4 / (2 * 5**0.5)
    assert boundary.own.cosine == pytest.approx(sum(cosines) / 2)
    assert boundary.own.cosine_p1 == pytest.approx(cosines[1] + 0.01 * (cosines[0] - cosines[1]))
    worst, second = boundary.worst
    assert (worst.text, worst.position, worst.token_id, second.position) == ("six", 5, 0, 4)
    assert (worst.error, second.error) == (pytest.approx(0.5), pytest.approx(0.2))
    assert found.last is not None
    assert (found.last.error, found.last.error_p99, found.tokens, found.texts) == (0, 0, 2, 1)


def test_noise_of_a_known_size_is_measured(reference: list[CapturedText]) -> None:
    for amount in (1e-4, 0.02, 0.3):
        found = drift(reference, served(reference, 0, amount))
        assert found.nearest(BOUNDARIES) == BOUNDARIES
        for boundary in found.boundaries:
            assert boundary.own.error == pytest.approx(amount, rel=1e-3)
            assert boundary.own.error_p99 == pytest.approx(amount, rel=1e-3)
            assert boundary.noise == boundary.own
        assert found.last is not None
        assert found.last.error == pytest.approx(amount, rel=1e-3)
        assert found.tokens == 40 + 60 + 33 - 3 * 4


@pytest.mark.parametrize("shift", [1, -1])
def test_an_offset_is_named_apart_from_the_noise(reference: list[CapturedText], shift: int) -> None:
    found = drift(reference, served(reference, shift, 0.01))
    assert [b.offset for b in found.boundaries] == [shift] * 3
    for boundary in found.boundaries:
        assert boundary.nearest == boundary.boundary + shift
        assert boundary.noise.error == pytest.approx(0.01, rel=1e-3)
        assert boundary.own.error > 0.3
        assert max(w.error for w in boundary.worst) == pytest.approx(0.01, rel=1e-3)  # of the noise
    plain = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert plain["boundaries"][0]["offset"] == shift
    assert plain["boundaries"][0]["noise"]["error"] == pytest.approx(0.01, rel=1e-3)
    assert (plain["texts"], plain["tokens_left_out"]) == (3, 4)


def test_half_an_offset_is_none(reference: list[CapturedText]) -> None:
    """Every other token is of the next boundary: that is drift, not another block."""
    mixed = []
    for r in reference:
        odd = torch.arange(len(r.text.token_ids))[:, None] % 3 > 0
        mixed.append(capture(r.text, {2: torch.where(odd, r.at(3), noisy(r.at(2), 0.01))}, r.last))
    (boundary,) = drift(reference, mixed).boundaries
    assert boundary.offset == 0
    assert boundary.own.error > 0.3


def test_the_last_hidden_state_needs_one_side_of_the_norm(reference: list[CapturedText]) -> None:
    other = [capture(r.text, {1: r.at(1)}, r.at(BLOCKS), "pre_norm") for r in reference]
    found = drift(reference, other)
    assert found.last is None
    assert found.as_dict()["last"] is None


def test_what_is_not_comparable_is_refused(reference: list[CapturedText]) -> None:
    other = served(reference, 0, 0.0)
    with pytest.raises(EagleError, match="the same texts"):
        drift(reference[:2], other)
    with pytest.raises(EagleError, match=r"reference has boundaries \[1, 2, 4\], but not \[0, 3, 5\]"):
        drift(other, reference)
    longer = Text("a", (*other[-1].text.token_ids[:-1], 99), 3, 30)
    with pytest.raises(EagleError, match="a has other tokens"):
        drift(reference, [*other[:-1], capture(longer, {1: other[-1].at(1)}, other[-1].last)])
    broken = capture(other[-1].text, {1: other[-1].at(1) * float("nan")}, other[-1].last)
    with pytest.raises(EagleError, match="not finite"):
        drift(reference, [*other[:-1], broken])
    short = Text("s", (1, 2, 3, 4), 2, 2)
    with pytest.raises(EagleError, match="s has 4 tokens, of which 4 are left out"):
        drift([capture(short, {1: torch.ones(4, 2)}, torch.ones(4, 2))] * 1,
              [capture(short, {1: torch.ones(4, 2)}, torch.ones(4, 2))])  # fmt: skip


def make_drafter() -> Eagle3:
    torch.manual_seed(3)
    drafter = Eagle3(
        Architecture(
            hidden_size=HIDDEN, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=4, rms_norm_eps=1e-5,
            rope_theta=100.0, max_position_embeddings=256, vocab_size=VOCAB, draft_vocab_size=VOCAB,
            target_hidden_size=HIDDEN, num_aux=3, norm_before_residual=False, norm_before_fc=False, fc_norm=False,
            norm_output=False,
        )
    )  # fmt: skip
    for p in drafter.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.4)
    return drafter.eval()


def test_cost_is_the_difference_of_two_replays(reference: list[CapturedText]) -> None:
    drafter, k, bootstrap = make_drafter(), 3, Bootstrap(resamples=200)
    right, late = (
        tau(total(replay(drafter, [r.fed([b + shift for b in BOUNDARIES]) for r in reference], k))) for shift in (0, 1)
    )
    assert 1.05 < right != late, "the test says something only if drafts are accepted"

    def costs(shift: int, amount: float) -> Cost:
        other = served(reference, shift, amount)
        return cost(drafter, reference, other, drift(reference, other), BOUNDARIES, k, bootstrap)

    exact, both, none = costs(1, 0.0), costs(1, 0.3), costs(0, 0.0)
    assert (exact.boundaries, exact.fed, exact.prompts) == ((1, 2, 4), (2, 3, 5), 3)
    assert exact.reference.value == pytest.approx(right)
    assert exact.other.value == pytest.approx(late)
    assert exact.difference.value == pytest.approx(late - right)
    assert exact.offset == exact.difference  # there is no noise, so the offset is all of it
    assert exact.noise is not None
    assert exact.noise.value == 0
    assert both.offset is not None
    assert both.noise is not None
    assert both.offset.value + both.noise.value == pytest.approx(both.difference.value)
    assert none.verdict == "no difference in any prompt"
    assert (none.difference.value, none.offset, none.noise) == (0, None, None)
    assert json.loads(json.dumps(both.as_dict(), allow_nan=False))["fed"] == [2, 3, 5]


class Mixing:
    """An engine that hands out the states of another sample of its batch, as one has been seen to do."""

    def __init__(self, engine: Captures) -> None:
        self._engine = engine

    def capture(self, samples: Sequence[TokenSample], boundaries: Sequence[int]) -> Iterator[HiddenStates]:
        found = list(self._engine.capture(samples, boundaries))
        for states, other in zip(found, [*found[1:], found[0]], strict=True):
            rows = min(len(states.token_ids), len(other.token_ids))
            aux = torch.cat([other.aux[:rows], states.aux[rows:]])
            yield HiddenStates(states.id, states.token_ids, aux, states.last, states.last_norm)


def test_batches(tiny_target: Target) -> None:
    """Alone or together: the same states from the reference engine, and others from one that mixes its batch up."""
    backend = Backend(
        name="transformers", runner="auto", dtype="float32", kv_cache_dtype="auto", tensor_parallel=1, batch_size=4,
        engine_args={}, python=None, url=None, port=None, memory_fraction=0.85, start_timeout=60.0,
    )  # fmt: skip
    texts = [Text(str(n), tuple((i * 7 + n) % 128 for i in range(n)), 2, n - 4) for n in (30, 31, 32)]
    slot, cpu = Slot("serve", backend, Quantization("none"), Attention("auto")), Hardware("cpu", None, None)
    with adapter("transformers").open(slot, tiny_target, cpu, Job(512, Path("logs"))) as engine:
        same, mixed = (batch_drift(e, texts, (1, 3)) for e in (engine, Mixing(engine)))
        kept = list(captured(engine, texts, (1, 3)))
    assert max(b.own.error_p99 for b in same.boundaries) < 1e-5
    assert same.tokens == 30 + 31 + 32 - 12
    assert min(b.own.error for b in mixed.boundaries) > 0.1
    assert {k.text.id: k.aux.shape for k in kept} == {"30": (30, 64), "31": (31, 64), "32": (32, 64)}
