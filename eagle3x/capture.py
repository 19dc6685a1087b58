"""Boundaries, and how each reader numbers them. No other module knows that engines number layers differently.

Boundary b in 0..n is the residual stream after b of the target's n blocks: x_0 is the (scaled) embedding, x_b what
block b reads, x_n what the final norm reads. A *reader* is whoever turns layer ids (a drafter's config, or the argument
of a capture hook) into boundaries. The rules come from the engines' sources; docs/capture.md names file and line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from eagle3x.types import ConfigError

KEY = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"
SGLANG_VERSIONS = ("0.5.14", "0.5.23")
"""Versions whose rules were read; a version between two of them follows the older one."""

ReaderName = Literal["transformers", "vllm", "sglang", "speculators", "specforge", "torchspec", "modelopt", "automodel"]


class CaptureError(ConfigError):
    """No layer id makes a reader do what was asked, or the reader would fail or guess."""


@dataclass(frozen=True)
class Reader:
    """Whoever reads layer ids.

    `version`: "" where the rule never changed. `model_class`: the target's architectures[0]; only SGLang asks for it.
    `runner`: vLLM's model runner; None elsewhere.
    """

    engine: ReaderName
    version: str = ""
    model_class: str = ""
    runner: Literal["v1", "v2"] | None = None

    def __post_init__(self) -> None:
        if (self.engine == "vllm") != (self.runner is not None):
            raise ValueError("runner says which model runner vLLM uses, and belongs to vLLM alone")

    def __str__(self) -> str:
        parts = (self.engine, self.version, self.runner and f"runner {self.runner.upper()}", self.model_class)
        return " ".join(part for part in parts if part)


def reader_of(identity: Mapping[str, Any], model_class: str) -> Reader:
    """The reader that an engine with this `identity` is, for a target of this class."""
    match identity["engine"]:
        case "vllm":
            return Reader("vllm", identity["version"], runner=identity["runner"])
        case "sglang":
            return Reader("sglang", identity["version"], model_class)
        case _:
            return Reader("transformers")


@dataclass(frozen=True)
class ExportedKeys:
    """The ids an exported drafter carries. `refused`: why the directory does not serve on SGLang; None if it does."""

    top_level: tuple[int, ...]
    nested: tuple[int, ...] | None
    refused: str | None = None

    def config(self) -> dict[str, Any]:
        """As keys of the drafter's config.json."""
        keys: dict[str, Any] = {KEY: list(self.top_level), "num_aux_hidden_states": len(self.top_level)}
        if self.nested is not None:
            keys[NESTED] = {"use_aux_hidden_state": True, KEY: list(self.nested)}
        return keys


# How a SGLang target class reads ids (`set_eagle3_layers_to_capture`).
_SGLANG_PLUS_ONE = frozenset(
    {
        "ApertusForCausalLM",
        "BailingMoEForCausalLM",
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Glm4MoeForCausalLM",
        "IQuestCoderForCausalLM",
        "InternLM3ForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "LlamaForCausalLM",
        "LongcatFlashForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
_SGLANG_DEEPSEEK = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
    }
)
_ENGINES = ("vllm", "sglang")
_ID_MEANS_AFTER = ("specforge", "torchspec", "modelopt", "automodel")


def trained_boundaries(aux_layer_ids: Sequence[int], offset: int, num_blocks: int) -> tuple[int, ...]:
    """The boundaries a drafter is trained on: `id + offset`, ascending, within 0..num_blocks."""
    return _checked([i + offset for i in aux_layer_ids], num_blocks, f"aux_layer_ids {list(aux_layer_ids)} + {offset}")


def default_boundaries(num_blocks: int) -> tuple[int, ...]:
    """What every reader with a default captures when a drafter names no ids: (2, n // 2, n - 3)."""
    default = (2, num_blocks // 2, num_blocks - 3)
    return _checked(sorted(set(default)), num_blocks, f"the default {default}")


def native_layer_ids(reader: Reader, boundaries: Sequence[int], num_blocks: int) -> list[int]:
    """The argument to the reader's own capture that makes it capture exactly `boundaries`.

    Raises CaptureError where no id expresses them. speculators also appends n, for the last hidden state.
    """
    asked = _checked(boundaries, num_blocks, "boundaries")
    if reader.engine == "sglang":
        return _sglang_ids(reader, asked, num_blocks)
    if reader.engine in _ID_MEANS_AFTER:
        if asked[0] == 0:
            raise CaptureError(f"{reader}: an id names a block's output, so none means boundary 0 (the embedding)")
        return [b - 1 for b in asked]
    if reader.engine == "speculators":
        return [*asked, num_blocks]
    return list(asked)


def predicted_boundaries(reader: Reader, drafter_config: Mapping[str, Any], num_blocks: int) -> tuple[int, ...]:
    """The boundaries that `reader` feeds a drafter with this config.json, ascending.

    Raises CaptureError where the reader would fail, where what it does was never measured, and, for transformers (this
    project's own reading), where the config names no ids: we never substitute.
    """
    ids = _read_ids(reader, drafter_config)
    if ids is None:
        if reader.engine == "transformers":
            raise CaptureError(f"the drafter's config names no {KEY}: nobody can know which boundaries it needs")
        fed = default_boundaries(num_blocks)
    else:
        fed = tuple(sorted(set(_boundaries(reader, ids, num_blocks))))
    if not fed:
        raise CaptureError(f"{reader}: an empty list of layer ids captures nothing")
    if fed[0] < 0 or fed[-1] > num_blocks:
        raise CaptureError(f"{reader}: ids {ids} mean boundaries {list(fed)}, but the target has 0..{num_blocks}")
    if reader.engine == "sglang":
        _refuse_unmeasured(reader, fed, num_blocks)
    if reader.engine in _ENGINES and len(fed) != (width := _fc_columns(drafter_config)):
        raise CaptureError(f"{reader}: captures {len(fed)} states, {list(fed)}, but the drafter's fc reads {width}")
    return fed


def exported_keys(
    boundaries: Sequence[int], num_blocks: int, model_class: str, sglang_version: str = SGLANG_VERSIONS[-1]
) -> ExportedKeys:
    """Keys that make vLLM (top level) and SGLang (nested) feed the same `boundaries` from one directory.

    Where SGLang's rule for `model_class` cannot express them, nested ids are left out and `refused` says why.
    """
    asked = _checked(boundaries, num_blocks, "boundaries")
    try:
        nested = _sglang_ids(Reader("sglang", sglang_version, model_class), asked, num_blocks)
    except CaptureError as error:
        return ExportedKeys(asked, None, str(error))
    return ExportedKeys(asked, tuple(nested))


def _checked(boundaries: Sequence[int], num_blocks: int, what: str) -> tuple[int, ...]:
    asked = tuple(boundaries)
    if not asked:
        raise CaptureError(f"{what}: at least one is needed")
    if any(b <= a for a, b in pairwise(asked)):
        raise CaptureError(f"{what}: {list(asked)} must ascend without repeats: engines capture in layer order")
    if asked[0] < 0 or asked[-1] > num_blocks:
        raise CaptureError(f"{what}: {list(asked)} is outside 0..{num_blocks}, the target's boundaries")
    return asked


def _read_ids(reader: Reader, config: Mapping[str, Any]) -> list[int] | None:
    """The ids this reader finds in the config, None if it falls back on its default."""
    top, nested = config.get(KEY), config.get(NESTED)
    inner, other = (nested.get(KEY), nested.get("layer_ids")) if isinstance(nested, Mapping) else (None, None)
    if reader.engine == "sglang":
        found = inner  # any problem in reading it is swallowed and means the default; an empty list is not
    elif reader.engine == "vllm":
        found = top or (inner if reader.runner == "v1" else other)
        if not found or not isinstance(found, list | tuple):
            return None
    elif reader.engine == "speculators":
        found = top
    elif reader.engine == "transformers":
        found = top if top is not None else inner
    else:
        found = inner if inner is not None else top
    if found is None:
        return None
    if not isinstance(found, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in found):
        raise CaptureError(f"{reader}: {KEY} must be a list of integers, not {found!r}")
    return list(found)


def _boundaries(reader: Reader, ids: Sequence[int], num_blocks: int) -> list[int]:
    """The boundaries that ids mean to this reader, in the order of the ids."""
    if reader.engine == "sglang":
        return [i + _sglang_offset(reader, ids, num_blocks) for i in ids]
    if reader.engine in _ID_MEANS_AFTER:
        return [i + 1 for i in ids]
    return list(ids)


def _sglang_offset(reader: Reader, ids: Sequence[int], num_blocks: int) -> int:
    name = reader.model_class
    if name in _SGLANG_PLUS_ONE:
        return 1
    if name in _SGLANG_DEEPSEEK:
        return 1 if ids and ids[0] == 1 else 0
    if name == "GptOssForCausalLM":
        return 0 if _at_least(reader.version, "0.5.23") and ids and max(ids) == num_blocks else 1
    raise CaptureError(f"{reader}: how this class reads layer ids is not known; read its set_eagle3_layers_to_capture")


def _sglang_ids(reader: Reader, boundaries: tuple[int, ...], num_blocks: int) -> list[int]:
    """Ids that SGLang reads as `boundaries`: of the two spellings, id = b - 1 is tried first.

    That order matters for deepseek_v2 with first boundary 2, where both work today: b - 1 also holds in versions that
    add one unconditionally.
    """
    _refuse_unmeasured(reader, boundaries, num_blocks)
    for ids in ([b - 1 for b in boundaries], list(boundaries)):
        if _boundaries(reader, ids, num_blocks) == list(boundaries):
            return ids
    raise CaptureError(f"{reader}: no ids mean {list(boundaries)}: this class adds 1 only if the first id is 1")


def _refuse_unmeasured(reader: Reader, boundaries: tuple[int, ...], num_blocks: int) -> None:
    if boundaries[0] == 0:
        raise CaptureError(f"{reader}: boundary 0 (the embedding) was never measured there; start at boundary 1")
    if boundaries[-1] == num_blocks and not (
        reader.model_class == "GptOssForCausalLM" and _at_least(reader.version, "0.5.23")
    ):
        raise CaptureError(
            f"{reader}: cannot capture the last block's output (boundary {num_blocks}); use {num_blocks - 1} or less"
        )


def _fc_columns(config: Mapping[str, Any]) -> int:
    """How many states the drafter's fc reads, as both engines work it out."""
    nested = config.get(NESTED)
    inner = nested.get(KEY) if isinstance(nested, Mapping) else None
    return config.get("num_aux_hidden_states") or (len(inner) if inner else 3)


def _at_least(version: str, bound: str) -> bool:
    try:
        numbers = [tuple(int(part) for part in v.split("+")[0].split(".")[:3]) for v in (version, bound)]
    except ValueError:
        raise CaptureError(f"SGLang version {version!r} is not of the form 0.5.23: its rule cannot be told") from None
    return numbers[0] >= numbers[1]
