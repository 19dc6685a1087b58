"""A run whose train text or train states were there already: the stages themselves, on the tiny target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3x.artifacts import Artifact, Store
from eagle3x.composition import cells
from eagle3x.data.records import read_prompts, read_responses
from eagle3x.data.shards import Shards
from eagle3x.diagnosis.reference import Reference, reference_model, run_reference
from eagle3x.pipeline import run
from eagle3x.targets import Target
from eagle3x.types import EagleError

SMALL = (
    "target=directory", "target.aux_layer_ids=[1,3,4]", "tracking=disabled", "data.limit_train=8", "data.limit_eval=3",
    "data.val_fraction=0.25", "sampling.eval_max_new_tokens=6", "sampling.continuation_tokens=4",
)  # fmt: skip
TEXTS = [[3 + (i * step) % 120 for i in range(30 + step)] for step in (7, 11, 13, 17)]
MASKS = [[8 <= i < len(text) - 2 for i in range(len(text))] for text in TEXTS]


@dataclass(frozen=True)
class Place:
    """A store, and a target whose reference states of `TEXTS` are known."""

    path: Path
    target: Target
    references: Sequence[Reference]

    def make(self, stage: str, *overrides: str) -> Artifact:
        cell = cells([*SMALL, f"target.path={self.target.path}", *overrides], multirun=False)[0]
        return list(run(stage, cell.config, cell.snapshot, self.target, Store(self.path / "store")))[-1]

    def columns(self, *boundaries: int) -> list[Tensor]:
        """Per text the boundaries' streams, [T, A, H]."""
        return [torch.stack([r.of(b) for b in boundaries], dim=1) for r in self.references]

    def last(self) -> list[Tensor]:
        return [r.of(6, "final_normed") for r in self.references]


@pytest.fixture(scope="module")
def place(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Place:
    model = reference_model(tiny_target)
    return Place(tmp_path_factory.mktemp("reuse"), tiny_target, [run_reference(model, text) for text in TEXTS])


def specforge(place: Place, name: str, *boundaries: int, questions: Sequence[tuple[int, ...]] = ()) -> Path:
    """A dump as SpecForge's scripts/prepare_hidden_states.py writes it; `questions` are texts that it also holds."""
    directory = place.path / name
    directory.mkdir()
    for number, (text, mask, aux, last) in enumerate(
        zip(TEXTS, MASKS, place.columns(*boundaries), place.last(), strict=True)
    ):
        record = {"input_ids": torch.tensor(text), "loss_mask": torch.tensor(mask).long()}
        states = {"aux_hidden_state": aux.flatten(1)[None], "hidden_state": last[None]}
        torch.save({**record, **states}, directory / f"data_{number}.ckpt")
    for number, text in enumerate(questions):
        tokens = torch.tensor([*text, 5])
        record = {"input_ids": tokens, "loss_mask": tokens == 5}
        states = {"aux_hidden_state": torch.ones(1, len(tokens), 96), "hidden_state": torch.ones(1, len(tokens), 32)}
        torch.save({**record, **states}, directory / f"data_{number}_q.ckpt")  # not among the samples that are probed
    return directory


def eval_question(place: Place) -> str:
    """The longest of this run's eval prompts."""
    found = read_prompts(place.make("prompts").path)
    return max((p.messages[-1].content for p in found if p.split == "eval"), key=len)


def test_train_states_come_from_a_dump_in_ascending_order(place: Place) -> None:
    """SpecForge's, with its columns in another order and an eval prompt's question, once as another template has it."""
    first = read_responses(place.make("responses", f"hidden_states.from={specforge(place, 'any', 1, 3, 4)}").path)
    assert {r.split for r in first} == {"val", "eval"}
    asked = first[-1].token_ids[: first[-1].prompt_tokens]
    other_template = tuple(place.target.tokenizer.encode(f"USER: {eval_question(place)}"))
    dump = specforge(place, "permuted", 4, 1, 3, questions=[asked, other_template])
    states = place.make("hidden_states", f"hidden_states.from={dump}")
    facts = states.manifest.facts
    assert facts["dump"]["probe"]["boundaries"] == [4, 1, 3]
    assert {k: facts["dump"][k] for k in ("samples", "same_prompt", "leak", "empty_masks")} == {
        "samples": 6, "same_prompt": 1, "leak": 1, "empty_masks": 0,
    }  # fmt: skip
    train, val = Shards(states.path / "train"), Shards(states.path / "val")
    assert train.spec.boundaries == val.spec.boundaries == (1, 3, 4)
    assert train.spec.last_norm == "post_norm"
    assert len(val) > 0
    wanted = zip(TEXTS, MASKS, place.columns(1, 3, 4), place.last(), strict=True)
    for sample, (text, mask, aux, last) in zip(train, wanted, strict=True):
        kept = len(text) - 2  # what follows the last label is left out
        assert sample.token_ids.tolist() == text[:kept]
        assert sample.loss_mask.tolist() == mask[:kept]
        assert torch.equal(sample.aux, aux.flatten(1)[:kept])
        assert torch.equal(sample.last, last[:kept])


def test_masks_come_from_the_texts_where_the_dump_has_none(place: Place) -> None:
    """speculators': states in one folder, tokens and masks in its prepared data. Then a drafter is trained on it."""
    dump, prepared = place.path / "hidden_states", place.path / "prepared"
    dump.mkdir()
    prepared.mkdir()
    for number, (text, aux, last) in enumerate(zip(TEXTS, place.columns(1, 3, 4), place.last(), strict=True)):
        columns = torch.cat([aux, last[:, None]], dim=1).contiguous()
        save_file({"hidden_states": columns, "token_ids": torch.tensor(text)}, dump / f"hs_{number}.safetensors")
    with pytest.raises(EagleError, match=r"hs_0 has no loss mask.*responses\.from=FILE"):
        place.make("hidden_states", f"hidden_states.from={dump}")
    rows = [{"input_ids": text, "loss_mask": list(map(int, mask))} for text, mask in zip(TEXTS, MASKS, strict=True)]
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(prepared / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    reused = (f"hidden_states.from={dump}", f"responses.from={prepared}")
    train = Shards(place.make("hidden_states", *reused).path / "train")
    assert [s.loss_mask.tolist() for s in train] == [mask[:-2] for mask in MASKS]
    small = ("drafter.draft_vocab_size=64", "train.epochs=1", "train.tokens_per_step=128", "train.validations=1")
    drafter = place.make("drafter", *reused, *small)
    assert drafter.manifest.facts["boundaries"] == [1, 3, 4]
    assert drafter.manifest.facts["samples"] == 4


def test_texts_are_extracted_again(place: Place) -> None:
    """The reused text, captured by the engine: the same states as the reference's."""
    file = place.path / "texts.parquet"
    rows: list[dict[str, Any]] = [
        {"token_ids": text, "loss_mask": mask, "id": f"old-{i}", "category": "math"}
        for i, (text, mask) in enumerate(zip(TEXTS, MASKS, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    responses = place.make("responses", f"responses.from={file}")
    assert [r.id for r in read_responses(responses.path, "train")] == [row["id"] for row in rows]
    states = place.make("hidden_states", f"responses.from={file}")
    assert states.manifest.parents["responses"] == responses.key
    found = {sample.id: sample for sample in Shards(states.path / "train")}
    for row, aux in zip(rows, place.columns(1, 3, 4), strict=True):
        kept = len(row["token_ids"]) - 2
        torch.testing.assert_close(found[row["id"]].aux, aux.flatten(1)[:kept], rtol=1e-4, atol=1e-4)
    tokens = place.target.tokenizer.encode(f"USER: {eval_question(place)}")
    leak = {"token_ids": [*tokens, 5], "loss_mask": [*[False] * len(tokens), True], "id": "leak", "category": "math"}
    pq.write_table(pa.Table.from_pylist([*rows, leak]), place.path / "leak.parquet")
    without = place.make("responses", f"responses.from={place.path / 'leak.parquet'}")
    assert [r.id for r in read_responses(without.path, "train")] == [row["id"] for row in rows]
    assert (without.manifest.facts["leaks"], without.manifest.facts["same_prompt"]) == (1, 0)
    moved = file.rename(place.path / "moved.parquet")
    assert place.make("responses", f"responses.from={moved}").reused


def test_a_dump_of_other_boundaries_is_not_trained_on(place: Place) -> None:
    dump = specforge(place, "late", 2, 4, 5)
    with pytest.raises(EagleError, match=r"has boundaries \[2, 4, 5\], but the config says \[1, 3, 4\]: set"):
        place.make("hidden_states", f"hidden_states.from={dump}")
    (place.path / "noise").mkdir()
    for number, text in enumerate(TEXTS):
        states = torch.randn(len(text), 4, 32)
        file = place.path / "noise" / f"hs_{number}.safetensors"
        save_file({"hidden_states": states, "token_ids": torch.tensor(text)}, file)
    with pytest.raises(EagleError, match="is not what a drafter can be trained on"):
        place.make("hidden_states", f"hidden_states.from={place.path / 'noise'}")
