"""The finder on drafters whose answer is known: with one fault planted, with two, and with none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3x.benchmark.statistics import Bootstrap
from eagle3x.config import Hardware, TargetConfig
from eagle3x.diagnosis import known_answer, reading_bench
from eagle3x.diagnosis.attention_weights import KEY, QUERY, VALUE, other_inputs, to_halves, to_neighbours
from eagle3x.diagnosis.captured_text import CapturedText, Text, captured
from eagle3x.diagnosis.evidence import finder_causes
from eagle3x.diagnosis.finder import find
from eagle3x.diagnosis.found import Found
from eagle3x.diagnosis.hypotheses import FC, boundaries_needed, norm_name
from eagle3x.diagnosis.known_answer import BLOCKS, BOUNDARIES, KnownAnswer, build
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.checkpoint import EMBEDDING, HEAD, Published, read
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.engines import adapter
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.targets import Target, resolve
from eagle3x.types import EagleError

BOOTSTRAP = Bootstrap(resamples=200)
TEXTS = 14
K = 3


@pytest.fixture(autouse=True)
def short_quick_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the texts only, as with long ones."""
    monkeypatch.setattr(reading_bench, "QUICK_TOKENS", 128)


@dataclass(frozen=True)
class Pair:
    known: KnownAnswer
    target: Target
    published: Published
    texts: list[CapturedText]

    def find(self, published: Published, claimed: tuple[int, ...] | None = BOUNDARIES) -> Found:
        return find(published, self.target, self.texts, claimed, K, BOOTSTRAP)

    def with_tensors(self, **changes: Tensor | None) -> Published:
        tensors: dict[str, Tensor | None] = {**self.published.tensors, **changes}
        return replace(self.published, tensors={n: t for n, t in tensors.items() if t is not None})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    known = build(tmp_path_factory.mktemp("known"), K)
    target = resolve(
        TargetConfig(
            name="known", path=str(known.target_dir), wheel=None, hub_id=None, revision=None,
            trust_remote_code=False, aux_layer_ids=BOUNDARIES,
        )
    )  # fmt: skip
    backend = Backend(
        name="transformers", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=16,
        engine_args={}, python=None, url=None, port=None, memory_fraction=0.85, start_timeout=60.0,
    )  # fmt: skip
    slot = Slot("extract", backend, Quantization("none"), Attention("auto"))
    texts = [
        Text(str(i), (5, 30, 3 + 4 * i, *known.text((3 + 4 * i,), 13 + 3)), 3, 13) for i in range(TEXTS)
    ]  # each starts elsewhere on the cycle
    cpu = Hardware(device="cpu", threads=None, devices=None)
    with adapter("transformers").open(slot, target, cpu, Job(64, Path("logs"))) as engine:
        states = list(captured(engine, texts, range(1, BLOCKS)))
    return Pair(known, target, read(known.drafter_dir), states)


def rolled(d2t: Tensor) -> Tensor:
    """The map, each row's id a row further down."""
    rows = torch.arange(len(d2t))
    return (rows + d2t).roll(1) - rows


def swapped(fc: Tensor, order: Sequence[int] = (1, 0, 2)) -> Tensor:
    return fc.unflatten(1, (3, -1))[:, list(order)].flatten(1)


def named(found: Found) -> list[str]:
    return sorted(n.hypothesis.kind for n in found.named)


def test_boundaries_needed(pair: Pair) -> None:
    # Two around each that is claimed; the engines' default (2, 6, 9), the target's ids 3, 5, 8, and these plus one.
    assert boundaries_needed((3, 5, 8), pair.target) == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert boundaries_needed((0, 11, 12), pair.target) == (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12)
    assert boundaries_needed(None, pair.target) == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


def test_healthy(pair: Pair) -> None:
    found = pair.find(pair.published)
    assert found.tau.value == K + 1
    assert not found.clear
    assert not found.untold
    assert not found.other_target
    assert finder_causes(found) == ()
    assert max(t.tau for t in found.tried if t.tau is not None) <= K + 1


WRONG = ("slot_0_early", "slot_2_late", "all_early", "default_boundaries", "slots_102", "slots_201")


def test_wrong_variants_of_the_pair(pair: Pair, tmp_path: Path) -> None:
    """One id off by one, all of them, each another way, and fc's columns in other orders."""
    for variant in known_answer.variants(pair.known, tmp_path):
        if variant.name not in WRONG:
            continue
        found = pair.find(read(variant.drafter_dir), variant.fed)
        (cause,) = found.named
        assert found.tau.value == 1, variant.name
        assert found.tau_named.value == K + 1, variant.name
        assert cause.gain.value == K
        if variant.fed == BOUNDARIES:
            assert cause.hypothesis.kind == "columns_swapped", variant.name
        else:
            assert cause.hypothesis.kind == "offset_training", variant.name
            assert cause.hypothesis.boundaries == BOUNDARIES, variant.name
            assert f"its config says {', '.join(map(str, variant.fed))}" in cause.hypothesis.sentence


def flipped(published: Published, flag: str) -> Published:
    arch = published.arch
    return replace(published, arch=replace(arch, **{flag: not getattr(arch, flag)}))


FAULTS: dict[str, tuple[Callable[[Pair], Published], str, float]] = {
    "norm_before_residual": (lambda p: flipped(p.published, "norm_before_residual"), "norm_variant", 1.0),
    "d2t a row on": (lambda p: p.with_tensors(d2t=rolled(p.published.tensors["d2t"])), "d2t_shifted", 1.0),
    "d2t of ids": (
        lambda p: p.with_tensors(d2t=p.published.tensors["d2t"] + torch.arange(63), t2d=None), "d2t_shifted", 1.0
    ),
    "no d2t": (lambda p: p.with_tensors(d2t=None), "d2t_missing", 1.0),
    "no d2t and no t2d": (lambda p: p.with_tensors(d2t=None, t2d=None), "d2t_missing", 1.0),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault(pair: Pair, fault: str) -> None:
    plant, kind, tau = FAULTS[fault]
    found = pair.find(plant(pair))
    assert named(found) == [kind]
    assert found.tau.value == tau
    assert found.tau_named.value == K + 1
    lost = finder_causes(found)[0].lost
    assert lost is not None
    assert lost.value == pytest.approx(tau - K - 1)


def test_stale_vocabulary(pair: Pair) -> None:
    """d2t and t2d of another run, whose tokens are fewer: the head's rows tell which were meant."""
    ids = torch.cat([torch.arange(0, 40), torch.arange(41, 64)])  # 63 of 64, of which token 40 is missing instead of 0
    found = pair.find(pair.with_tensors(d2t=ids - torch.arange(63), t2d=None))
    assert named(found) in (["d2t_shifted"], ["stale_vocabulary"])
    assert found.tau_named.value == K + 1


def test_norm_output(pair: Pair) -> None:
    """The first draft does not read it: tau is at least 2 with the wrong flag."""
    found = pair.find(flipped(pair.published, "norm_output"))
    assert named(found) == ["norm_variant"]
    assert found.named[0].hypothesis.arch == {"norm_output": False}
    assert 2 <= found.tau.value < K + 1 == found.tau_named.value


def test_two_faults_are_both_named(pair: Pair) -> None:
    d2t, fc = rolled(pair.published.tensors["d2t"]), swapped(pair.published.tensors[FC])
    found = pair.find(pair.with_tensors(d2t=d2t, **{FC: fc}))
    assert named(found) == ["columns_swapped", "d2t_shifted"]
    assert (found.tau.value, found.tau_named.value) == (1, K + 1)
    assert [n.gain.value for n in found.named] == [K, K]  # each alone loses everything again

    found = pair.find(flipped(pair.published, "norm_before_residual"), (2, 4, 7))
    assert named(found) == ["norm_variant", "offset_training"]
    assert found.boundaries == BOUNDARIES
    assert found.tau_named.value == K + 1


def test_nobody_knows_the_boundaries(pair: Pair) -> None:
    """The target's ids are the right ones here; they beat every other choice."""
    found = pair.find(pair.published, None)
    assert (found.claimed, found.boundaries, found.unsettled) == (None, BOUNDARIES, ())
    assert found.tau.value == K + 1
    assert not found.clear
    found = pair.find(pair.with_tensors(d2t=rolled(pair.published.tensors["d2t"])), None)
    assert (named(found), found.boundaries, found.tau_named.value) == (["d2t_shifted"], BOUNDARIES, K + 1)


def test_too_few_texts_show_nothing(pair: Pair) -> None:
    """Six that all gain could be chance among forty hypotheses."""
    wrong = pair.with_tensors(d2t=rolled(pair.published.tensors["d2t"]))
    found = find(wrong, pair.target, pair.texts[:6], BOUNDARIES, K, BOOTSTRAP)
    assert not found.clear
    assert found.tried[0].hypothesis.kind == "d2t_shifted"
    assert found.tried[0].tau == K + 1
    with pytest.raises(EagleError, match="at least 2 texts"):
        find(wrong, pair.target, pair.texts[:1], BOUNDARIES, K, BOOTSTRAP)
    with pytest.raises(EagleError, match=r"not \[0, 5, 8\]"):
        pair.find(pair.published, (0, 5, 8))


# A random drafter whose text is what it drafts itself: with one draft a step tau is 2, and every reading but its own is
# worse. Unlike the pair's, its attention and embedding matter.

ARCH = Architecture(
    hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5,
    rope_theta=10000.0, max_position_embeddings=512, vocab_size=128, draft_vocab_size=64, target_hidden_size=32,
    num_aux=3, norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
)  # fmt: skip
IDS = torch.arange(64) * 2
CAPTURED, RIGHT = (1, 2, 3, 4, 5), (1, 3, 4)


def random_drafter(seed: int, target: Target, **changes: object) -> Eagle3:
    torch.manual_seed(seed)
    drafter = Eagle3(dataclasses.replace(ARCH, **changes))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            weight.normal_(1.0 if weight.dim() == 1 else 0.0, 0.2)
            if "q_proj" in name or "k_proj" in name:
                weight *= 4  # attention that chooses: then positions matter
        drafter.embed_tokens.weight.copy_(target.embedding())
        drafter.lm_head.weight.normal_(0, 1)
        drafter.d2t.copy_(IDS - torch.arange(64))
        drafter.t2d.copy_(torch.zeros(128, dtype=torch.bool).index_fill(0, IDS, True))
    return drafter


def published_of(drafter: Eagle3, **changes: Tensor | None) -> Published:
    own = {n: t.detach() for n, t in drafter.state_dict().items() if n != EMBEDDING}
    tensors: dict[str, Tensor | None] = {**own, **changes}
    return Published("here", {}, drafter.arch, {n: t for n, t in tensors.items() if t is not None})


@torch.no_grad()
def self_written(
    drafter: Eagle3, seed: int, noise: float = 0.0, normed: bool = False, last_column: bool = False
) -> list[CapturedText]:
    """Texts that the drafter drafts token by token, from random states; with `noise`, so many tokens are others."""
    rng = torch.Generator().manual_seed(seed)
    texts, prompt, response = [], 4, 20
    for i in range(TEXTS):
        length = prompt + response + 1
        states = {b: torch.randn(length, 32, generator=rng) * b for b in CAPTURED}
        last = torch.randn(length, 32, generator=rng)
        fed = [states[b] for b in RIGHT]
        if normed:
            fed = [x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) for x in fed]
        if last_column:
            fed[-1] = last
        hidden = drafter.fuse(torch.cat(fed, dim=-1))
        cache = drafter.new_cache(1, length)
        tokens = torch.randint(0, 128, (prompt + 1,), generator=rng).tolist()
        for p in range(length - 2):
            state = drafter.step(hidden[None, None, p], torch.tensor([[tokens[p + 1]]]), torch.tensor([[p]]), cache)
            if p + 2 == len(tokens):
                draft = int(drafter.to_target_ids(drafter.logits(state)[0].argmax(-1)))
                other = int(torch.randint(0, 128, (1,), generator=rng))
                tokens.append(other if float(torch.rand(1, generator=rng)) < noise else draft)
        text = Text(str(i), tuple(tokens), prompt, response)
        aux = torch.cat([states[b] for b in CAPTURED], dim=-1)
        texts.append(CapturedText(text, CAPTURED, aux, last, "post_norm"))
    return texts


def test_a_random_drafter_on_its_own_text(tiny_target: Target) -> None:
    drafter = random_drafter(1, tiny_target)
    texts = self_written(drafter, 1)

    def run(published: Published, claimed: tuple[int, ...] = RIGHT) -> Found:
        return find(published, tiny_target, texts, claimed, 1, BOOTSTRAP)

    found = run(published_of(drafter))
    assert (found.tau.value, found.named) == (2, ())
    attention = {n: drafter.state_dict()[n] for n in (QUERY, KEY, VALUE)}
    pairs = {n: attention[n] for n in (QUERY, KEY)}
    assert named(run(published_of(drafter, **{n: to_neighbours(t, 8) for n, t in pairs.items()}))) == ["rotary_layout"]
    wrong = {
        "inputs_swapped": run(published_of(drafter, **{n: other_inputs(t) for n, t in attention.items()})),
        "rotary_layout": run(published_of(drafter, **{n: to_halves(t, 8) for n, t in pairs.items()})),
        "random_embedding": run(published_of(drafter, **{EMBEDDING: torch.randn(128, 32)})),
        "columns_swapped": run(published_of(drafter, **{FC: swapped(drafter.fc.weight.detach(), (2, 0, 1))})),
        "d2t_shifted": run(published_of(drafter, d2t=rolled(drafter.d2t))),
        "d2t_missing": run(published_of(drafter, d2t=None)),
        "rope_base": run(replace(published_of(drafter), arch=replace(ARCH, rope_theta=3.0))),
        "norm_variant": run(replace(published_of(drafter), arch=replace(ARCH, norm_before_residual=True))),
        "offset_training": run(published_of(drafter), (1, 3, 5)),
    }
    for kind, found in wrong.items():
        assert named(found) == [kind]
        assert found.tau.value < 1.9
        assert found.tau_named.value == 2
    assert wrong["rope_base"].named[0].hypothesis.arch == {"rope_theta": 10000.0, "rope_scaling": None}


def test_states_that_were_normed_in_training(tiny_target: Target) -> None:
    drafter = random_drafter(2, tiny_target)
    texts = self_written(drafter, 2, normed=True)
    found = find(published_of(drafter), tiny_target, texts, RIGHT, 1, BOOTSTRAP)
    assert named(found) == ["normed_states"]
    assert found.named[0].hypothesis.arch == {"fc_norm": True}
    assert found.tau_named.value == 2
    texts = self_written(drafter, 2, last_column=True)
    found = find(published_of(drafter), tiny_target, texts, RIGHT, 1, BOOTSTRAP)
    assert named(found) == ["normed_states"]
    assert found.named[0].hypothesis.last_column
    assert found.tau_named.value == 2


def test_norms_that_the_config_does_not_name(tiny_target: Target) -> None:
    """Their weights lie in the checkpoint, which the strict loader refuses for them."""
    drafter = random_drafter(3, tiny_target, fc_norm=True)
    found = find(replace(published_of(drafter), arch=ARCH), tiny_target, self_written(drafter, 3), RIGHT, 1, BOOTSTRAP)
    assert named(found) == ["norm_variant"]
    assert found.named[0].hypothesis.arch == {"fc_norm": True}
    assert torch.equal(found.named[0].hypothesis.tensors[norm_name(2)], drafter.state_dict()[norm_name(2)])  # type: ignore[arg-type]
    assert found.tau_named.value == 2


def test_no_false_alarm_for_a_weak_drafter(tiny_target: Target) -> None:
    """Right in about half of the text, by chance in which: over many drafters and texts nothing is ever named."""
    taus = []
    for seed in range(8):
        drafter = random_drafter(100 + seed, tiny_target)
        texts = self_written(drafter, seed, noise=0.5)
        found = find(published_of(drafter), tiny_target, texts, RIGHT, 1, BOOTSTRAP)
        assert not found.clear, found.sentence
        assert not found.untold
        assert not found.other_target
        taus.append(found.tau.value)
    assert 1.3 < np.mean(taus) < 1.7


def test_a_drafter_of_another_target(tiny_target: Target) -> None:
    """Its text is chance: nothing is accepted, nothing helps, and no row of it is the target's."""
    drafter = random_drafter(5, tiny_target)
    texts = self_written(drafter, 5, noise=1.0)
    found = find(published_of(drafter, **{EMBEDDING: torch.randn(128, 32)}), tiny_target, texts, RIGHT, 1, BOOTSTRAP)
    assert found.other_target
    assert [cause.kind for cause in finder_causes(found)] == ["other_target"]
    assert "another target" in found.sentence
    related = tiny_target.head()[IDS]
    found = find(published_of(drafter, **{HEAD: related}), tiny_target, texts, RIGHT, 1, BOOTSTRAP)
    assert found.head_likeness == pytest.approx(1)
    assert not found.other_target  # weak, but of this target
