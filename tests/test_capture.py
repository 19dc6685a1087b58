"""Every rule by which a reader turns layer ids into boundaries, written down by hand from the engines' sources."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest

from eagle3x.capture import (
    CaptureError,
    Reader,
    default_boundaries,
    exported_keys,
    native_layer_ids,
    predicted_boundaries,
    trained_boundaries,
)
from eagle3x.types import EagleError

KEY = "eagle_aux_hidden_state_layer_ids"


def sglang(model_class: str, version: str = "0.5.23") -> Reader:
    return Reader("sglang", version, model_class)


def top(*ids: int, columns: int | None = None) -> dict[str, Any]:
    return {KEY: list(ids), "num_aux_hidden_states": columns or len(ids)}


def nested(*ids: int) -> dict[str, Any]:
    return {"eagle_config": {KEY: list(ids)}}


V1, V2 = Reader("vllm", "0.32.0", runner="v1"), Reader("vllm", "0.32.0", runner="v2")
HF = Reader("transformers")

# reader, blocks, drafter config, boundaries fed
PREDICTED = [
    # vLLM: an id is a boundary; runner V1 falls back on the nested key, V2 on its default (2, n // 2, n - 3).
    (V1, 30, top(2, 14, 26), (2, 14, 26)),
    (V2, 30, top(2, 14, 26), (2, 14, 26)),
    (V1, 30, nested(1, 13, 25), (1, 13, 25)),
    (V2, 30, nested(1, 13, 25), (2, 15, 27)),
    (V1, 30, top(2, 14, 26) | nested(1, 13, 25), (2, 14, 26)),
    (V2, 30, top(2, 14, 26) | nested(1, 13, 25), (2, 14, 26)),
    (V1, 30, {}, (2, 15, 27)),
    (V2, 61, {}, (2, 30, 58)),
    (V1, 30, {KEY: []} | nested(1, 13, 25), (1, 13, 25)),
    (V1, 30, {KEY: "2,14,26"}, (2, 15, 27)),
    (V1, 30, top(26, 2, 14), (2, 14, 26)),
    (V1, 30, top(2, 14, 14, 26, columns=3), (2, 14, 26)),
    (V1, 30, top(0, 2, 30), (0, 2, 30)),
    (V2, 30, {"eagle_config": {"layer_ids": [3, 5, 7]}}, (3, 5, 7)),
    # SGLang, most classes: id + 1; the nested key alone; anything wrong with it means the default, without + 1.
    *[
        (sglang(model_class, version), 30, nested(1, 13, 25), (2, 14, 26))
        for version in ("0.5.14", "0.5.23")
        for model_class in (
            "LlamaForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
            "MiniMaxM2ForCausalLM",
            "Gemma3ForCausalLM",
            "Gemma4ForCausalLM",
            "ExaoneMoEForCausalLM",
            "DeepseekV3ForCausalLM",  # first id 1: + 1
            "GptOssForCausalLM",
        )
    ],
    (sglang("LlamaForCausalLM"), 30, top(2, 14, 26) | nested(1, 13, 25), (2, 14, 26)),
    (sglang("LlamaForCausalLM"), 30, nested(2, 14, 26), (3, 15, 27)),
    (sglang("LlamaForCausalLM"), 30, nested(25, 13, 1), (2, 14, 26)),
    (sglang("LlamaForCausalLM"), 30, top(2, 14, 26), (2, 15, 27)),
    (sglang("LlamaForCausalLM"), 30, {"eagle_config": None}, (2, 15, 27)),
    (sglang("LlamaForCausalLM"), 30, {"eagle_config": {}}, (2, 15, 27)),
    (sglang("LlamaForCausalLM"), 30, {"eagle_config": {KEY: None}}, (2, 15, 27)),
    # SGLang deepseek_v2 and glm4_moe_lite: + 1 only if the first id is 1.
    *[
        (sglang(model_class, version), 61, nested(*ids), boundaries)
        for version in ("0.5.14", "0.5.23")
        for model_class in (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "KimiK25ForConditionalGeneration",
            "Glm4MoeLiteForCausalLM",
        )
        for ids, boundaries in (
            ((2, 30, 58), (2, 30, 58)),
            ((1, 29, 57), (2, 30, 58)),
            ((3, 31, 59), (3, 31, 59)),
            ((2, 1, 58), (1, 2, 58)),
        )
    ],
    (sglang("DeepseekV3ForCausalLM"), 61, {}, (2, 30, 58)),
    # SGLang gpt_oss: as they are if the last one is n, from 0.5.23 on.
    (sglang("GptOssForCausalLM"), 24, nested(2, 12, 24), (2, 12, 24)),
    (sglang("GptOssForCausalLM"), 24, nested(2, 12, 22), (3, 13, 23)),
    (sglang("GptOssForCausalLM", "0.5.14"), 24, nested(2, 12, 22), (3, 13, 23)),
    # Trainers: SpecForge, TorchSpec, ModelOpt name the block whose output they take; speculators names the boundary.
    *[
        (Reader(engine), 30, config, boundaries)
        for engine in ("specforge", "torchspec", "modelopt")
        for config, boundaries in ((nested(1, 13, 25), (2, 14, 26)), (top(0, 2, 29), (1, 3, 30)), ({}, (2, 15, 27)))
    ],
    (Reader("speculators"), 30, top(2, 14, 26), (2, 14, 26)),
    (Reader("speculators"), 30, {}, (2, 15, 27)),
    # This project's own reader.
    (HF, 30, top(2, 14, 26) | nested(1, 13, 25), (2, 14, 26)),
    (HF, 30, nested(1, 13, 25), (1, 13, 25)),
]


@pytest.mark.parametrize(("reader", "blocks", "config", "boundaries"), PREDICTED)
def test_predicted(reader: Reader, blocks: int, config: dict[str, Any], boundaries: tuple[int, ...]) -> None:
    assert predicted_boundaries(reader, config, blocks) == boundaries


@pytest.mark.parametrize(
    ("reader", "blocks", "config", "says"),
    [
        (HF, 30, {}, "names no eagle_aux"),
        (HF, 30, {KEY: []}, "captures nothing"),
        (HF, 30, {KEY: ["2"]}, "list of integers"),
        (V1, 30, top(2, 14, 31), "0..30"),
        (V1, 30, top(2, 14, 14), "fc reads 3"),
        (V1, 30, {KEY: [2, 14]}, "fc reads 3"),
        (V1, 6, {}, "fc reads 3"),  # the default (2, 3, 3) is two boundaries
        (sglang("LlamaForCausalLM"), 30, nested(1, 13, 29), "last block"),
        (sglang("LlamaForCausalLM"), 30, nested(1, 13, 30), "0..30"),
        (sglang("LlamaForCausalLM"), 30, nested(-1, 13, 25), "boundary 0"),
        (sglang("LlamaForCausalLM"), 30, nested(), "captures nothing"),
        (sglang("DeepseekV3ForCausalLM"), 61, nested(0, 30, 58), "boundary 0"),
        (sglang("GptOssForCausalLM", "0.5.14"), 24, nested(2, 12, 24), "0..24"),
        (sglang("UnheardOfForCausalLM"), 30, nested(1, 13, 25), "not known"),
        (sglang("GptOssForCausalLM", "main"), 24, nested(2, 12, 24), "not of the form"),
    ],
)
def test_prediction_is_refused(reader: Reader, blocks: int, config: dict[str, Any], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        predicted_boundaries(reader, config, blocks)


@pytest.mark.parametrize(
    ("reader", "blocks", "boundaries", "ids"),
    [
        (HF, 30, (2, 14, 26), [2, 14, 26]),
        (V1, 30, (0, 14, 30), [0, 14, 30]),
        (V2, 30, (2, 14, 26), [2, 14, 26]),
        (sglang("LlamaForCausalLM"), 30, (1, 14, 29), [0, 13, 28]),
        (sglang("LlamaForCausalLM", "0.5.14"), 30, (2, 14, 26), [1, 13, 25]),
        (sglang("Qwen3ForCausalLM"), 36, (2, 18, 33), [1, 17, 32]),
        (sglang("DeepseekV3ForCausalLM"), 61, (3, 31, 59), [3, 31, 59]),
        (sglang("DeepseekV3ForCausalLM"), 61, (2, 30, 58), [1, 29, 57]),
        (sglang("Glm4MoeLiteForCausalLM"), 47, (4, 23, 44), [4, 23, 44]),
        (sglang("GptOssForCausalLM"), 24, (3, 13, 23), [2, 12, 22]),
        (sglang("GptOssForCausalLM", "0.5.14"), 24, (3, 13, 23), [2, 12, 22]),
        (Reader("specforge"), 30, (2, 14, 30), [1, 13, 29]),
        (Reader("speculators"), 30, (2, 14, 26), [2, 14, 26, 30]),
    ],
)
def test_native_ids(reader: Reader, blocks: int, boundaries: tuple[int, ...], ids: list[int]) -> None:
    assert native_layer_ids(reader, boundaries, blocks) == ids


@pytest.mark.parametrize(
    ("reader", "boundaries", "says"),
    [
        (sglang("LlamaForCausalLM"), (2, 14, 30), "last block"),
        (sglang("LlamaForCausalLM"), (0, 14, 26), "boundary 0"),
        (sglang("DeepseekV3ForCausalLM"), (1, 14, 26), "no ids mean"),
        (sglang("DeepseekV3ForCausalLM"), (2, 14, 30), "last block"),
        (sglang("GptOssForCausalLM", "0.5.14"), (2, 14, 30), "last block"),
        (Reader("modelopt"), (0, 14, 26), "boundary 0"),
        *[
            (reader, boundaries, says)
            for reader in (HF, V1, sglang("LlamaForCausalLM"))
            for boundaries, says in (
                ((26, 14, 2), "ascend"),
                ((2, 2, 26), "ascend"),
                ((2, 14, 31), r"0\.\.30"),
                ((-1, 14), r"0\.\.30"),
                ((), "at least one"),
            )
        ],
    ],
)
def test_native_ids_are_refused(reader: Reader, boundaries: tuple[int, ...], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        native_layer_ids(reader, boundaries, 30)


def test_gpt_oss_last_block_has_two_spellings() -> None:
    reader = sglang("GptOssForCausalLM")
    ids = native_layer_ids(reader, (2, 12, 24), 24)
    assert predicted_boundaries(reader, nested(*ids), 24) == (2, 12, 24)


def test_trained_boundaries() -> None:
    assert trained_boundaries((2, 14, 26), 0, 30) == (2, 14, 26)
    assert trained_boundaries((2, 14, 26), 1, 30) == (3, 15, 27)
    assert trained_boundaries((2, 14, 29), 1, 30) == (3, 15, 30)
    with pytest.raises(CaptureError, match=r"0\.\.30"):
        trained_boundaries((2, 14, 30), 1, 30)


def test_default() -> None:
    assert default_boundaries(30) == (2, 15, 27)
    assert default_boundaries(61) == (2, 30, 58)
    assert default_boundaries(4) == (1, 2)  # (2, 2, 1)
    with pytest.raises(CaptureError):
        default_boundaries(2)


def test_exported_keys() -> None:
    keys = exported_keys((2, 14, 26), 30, "LlamaForCausalLM")
    assert keys.config() == {
        KEY: [2, 14, 26],
        "num_aux_hidden_states": 3,
        "eagle_config": {"use_aux_hidden_state": True, KEY: [1, 13, 25]},
    }
    assert keys.refused is None
    assert exported_keys((3, 31, 59), 61, "KimiK25ForConditionalGeneration").nested == (3, 31, 59)


@pytest.mark.parametrize(
    ("boundaries", "model_class", "says"),
    [
        ((2, 14, 30), "LlamaForCausalLM", "last block"),
        ((1, 14, 26), "DeepseekV3ForCausalLM", "first id is 1"),
        ((0, 14, 26), "LlamaForCausalLM", "boundary 0"),
        ((2, 14, 26), "UnheardOfForCausalLM", "not known"),
    ],
)
def test_export_for_vllm_alone(boundaries: tuple[int, ...], model_class: str, says: str) -> None:
    keys = exported_keys(boundaries, 30, model_class)
    assert keys.top_level == boundaries
    assert keys.nested is None
    assert says in str(keys.refused)
    assert "eagle_config" not in keys.config()
    for reader in (HF, V1, V2):
        assert predicted_boundaries(reader, keys.config(), 30) == boundaries


@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
@pytest.mark.parametrize("model_class", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"])
def test_one_directory_is_right_everywhere(model_class: str, version: str) -> None:
    """Over all triples of boundaries of a target of 7 blocks: each reader feeds what was trained, or is refused."""
    readers = [HF, V1, V2, Reader("speculators"), sglang(model_class, version)]
    if model_class != "DeepseekV3ForCausalLM":  # trainers read the nested key by the rule of most classes
        readers += [Reader("specforge"), Reader("torchspec"), Reader("modelopt")]
    served = 0
    for boundaries in itertools.combinations(range(8), 3):
        keys = exported_keys(boundaries, 7, model_class, version)
        assert (keys.nested is None) == (keys.refused is not None)
        for reader in readers if keys.nested else readers[:4]:
            assert predicted_boundaries(reader, keys.config(), 7) == boundaries, (reader, keys)
        served += keys.nested is not None
    # of 8 * 7 * 6 / 6 = 56 triples, 35 avoid boundary 0, 20 also avoid boundary 7, and 10 of these avoid boundary 1
    assert served == (
        10
        if model_class == "DeepseekV3ForCausalLM"
        else 35
        if (model_class, version) == ("GptOssForCausalLM", "0.5.23")
        else 20
    )


def test_reader_record() -> None:
    assert issubclass(CaptureError, EagleError)
    assert str(V1) == "vllm 0.32.0 runner V1"
    assert str(sglang("LlamaForCausalLM")) == "sglang 0.5.23 LlamaForCausalLM"
    with pytest.raises(ValueError, match="runner"):
        Reader("vllm", "0.32.0")
    with pytest.raises(ValueError, match="runner"):
        Reader("sglang", "0.5.23", runner="v1")


def test_no_torch_at_import() -> None:
    code = "import sys, eagle3x.capture; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
