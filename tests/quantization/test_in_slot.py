"""What a slot runs: the target as it is stored, or rounded once and found again; and what is hashed of it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3x.composition import cells
from eagle3x.config import Hardware
from eagle3x.engines import adapter
from eagle3x.engines.config import Attention, Backend, EngineName, Quantization, Slot
from eagle3x.quantization import cpu, in_slot, marlin, rounding, support
from eagle3x.quantization.stored import stored_as, stored_scheme
from eagle3x.stage_identity import identities
from eagle3x.targets import Target, resolve
from eagle3x.types import ConfigError

CPU, CUDA = (Hardware(device=device, threads=None, devices=None) for device in ("cpu", "cuda"))
SCHEMES = [scheme for scheme in get_args(get_type_hints(Quantization)["scheme"]) if scheme != "none"]
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4, "group_size": 32}, "targets": ["Linear"]}},
}


def slot(scheme: str, **changes: Any) -> Slot:
    values: dict[str, Any] = {
        "name": "transformers", "runner": "auto",
        "dtype": "auto", "kv_cache_dtype": "auto", "tensor_parallel": 1, "batch_size": 8,
        "engine_args": {}, "python": None, "url": None, "port": None, "memory_fraction": 0.85, "start_timeout": 60.0,
    }  # fmt: skip
    quantization = Quantization(scheme=scheme)  # type: ignore[arg-type]
    return Slot("serve", Backend(**(values | changes)), quantization, Attention(name="auto"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpu, "sums_overflow", lambda: False)
    monkeypatch.setattr(cpu, "has_avx512", lambda: True)
    monkeypatch.setenv("EAGLE3X_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "targets"


def test_an_unquantized_slot_has_the_target(tiny_target: Target, own_cache: Path) -> None:
    assert in_slot.in_slot(slot("none"), tiny_target, CPU) is tiny_target
    assert in_slot.in_slot(slot("fp8_online"), tiny_target, CPU) is tiny_target
    assert not own_cache.exists()


def test_a_target_is_rounded_once(tiny_target: Target, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = in_slot.in_slot(slot("int8"), tiny_target, CPU)
    assert made == replace(tiny_target, path=made.path)
    assert stored_scheme(made) == "int8"
    assert [file.name for file in own_cache.iterdir() if file.is_dir()] == [made.path.name]
    monkeypatch.setattr(rounding, "write", lambda *_: pytest.fail("it is there already"))
    assert in_slot.in_slot(slot("int8"), tiny_target, CPU) == made
    assert in_slot.in_slot(slot("int8"), made, CPU) == made  # what is stored so is left alone
    monkeypatch.undo()


def test_what_failed_is_not_there(tiny_target: Target, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(source: Path, scheme: str, directory: Path, narrow: bool) -> None:
        directory.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(rounding, "write", die)
    with pytest.raises(OSError, match="disk full"):
        in_slot.in_slot(slot("int4"), tiny_target, CPU)
    assert [file.name for file in own_cache.iterdir() if file.is_dir()] == []


def test_another_target_another_scheme_another_recipe_are_other_places(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_target: Callable[..., None]
) -> None:
    write_target(tmp_path / "other", seed=1)
    other = replace(tiny_target, path=tmp_path / "other")
    first = in_slot.in_slot(slot("int8"), tiny_target, CPU).path
    found = {
        first,
        in_slot.in_slot(slot("int4"), tiny_target, CPU).path,
        in_slot.in_slot(slot("int8"), other, CPU).path,
    }
    monkeypatch.setattr(rounding, "VERSION", rounding.VERSION + 1)
    found.add(in_slot.in_slot(slot("int8"), tiny_target, CPU).path)
    assert len(found) == 4


def test_a_rounded_targets_head_and_norm_are_read_from_it(tiny_target: Target) -> None:
    made = in_slot.in_slot(slot("int4"), tiny_target, CPU)
    file = made.path / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": tiny_target.head() * 2}, file, metadata={"format": "pt"})
    assert (made.head() == tiny_target.head() * 2).all()
    assert (made.final_norm() == tiny_target.final_norm()).all()


def test_how_it_is_rounded_is_hashed(tiny_target: Target) -> None:
    """What an unquantized slot hashes is what it hashed before there were others."""
    rounded = {"version": 1, "compressed-tensors": version("compressed-tensors")}
    a = adapter("transformers")
    plain, int8 = (a.identity(slot(scheme), tiny_target, CPU) for scheme in ("none", "int8"))
    assert "rounding" not in plain
    assert int8 == {**plain, "quantization": "int8", "rounding": rounded}
    fixed = ["target=directory", f"target.path={tiny_target.path}", "target.aux_layer_ids=[1,2,4]"]

    def drafter(*overrides: str) -> Any:
        cfg = cells([*fixed, *overrides], multirun=False)[0].config
        return identities("drafter", ("quantization",), cfg, resolve(cfg.target))["quantization"]

    assert drafter() == drafter("quantization@serve.quantization=int8") == {"scheme": "none"}
    assert drafter("quantization=int4") == {"scheme": "int4", "rounding": rounded}


def test_codes_are_narrow_where_a_cpu_cuts_their_sums_off(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """INT8 alone, and on a CPU alone: another checkpoint, and another key."""
    wide = in_slot.in_slot(slot("int8"), tiny_target, CPU)
    monkeypatch.setattr(cpu, "sums_overflow", lambda: True)
    narrow = in_slot.in_slot(slot("int8"), tiny_target, CPU)
    assert in_slot.identity(slot("int8"), tiny_target, CPU)["rounding"]["narrow"] is True
    assert in_slot.in_slot(slot("int8"), tiny_target, CUDA) == wide != narrow
    assert in_slot.identity(slot("int4"), tiny_target, CPU) == in_slot.identity(slot("int4"), tiny_target, CUDA)
    for made, largest in ((wide, 128), (narrow, 64)):
        codes = [t.int().abs() for t in load_file(made.path / "model.safetensors").values() if t.dtype == torch.int8]
        assert max(int(c.max()) for c in codes) == largest
    (reason,) = support.refusals("vllm", slot("int8", name="vllm"), wide, CPU)
    assert "has no VNNI" in reason
    assert support.refusals("vllm", slot("int8", name="vllm"), tiny_target, CPU) == []
    assert support.refusals("transformers", slot("int8"), wide, CPU) == []


def test_a_server_that_runs_is_not_made_anything(tiny_target: Target) -> None:
    attached = slot("int4", name="vllm", url="http://127.0.0.1:1")
    assert in_slot.in_slot(attached, tiny_target, CPU) is tiny_target
    assert in_slot.identity(attached, tiny_target, CPU) == {}
    assert in_slot.reference_target(attached, tiny_target, CPU) is tiny_target


def test_the_reference_is_rounded_alike(tiny_target: Target) -> None:
    int8 = in_slot.in_slot(slot("int8"), tiny_target, CPU)
    assert in_slot.reference_target(slot("int8", name="vllm"), tiny_target, CPU) == int8
    assert stored_scheme(in_slot.reference_target(slot("fp8_online", name="vllm"), tiny_target, CPU)) == "fp8"
    assert in_slot.reference_target(slot("none", name="vllm"), tiny_target, CPU) is tiny_target


def test_a_slot_must_say_how_the_target_is_stored(
    tiny_target: Target, tmp_path: Path, quantized_copy: Callable[[Path, dict[str, Any]], Target]
) -> None:
    target = quantized_copy(tmp_path, INT4)
    assert stored_as(target) == "int4 (compressed-tensors, pack-quantized, groups of 32)"
    assert stored_as(tiny_target) == "not quantized"
    assert adapter("transformers").refusals(slot("int4"), target, CPU) == []
    for scheme in ("none", "int8"):
        (reason,) = adapter("transformers").refusals(slot(scheme), target, CPU)
        assert f"stored as {stored_as(target)}; use quantization=int4" in reason


def test_an_unknown_kind_is_refused(tmp_path: Path, quantized_copy: Callable[[Path, dict[str, Any]], Target]) -> None:
    target = quantized_copy(tmp_path, {"quant_method": "odd"})
    with pytest.raises(ConfigError, match="is not known"):
        stored_scheme(target)
    assert "is not known" in support.refusals("vllm", slot("none"), target, CPU)[0]


def test_the_table_is_whole(tiny_target: Target) -> None:
    """Every engine, device and scheme has a row: it ran in a version, it was read, or it is refused with what runs."""
    engines = get_args(EngineName)
    assert set(support.TABLE) == {(engine, device) for engine in engines for device in ("cpu", "cuda")}
    for (engine, device), rows in support.TABLE.items():
        assert set(rows) == set(SCHEMES)
        for scheme, row in rows.items():
            assert row.ran is None or row.refused is None
            assert row.refused is None or "use " in row.refused
            found = support.refusals(engine, slot(scheme), tiny_target, CPU if device == "cpu" else CUDA)
            if scheme == "nvfp4" and row.refused is None:
                assert "give one as the target" in found[0]  # it runs, but is not made here
            elif (engine, device, scheme) == ("sglang", "cuda", "int4"):
                assert "q, k and v (32 x 64)" in found[0]  # it runs, but not this target
            else:
                assert found == ([] if row.refused is None else [f"quantization={scheme}: {row.refused}"])


def test_int4_on_sglang_takes_matrices_that_its_tiles_divide(tiny_target: Target) -> None:
    """SmolLM2 was seen to fail there; Llama-3.1-8B's sizes are multiples of 128, also on 4 GPUs."""
    smollm2 = replace(
        tiny_target, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64
    )  # fmt: skip
    llama = replace(
        tiny_target, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128
    )  # fmt: skip
    assert marlin.untiled(smollm2, 1) == ["q, k and v (576 x 960)", "o (576 x 576)"]
    assert (marlin.untiled(llama, 1), marlin.untiled(llama, 4)) == ([], [])
    (reason,) = support.refusals("sglang", slot("int4", name="sglang"), smollm2, CUDA)
    assert "o (576 x 576); use vLLM" in reason
    assert support.refusals("vllm", slot("int4", name="vllm"), smollm2, CUDA) == []


def test_int4_on_vllm_takes_avx512(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_avx512", lambda: False)
    (reason,) = support.refusals("vllm", slot("int4", name="vllm"), tiny_target, CPU)
    assert "no kernel for it" in reason
    assert "use backend=transformers" in reason
    assert support.refusals("vllm", slot("int4", name="vllm"), tiny_target, CUDA) == []
    assert support.refusals("transformers", slot("int4"), tiny_target, CPU) == []


@pytest.mark.parametrize(
    ("machine", "flags", "overflow", "avx512"),
    [
        ("x86_64", "fma avx2", True, False),
        ("x86_64", "avx2 avx_vnni", False, False),
        ("x86_64", "avx2 avx512f avx512_vnni amx_int8", False, True),
        ("x86_64", "avx2 avx512f", True, True),
        ("aarch64", "asimddp", False, False),
    ],
)
def test_what_a_cpu_says_of_itself(
    machine: str, flags: str, overflow: bool, avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu, "_flags", lambda: frozenset(flags.split()))
    assert (cpu.sums_overflow(), cpu.has_avx512()) == (overflow, avx512)


def test_what_never_ran_goes_on_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "eagle3x")
    support.warn("vllm", slot("int8"), CPU)
    support.warn("sglang", slot("none"), CPU)
    assert caplog.messages == []
    support.warn("vllm", slot("nvfp4"), CUDA)
    assert caplog.messages == ["quantization=nvfp4: never run by eagle3x with vllm on cuda; going on"]
