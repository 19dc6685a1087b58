"""`command=convert` and `command=probe`, as the command line calls them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3x.cli import run_command
from eagle3x.composition import cells
from eagle3x.diagnosis.reference import reference_model, run_reference
from eagle3x.drafters import checkpoint
from eagle3x.targets import Target
from eagle3x.types import ConfigError, EagleError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "drafters"
KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def run(tiny_target: Target, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*overrides: str) -> str:
        fixed = ("target=directory", f"target.path={tiny_target.path}", "target.aux_layer_ids=[1,3,4]")
        cell = cells([*fixed, *overrides], multirun=False)[0]
        assert cell.command is not None
        run_command(cell.command, cell.config)
        return capsys.readouterr().out

    return call


def test_to_speculators_and_back(run: Callable[..., str], tiny_target: Target, tmp_path: Path) -> None:
    source = FIXTURES / "specforge-norms"
    there, back = tmp_path / "there", tmp_path / "back"
    made_by = "drafter.made_by=specforge"
    said = run("command=convert", "drafter=pretrained", f"drafter.path={source}", made_by, f"to={there}",
               "format=speculators")  # fmt: skip
    assert "boundaries [1, 3, 4]" in said
    config = json.loads((there / "config.json").read_text())
    assert (config[KEY], config["norm_output"]) == ([1, 3, 4], False)  # what SpecForge meant by true
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    run("command=convert", "drafter=pretrained", f"drafter.path={there}", f"to={back}")
    config = json.loads((back / "config.json").read_text())
    assert (config[KEY], config["eagle_config"][KEY]) == ([1, 3, 4], [0, 2, 3])  # vLLM's ids, SGLang's
    ours, theirs = load_file(back / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert checkpoint.read(back).arch == checkpoint.read(source, "specforge").arch


def test_a_conversion_that_fails_leaves_nothing(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("command=convert", "drafter=pretrained", f"drafter.path={FIXTURES / 'specforge-norms'}",
             "drafter.made_by=specforge", f"to={tmp_path / 'new' / 'drafter'}")  # fmt: skip

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("eagle3x.drafters.export.rewrite_ids", full)  # after the weights were written
        with pytest.raises(OSError, match="no space"):
            run(*asked)
    assert list((tmp_path / "new").iterdir()) == []
    run(*asked)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["drafter"]
    assert {p.name for p in (tmp_path / "new" / "drafter").iterdir()} == {"config.json", "model.safetensors"}


def test_what_cannot_be_converted(run: Callable[..., str], tmp_path: Path) -> None:
    source = f"drafter.path={FIXTURES / 'specforge-yarn'}"
    with pytest.raises(ConfigError, match="needs a published drafter"):
        run("command=convert", f"to={tmp_path / 'x'}")
    with pytest.raises(ConfigError, match="exists already"):
        run("command=convert", "drafter=pretrained", source, f"to={tmp_path}")
    with pytest.raises(ConfigError, match=r"drafter\.boundaries=\[0,2,3\] or \[1,3,4\]"):
        run("command=convert", "drafter=pretrained", source, f"to={tmp_path / 'x'}")
    assert not (tmp_path / "x").exists()


def test_probe_says_what_to_set(run: Callable[..., str], tiny_target: Target, tmp_path: Path) -> None:
    tokens = [3 + 7 * i % 120 for i in range(40)]
    reference = run_reference(reference_model(tiny_target), tokens)
    states = torch.stack([reference.of(b) for b in (2, 4, 5, 6)], dim=1).contiguous()
    save_file({"hidden_states": states, "token_ids": torch.tensor(tokens)}, tmp_path / "hs_0.safetensors")
    said = run("command=probe", f"states={tmp_path}")
    assert "column 0 (float32): boundary 2 (relative error" in said
    assert "boundaries [2, 4, 5] and the pre_norm last hidden state" in said
    assert "'target.aux_layer_ids=[2,4,5]' capture=as_is" in said
    save_file({"hidden_states": states[:, :, :].roll(1, 1).contiguous(), "token_ids": torch.tensor(tokens)},
              tmp_path / "hs_0.safetensors")  # fmt: skip
    with pytest.raises(EagleError, match="not what a drafter can be trained on"):
        run("command=probe", f"states={tmp_path}")
    with pytest.raises(ConfigError, match="no such directory"):
        run("command=probe", "states=/nowhere")
