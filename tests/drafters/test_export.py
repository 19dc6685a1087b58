"""The export stage: which ids end up in the served config, and what each reader will feed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eagle3x.capture import Reader
from eagle3x.drafters import export
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.export import Fed, make, read_export
from eagle3x.pipeline import StageRun
from eagle3x.types import EagleError

KEY = "eagle_aux_hidden_state_layer_ids"
V1, V2 = Reader("vllm", "0.32.0", runner="v1"), Reader("vllm", "0.32.0", runner="v2")


def sglang(model_class: str = "LlamaForCausalLM", version: str = "0.5.23") -> Reader:
    return Reader("sglang", version, model_class)


ARCHITECTURE = Architecture(
    hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=4, rms_norm_eps=1e-5, rope_theta=1e4,
    max_position_embeddings=512, vocab_size=9, draft_vocab_size=4, target_hidden_size=8, num_aux=3,
    norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
)  # fmt: skip


def stage_run(
    path: Path,
    capture: str = "trained",
    aux_layer_ids: tuple[int, ...] | None = None,
    offset: int = 0,
    target_ids: tuple[int, ...] = (2, 14, 26),
    model_class: str = "LlamaForCausalLM",
    pretrained: dict[str, Any] | None = None,
    boundaries: tuple[int, ...] | None = None,
) -> StageRun:
    """A run of the stage on a drafter trained here, or on a checkpoint whose config has the keys `pretrained`.

    boundaries: what the drafter stage knows of a pretrained drafter.
    """
    source = path / "drafter" / "checkpoint"
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(json.dumps(ARCHITECTURE.to_config() | (pretrained or {})))
    (source / "model.safetensors").write_bytes(b"weights")
    work = path / "export"
    work.mkdir(exist_ok=True)
    trained = [i + offset for i in target_ids] if pretrained is None else boundaries
    facts = {"boundaries": trained, "boundaries_said_by": None if pretrained is None else "nobody, or its config"}
    return cast(
        StageRun,
        SimpleNamespace(
            work=work,
            cfg=SimpleNamespace(
                target=SimpleNamespace(aux_layer_ids=target_ids),
                serve=SimpleNamespace(capture=capture, aux_layer_ids=aux_layer_ids),
                planted=(),
            ),
            inputs={
                "drafter": SimpleNamespace(path=path / "drafter", manifest=SimpleNamespace(facts=facts)),
            },
            target=SimpleNamespace(num_blocks=30, model_class=model_class, max_position_embeddings=8192),
        ),
    )


def served_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "export" / "checkpoint" / "config.json").read_text())


def test_trained_is_right_on_every_engine(tmp_path: Path) -> None:
    make(stage_run(tmp_path))
    config = served_config(tmp_path)
    assert config[KEY] == [2, 14, 26]
    assert config["eagle_config"][KEY] == [1, 13, 25]
    assert config["num_aux_hidden_states"] == 3
    assert config["max_position_embeddings"] == 8192
    assert Architecture.from_config(config).draft_vocab_size == 4
    result = read_export(tmp_path / "export")
    assert result.trained == (2, 14, 26)
    for reader in (Reader("transformers"), V1, V2, sglang(), sglang(version="0.5.14")):
        assert result.fed(reader) == Fed((2, 14, 26), None, False)


def test_the_record_has_every_reader(tmp_path: Path) -> None:
    facts = make(stage_run(tmp_path, offset=1))
    assert facts == json.loads((tmp_path / "export" / "export.json").read_text())
    assert facts["trained_boundaries"] == [3, 15, 27]
    rows = [(r["engine"], r["version"], r["runner"], r["predicted"], r["mismatched"]) for r in facts["readers"]]
    assert rows == [
        ("transformers", "", None, [3, 15, 27], False),
        ("vllm", "0.32.0", "v1", [3, 15, 27], False),
        ("vllm", "0.32.0", "v2", [3, 15, 27], False),
        ("sglang", "0.5.14", None, [3, 15, 27], False),
        ("sglang", "0.5.23", None, [3, 15, 27], False),
    ]


@pytest.mark.parametrize(
    ("capture", "ids", "offset", "written", "vllm", "llama"),
    [
        ("as_is", None, 0, [2, 14, 26], Fed((2, 14, 26), None, False), Fed((3, 15, 27), None, True)),
        ("plus_one", None, 0, [3, 15, 27], Fed((3, 15, 27), None, True), Fed((4, 16, 28), None, True)),
        ("as_is", None, 1, [2, 14, 26], Fed((2, 14, 26), None, True), Fed((3, 15, 27), None, False)),
        ("as_is", (1, 2, 3), 0, [1, 2, 3], Fed((1, 2, 3), None, True), Fed((2, 3, 4), None, True)),
    ],
)
def test_by_hand(
    tmp_path: Path, capture: str, ids: tuple[int, ...] | None, offset: int, written: list[int], vllm: Fed, llama: Fed
) -> None:
    make(stage_run(tmp_path, capture, ids, offset))
    config = served_config(tmp_path)
    assert config[KEY] == config["eagle_config"][KEY] == written
    result = read_export(tmp_path / "export")
    assert (result.fed(V1), result.fed(V2), result.fed(sglang())) == (vllm, vllm, llama)


def test_deepseek_by_hand(tmp_path: Path) -> None:
    """Raw ids are boundaries there, unless the first is 1."""
    make(stage_run(tmp_path, "as_is", model_class="DeepseekV3ForCausalLM"))
    result = read_export(tmp_path / "export")
    assert result.fed(sglang("DeepseekV3ForCausalLM")) == Fed((2, 14, 26), None, False)


def test_what_sglang_cannot_express_is_refused_and_vllm_is_served(tmp_path: Path) -> None:
    facts = make(stage_run(tmp_path, target_ids=(2, 14, 30)))
    result = read_export(tmp_path / "export")
    assert "eagle_config" not in served_config(tmp_path)
    assert result.fed(V1) == result.fed(V2) == Fed((2, 14, 30), None, False)
    fed = result.fed(sglang())
    assert fed.predicted is None
    assert fed.mismatched is None
    assert "last block" in str(fed.refused)
    assert "last block" in facts["readers"][-1]["refused"]


def test_ids_that_crash_a_reader_are_refused(tmp_path: Path) -> None:
    make(stage_run(tmp_path, "as_is", (2, 14, 29)))
    result = read_export(tmp_path / "export")
    assert result.fed(V1).predicted == (2, 14, 29)
    assert "last block" in str(result.fed(sglang()).refused)


def test_published_keys_are_kept(tmp_path: Path) -> None:
    keys = {"eagle_config": {KEY: [1, 13, 25], "use_aux_hidden_state": True}}
    make(stage_run(tmp_path, "published", pretrained=keys))
    config = served_config(tmp_path)
    assert KEY not in config
    assert config["eagle_config"] == {KEY: [1, 13, 25], "use_aux_hidden_state": True}
    result = read_export(tmp_path / "export")
    assert result.trained is None
    assert result.fed(sglang()) == Fed((2, 14, 26), None, None)
    assert result.fed(V1) == Fed((1, 13, 25), None, None)
    assert result.fed(V2) == Fed((2, 15, 27), None, None)


def test_what_nobody_knows_is_not_served_as_trained(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=r"nobody knows .* serve\.capture=published"):
        make(stage_run(tmp_path, pretrained={"eagle_config": {KEY: [1, 13, 25]}}))


def test_a_published_drafter_is_made_right_on_every_engine(tmp_path: Path) -> None:
    """Only its nested key was there, or only its top-level one: an engine that reads the other fed its default."""
    for keys in ({"eagle_config": {KEY: [1, 14, 25]}}, {KEY: [2, 15, 26]}):
        make(stage_run(tmp_path, pretrained=keys, boundaries=(2, 15, 26)))
        config = served_config(tmp_path)
        assert (config[KEY], config["eagle_config"][KEY]) == ([2, 15, 26], [1, 14, 25])
        result = read_export(tmp_path / "export")
        assert result.trained == (2, 15, 26)
        for reader in (V1, V2, sglang(), sglang(version="0.5.14")):
            assert result.fed(reader) == Fed((2, 15, 26), None, False)


def test_published_keys_are_compared_with_what_is_known(tmp_path: Path) -> None:
    make(stage_run(tmp_path, "published", pretrained={KEY: [2, 15, 26]}, boundaries=(2, 15, 26)))
    result = read_export(tmp_path / "export")
    assert result.fed(V1) == Fed((2, 15, 26), None, False)
    assert result.fed(sglang()) == Fed((2, 15, 27), None, True)  # its silent default


def test_pretrained_by_hand_keeps_the_rest_of_its_eagle_config(tmp_path: Path) -> None:
    make(stage_run(tmp_path, "as_is", pretrained={"eagle_config": {KEY: [7, 8, 9], "norm_before_fc": True}}))
    assert served_config(tmp_path)["eagle_config"] == {
        KEY: [2, 14, 26],
        "norm_before_fc": True,
        "use_aux_hidden_state": True,
    }


def test_weights_are_linked(tmp_path: Path) -> None:
    make(stage_run(tmp_path))
    served = tmp_path / "export" / "checkpoint" / "model.safetensors"
    assert served.samefile(tmp_path / "drafter" / "checkpoint" / "model.safetensors")
    assert not (tmp_path / "export" / "checkpoint" / "config.json").samefile(
        tmp_path / "drafter" / "checkpoint" / "config.json"
    )


def test_weights_are_copied_across_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(export.os, "link", refuse)
    make(stage_run(tmp_path))
    served = tmp_path / "export" / "checkpoint" / "model.safetensors"
    assert served.read_bytes() == b"weights"
    assert served.stat().st_nlink == 1


def test_what_a_killed_attempt_left_is_replaced(tmp_path: Path) -> None:
    run = stage_run(tmp_path)
    left = run.work / "checkpoint"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"wei")
    (left / "other.safetensors").write_bytes(b"")
    make(run)
    assert sorted(p.name for p in left.iterdir()) == ["config.json", "model.safetensors"]
    assert (left / "model.safetensors").read_bytes() == b"weights"


def test_wrong_number_of_ids(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="fc reads 3 boundaries, but 2 ids"):
        make(stage_run(tmp_path, "as_is", (2, 14)))


def test_longer_drafter_keeps_its_positions(tmp_path: Path) -> None:
    make(stage_run(tmp_path, pretrained={"max_position_embeddings": 100000}, boundaries=(2, 14, 26)))
    assert served_config(tmp_path)["max_position_embeddings"] == 100000
