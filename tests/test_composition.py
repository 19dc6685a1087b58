"""Every choice and experiment composes; every kind of bad input is named."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3x import composition
from eagle3x.composition import cells, groups
from eagle3x.types import ConfigError

MANDATORY = {
    ("target", "directory"): ["target.path=/models/x", "target.aux_layer_ids=[1,2]"],
    ("target", "hub"): ["target.hub_id=org/name", "target.aux_layer_ids=[1,2]"],
    ("data", "hf"): ["data.hub_id=org/name"],
    ("data", "jsonl"): ["data.path=prompts.jsonl"],
    ("eval", "hf"): ["eval.hub_id=org/name"],
    ("eval", "jsonl"): ["eval.path=prompts.jsonl"],
    ("eval", "spec_bench"): ["eval.path=question.jsonl"],
    ("drafter", "pretrained"): ["drafter.path=/ckpt"],
    ("command", "convert"): ["to=/new"],
    ("command", "probe"): ["states=/dump"],
}
CHOICES = [(g, c) for g, choices in groups().items() for c in choices if g != "experiment"]


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes(group: str, choice: str) -> None:
    [cell] = cells([f"{group}={choice}", *MANDATORY.get((group, choice), [])], multirun=False)
    assert cell.config.seed == 1


@pytest.mark.parametrize("choice", groups()["experiment"])
def test_every_experiment_composes(choice: str) -> None:
    assert len(cells([f"experiment={choice}"], multirun=False)) >= 2


def test_all_groups_of_the_design_are_there() -> None:
    wanted = (
        "target backend quantization attention capture data sampling drafter train speculation benchmark hardware"
        " tracking experiment"
    )
    assert set(wanted.split()) <= set(groups())


def test_one_choice_fills_three_slots_and_each_can_differ() -> None:
    [same] = cells(["backend=vllm"], multirun=False)
    assert [s.backend.name for s in (same.config.extract_slot, same.config.generate_slot, same.config.serve_slot)] == [
        "vllm"
    ] * 3
    [mixed] = cells(["backend@serve.backend=sglang", "attention@serve.attention=triton"], multirun=False)
    assert (mixed.config.backend.name, mixed.config.generate.backend.name) == ("transformers", "transformers")
    assert (mixed.config.serve.backend.name, mixed.config.serve.attention.name) == ("sglang", "triton")


def test_a_step_for_a_gpu_differs_from_the_default_in_size_and_precision() -> None:
    [gpu] = cells(["train=gpu", "hardware=cuda"], multirun=False)
    [default] = cells([], multirun=False)
    same = {"ttt_steps": 3, "tokens_per_step": 512, "precision": "fp32", "head_chunk": 512, "num_workers": 0}
    assert replace(gpu.config.train, **same) == default.config.train
    assert (gpu.config.train.ttt_steps, gpu.config.train.tokens_per_step, gpu.config.train.precision) == (
        7,
        16384,
        "bf16",
    )


def test_a_matrix_is_the_product_of_its_sweeps() -> None:
    matrix = cells(["capture=as_is,plus_one", "seed=1,2,3"], multirun=True)
    assert sorted((c.config.capture.offset, c.config.seed) for c in matrix) == [
        (o, s) for o in (0, 1) for s in (1, 2, 3)
    ]


def test_an_experiment_brings_its_own_sweep() -> None:
    ids = [c.config.serve.aux_layer_ids for c in cells(["experiment=offsets"], multirun=False)]
    assert ids == [(2, 14, 26), (3, 15, 27), (5, 17, 29), (1, 2, 3)]


def test_the_founding_question_crosses_quantization_with_an_offset() -> None:
    found = [c.config for c in cells(["experiment=founding", "quantization=int8"], multirun=False)]
    assert [(c.serve.quantization.scheme, c.serve.capture) for c in found] == [
        ("none", "trained"), ("none", "plus_one"), ("int4", "trained"), ("int4", "plus_one"),
    ]  # fmt: skip
    assert {(c.stage, c.generate.quantization.scheme, c.benchmark.timing) for c in found} == {
        ("diagnose", "none", False)
    }
    swept = ["experiment=founding", "backend=vllm", "quantization@serve.quantization=fp8,int8", "serve.capture=trained"]
    found = [c.config for c in cells(swept, multirun=True)]
    assert [(c.backend.name, c.serve.backend.name, c.serve.quantization.scheme) for c in found] == [
        ("vllm", "vllm", "fp8"), ("vllm", "vllm", "int8"),
    ]  # fmt: skip


BAD = {
    "backnd=vllm": ["backnd", "backend"],
    "backend=vlm": ["vlm", "did you mean vllm", "transformers"],
    "train.epoch=3": ["train.epoch", "train.epochs"],
    "train.epochs=many": ["train.epochs", "many", "integer"],
    "train.epochs=2.5": ["train.epochs", "2.5", "integer"],
    "+train.extra=1": ["train.extra"],
    "+extra=1": ["extra"],
    "~train.epochs": ["train.epochs", "missing"],
    "target=directory": ["target.path"],
    "data=jsonl": ["data.path"],
    "drafter=pretrained": ["drafter.path", "hub_id"],
    "drafter.made_by=specforge": ["published drafter"],
    "drafter.path=/ckpt": ["drafter=pretrained"],
    "serve.backend=vllm": ["backend@serve.backend=vllm"],
    "speculation.num_speculative_tokens=99": ["num_speculative_tokens", "continuation_tokens"],
    "speculation.num_speculative_tokens=0": ["num_speculative_tokens", "at least 1"],
    "speculation.topk=0": ["topk", "at least 1"],
    "speculation.topk=2": ["num_draft_tokens=None", "topk=2 has 4 to 11"],
    "speculation.num_draft_tokens=5": ["num_draft_tokens=5", "k+1=4"],
    "serve.aux_layer_ids=[1,2,3]": ["aux_layer_ids", "as_is"],
    "target.aux_layer_ids=[14,2,26]": ["ascending"],
    "data.limit_eval=0": ["limit_eval", "at least 1"],
    "data.limit_train=-1": ["limit_train", "at least 1"],
    "benchmark.timing_prompts=1": ["timing_prompts", "at least 2"],
    "seed=1,2": ["--multirun"],
    "data.path=x.jsonl": ["data=jsonl"],
    "stage=reprot": ["stage", "reprot", "report"],
    "command=explian": ["explian", "explain"],
    "train.learning_rate=[1": ["train.learning_rate"],
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_says_what_and_where(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        cells([override], multirun=False)
    for word in BAD[override]:
        assert word in str(error.value)


def test_a_bad_cell_of_a_sweep_is_found_before_any_work() -> None:
    with pytest.raises(ConfigError, match="plus_two"):
        cells(["capture=as_is,plus_two"], multirun=True)
    with pytest.raises(ConfigError, match="continuation_tokens"):
        cells(["speculation.num_speculative_tokens=3,99"], multirun=True)


def python_m_eagle3x(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eagle3x", *args], cwd=cwd, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "args", [["backnd=vllm"], ["target=directory", "target.path=/nowhere", "target.aux_layer_ids=[1]"]]
)
def test_bad_input_exits_with_2_and_leaves_nothing(args: list[str], tmp_path: Path) -> None:
    done = python_m_eagle3x(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("args", [["--help"], ["--cfg", "job"], ["backnd=vllm"], ["target.path=/nowhere"]])
def test_torch_is_not_imported_before_work(args: list[str], tmp_path: Path) -> None:
    probe = (
        "import sys, runpy\nsys.argv = ['eagle3x', *sys.argv[1:]]\n"
        "try:\n    runpy.run_module('eagle3x', run_name='__main__')\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'lightning', 'wandb', 'matplotlib', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\nprint('light')"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, *args], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.rstrip().endswith("light"), done.stderr


def test_help_fits_one_screen_and_explains_the_groups(tmp_path: Path) -> None:
    text = python_m_eagle3x("--help", cwd=tmp_path).stdout
    assert len(text.splitlines()) <= 45
    for group, choices in groups().items():
        shown = next(line for line in text.splitlines() if line.split()[:1] == [group])
        missing = [choice for choice in choices if choice not in shown]
        assert not missing or "..." in shown, (group, missing)


def test_cfg_job_shows_the_resolved_values(tmp_path: Path) -> None:
    text = python_m_eagle3x("--cfg", "job", "capture=plus_one", cwd=tmp_path).stdout
    assert "convention: plus_one" in text
    assert "num_speculative_tokens: 3" in text


def test_conf_is_found() -> None:
    assert (composition.CONF_DIR / "config.yaml").is_file()
