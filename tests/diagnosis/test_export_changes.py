"""What an export did to a drafter: every fault that can be planted is told from the weights, alone and in pairs."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3x.diagnosis.attention_weights import KEY, QUERY, VALUE, other_inputs, to_halves, to_neighbours
from eagle3x.diagnosis.export_changes import Change, changes
from eagle3x.diagnosis.faults import tamper
from eagle3x.diagnosis.planted import STAGES, Fault, called
from eagle3x.drafters import checkpoint
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.targets import Target

ARCH = Architecture(
    hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5,
    rope_theta=10000.0, max_position_embeddings=512, vocab_size=128, draft_vocab_size=64, target_hidden_size=32,
    num_aux=3, norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
)  # fmt: skip
TOUCHED: dict[str, tuple[Fault, ...]] = {
    "fc": ("columns_swapped", "other_target", "fc_lost"),
    "embedding": ("random_embedding", "embedding_shifted", "other_target"),
    "map": ("d2t_missing", "d2t_shifted", "stale_vocabulary"),
    "projections": ("projections_exchanged", "inputs_swapped", "interleaved_pairs"),
}
"""Faults that change the same tensors: two of them are one other change. Attention's inputs and pairs go together."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """A random drafter on disk; its map names every second token."""
    torch.manual_seed(0)
    drafter = Eagle3(ARCH)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.normal_(1.0 if weight.dim() == 1 else 0.0, 0.2)
        ids = torch.arange(64) * 2
        drafter.d2t.copy_(ids - torch.arange(64))
        drafter.t2d.copy_(torch.zeros(128, dtype=torch.bool).index_fill(0, ids, True))
    directory = tmp_path_factory.mktemp("trained")
    checkpoint.save(drafter, directory, {})
    return directory


def changed(trained: Path, faults: Sequence[Fault], target: Target, where: Path) -> list[Change]:
    shutil.copytree(trained, where)
    tamper(where, faults, target)
    return changes(checkpoint.read(trained), checkpoint.read(where), target)


def named_right(found: Sequence[Change], faults: Sequence[Fault]) -> bool:
    wanted = [called(fault) for fault in faults]
    said = [(c.kind, part) for c in found for part in c.sentence.split("; ")]
    return {c.kind for c in found} == {w.kind for w in wanted} and all(
        any(kind == w.kind and part.startswith(w.said) for kind, part in said) for w in wanted
    )


def test_nothing_planted(trained: Path, tiny_target: Target, tmp_path: Path) -> None:
    assert changed(trained, (), tiny_target, tmp_path / "same") == []


@pytest.mark.parametrize("fault", STAGES["export"])
def test_each_fault(trained: Path, tiny_target: Target, tmp_path: Path, fault: Fault) -> None:
    found = changed(trained, [fault], tiny_target, tmp_path / "wrong")
    assert len(found) == 1
    assert named_right(found, [fault]), found


def test_every_two_faults(trained: Path, tiny_target: Target, tmp_path: Path) -> None:
    """But for two that change the same tensors, and another target's drafter, of which nothing else can be told."""
    together = {("inputs_swapped", "interleaved_pairs")}
    pairs = 0
    for one, other in itertools.combinations(STAGES["export"], 2):
        same = any(one in faults and other in faults for faults in TOUCHED.values())
        if (same and (one, other) not in together) or "other_target" in (one, other):
            continue
        found = changed(trained, [one, other], tiny_target, tmp_path / f"{one}-{other}")
        assert named_right(found, [one, other]), (one, other, found)
        pairs += 1
    assert pairs == 78 - 1 - 1 - 3 - 2  # of 13 faults; fc, embedding, maps and projections have so many pairs together


def test_a_drafter_of_another_target_is_called_only_that(trained: Path, tiny_target: Target, tmp_path: Path) -> None:
    found = changed(trained, ["other_target", "d2t_shifted", "norm_variant"], tiny_target, tmp_path / "other")
    assert [c.kind for c in found] == ["other_target"]


def test_what_became_of_other_tensors(trained: Path, tiny_target: Target) -> None:
    before = checkpoint.read(trained)
    down, o_proj = "midlayer.mlp.down_proj.weight", "midlayer.self_attn.o_proj.weight"

    def said(**now: Tensor | None) -> str:
        tensors: dict[str, Tensor | None] = {**before.tensors, **now}
        after = replace(before, tensors={n: t for n, t in tensors.items() if t is not None})
        [change] = changes(before, after, tiny_target)
        assert change.kind == "export_changed"
        return change.sentence

    assert said(**{down: None}) == f"{down} is only in the trained"
    assert said(**{"bias": torch.zeros(3)}) == "bias is only in the served"
    assert said(**{down: torch.zeros(32, 40)}) == f"{down} is [32, 40], trained [32, 48]"
    assert said(**{down: before.tensors[down] * 1.5}) == f"{down} differs from the trained one by 0.5 (relative)"
    both = said(**{down: torch.zeros(32, 48), o_proj: torch.ones(32, 32)})
    assert both == f"{down} is zero; {o_proj} is 1 everywhere, as if it had never been loaded"
    everything = {n: t * 2 for n, t in before.tensors.items() if n.startswith("midlayer")}
    assert said(**everything).endswith(f"; and {len(everything) - 4} others")
    rounded = {n: t.to(torch.bfloat16) for n, t in before.tensors.items() if t.is_floating_point()}
    assert changes(before, replace(before, tensors={**before.tensors, **rounded}), tiny_target) == []


def test_an_embedding_some_rows_off(trained: Path, tiny_target: Target) -> None:
    """Rows that fell off one end and new ones at the other do not matter."""
    before = checkpoint.read(trained)
    for by in (-3, -1, 1, 3):
        moved = tiny_target.embedding().roll(by, dims=0)
        moved[range(by) if by > 0 else range(by, 0)] = 0.1
        [change] = changes(
            before, replace(before, tensors={**before.tensors, checkpoint.EMBEDDING: moved}), tiny_target
        )
        assert change.kind == "random_embedding"
        assert change.sentence == f"embed_tokens is off by {by:+d} rows: its row i is the trained row i{-by:+d}"


def test_layouts_of_the_projections() -> None:
    """Two heads of 4: the rows of pairs that are neighbours, (0, 1) and (2, 3), go half a head apart; and back."""
    weight = torch.arange(8.0)[:, None] * torch.ones(1, 6)
    assert to_halves(weight, 4)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    weight = torch.arange(16.0)[:, None] * torch.ones(1, 6)
    assert to_halves(weight, 8)[:, 0].tolist()[:8] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert torch.equal(to_neighbours(to_halves(weight, 8), 8), weight)
    assert other_inputs(torch.tensor([[1.0, 2, 3, 4]])).tolist() == [[3, 4, 1, 2]]


def test_interleaved_rotary_pairs_are_what_the_layout_says(trained: Path, tiny_target: Target) -> None:
    """Scores of a drafter that rotates neighbouring rows, worked out here, are those of the moved weights here."""
    drafter = checkpoint.load(trained, tiny_target)
    attention, positions = drafter.midlayer.self_attn, torch.arange(5)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))

    def interleaved(weight: Tensor) -> Tensor:
        heads = (x @ weight.T).unflatten(-1, (-1, 4, 2))  # [5, N, d/2, 2]
        angles = positions[:, None] * 10000.0 ** -(torch.arange(4) / 4)
        turned = torch.view_as_complex(heads.contiguous()) * torch.polar(torch.ones(5, 4), angles)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    query, key = (attention.q_proj.weight.detach(), attention.k_proj.weight.detach())
    wanted = torch.einsum("tnd,sd->tns", interleaved(query), interleaved(key)[:, 0])
    with torch.no_grad():
        attention.q_proj.weight.copy_(to_halves(query, 8))
        attention.k_proj.weight.copy_(to_halves(key, 8))
    found = torch.einsum("tnd,sd->tns", attention.query(x, positions), attention.key(x, positions)[:, 0])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_faults_of_an_export_leave_its_original_alone(trained: Path, tiny_target: Target, tmp_path: Path) -> None:
    """The export's weights are hard links to the trained ones."""
    before = {n: t.clone() for n, t in checkpoint.read(trained).tensors.items()}
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / checkpoint.WEIGHTS).hardlink_to(trained / checkpoint.WEIGHTS)
    config = json.loads((trained / "config.json").read_text())
    (tmp_path / "export" / "config.json").write_text(json.dumps(config))
    tamper(tmp_path / "export", STAGES["export"], tiny_target)
    after = checkpoint.read(trained).tensors
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert {QUERY, KEY, VALUE} <= before.keys()
