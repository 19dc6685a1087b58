"""The streamed reference is the whole one, bit by bit, and runs in memory that the whole target does not fit into."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eagle3x.diagnosis import reference as reference_module
from eagle3x.diagnosis.captured_text import Text, captured
from eagle3x.diagnosis.reference import must_stream, reference_model, reference_states, run_reference
from eagle3x.diagnosis.reference_cache import ReferenceCache
from eagle3x.diagnosis.streamed_reference import StreamedTarget
from eagle3x.targets import Target
from eagle3x.types import EagleError, TokenSample

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import target_classes

TEXT = [(i * 7 + 3) % 128 for i in range(48)]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where states are kept: each test's own."""
    monkeypatch.setenv("EAGLE3X_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reference"


@pytest.mark.parametrize("name", target_classes.CLASSES)
def test_it_is_the_whole_reference(name: str, tiny_target: Target, tmp_path: Path) -> None:
    """Grouped heads, biases, q and k norms, experts stored one by one, latent attention, yarn, windows and sinks."""
    target = target_classes.write(name, tmp_path / name, tiny_target)
    whole = run_reference(reference_model(target), TEXT)
    (streamed,) = StreamedTarget(target).references([TEXT])
    assert streamed.candidates == whole.candidates
    assert torch.equal(streamed.states, whole.states)


def test_the_real_target(smollm2: Target) -> None:
    whole = run_reference(reference_model(smollm2), TEXT)
    (streamed,) = StreamedTarget(smollm2).references([TEXT])
    assert torch.equal(streamed.states, whole.states)


def test_capture_of_many_texts(tiny_target: Target, kept: Path) -> None:
    """Against transformers' own hidden states; what was captured is read again, not computed."""
    samples = [TokenSample(str(n), tuple(TEXT[:n])) for n in (20, 48, 7)]
    found = list(StreamedTarget(tiny_target).capture(samples, (0, 3, 6)))
    model = AutoModelForCausalLM.from_pretrained(tiny_target.path, dtype=torch.float32).eval()
    for sample, states in zip(samples, found, strict=True):
        with torch.no_grad():
            out = model(input_ids=torch.tensor([sample.token_ids]), output_hidden_states=True).hidden_states
        assert (states.id, states.token_ids, states.last_norm) == (sample.id, sample.token_ids, "post_norm")
        first, third, last = states.aux.chunk(3, dim=1)
        torch.testing.assert_close(first, out[0][0])
        torch.testing.assert_close(third, out[3][0])
        torch.testing.assert_close(states.last, out[6][0])
        torch.testing.assert_close(model.model.norm(last).detach(), out[6][0])
    files = {file.name: file.stat().st_mtime_ns for file in kept.iterdir()}
    assert len(files) == 3
    more = [*samples, TokenSample("new", tuple(TEXT[5:30]))]
    again = {s.id: s for s in StreamedTarget(tiny_target).capture(more, (0, 3, 6))}
    assert all(torch.equal(again[s.id].aux, s.aux) and torch.equal(again[s.id].last, s.last) for s in found)
    assert {name: (kept / name).stat().st_mtime_ns for name in files} == files
    assert len(list(kept.iterdir())) == 4
    text = Text("t", tuple(TEXT), 8, 32)
    (one,) = captured(StreamedTarget(tiny_target), [text], (0, 3))
    assert torch.equal(one.at(3), found[1].aux[:, 32:64])
    with pytest.raises(EagleError, match="boundar"):
        list(StreamedTarget(tiny_target).capture(samples, (3, 7)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", target_classes.CLASSES)
def test_blocks_on_a_gpu(name: str, tiny_target: Target, tmp_path: Path) -> None:
    target = target_classes.write(name, tmp_path / name, tiny_target)
    sample = TokenSample("text", tuple(TEXT))
    (cpu,), (gpu,) = (StreamedTarget(target, torch.device(d)).capture([sample], range(7)) for d in ("cpu", "cuda"))
    torch.testing.assert_close(gpu.aux, cpu.aux, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(gpu.last, cpu.last, rtol=1e-3, atol=1e-3)


def test_what_cannot_be_read_again_is_computed_again(tiny_target: Target, kept: Path) -> None:
    (first,) = StreamedTarget(tiny_target).references([TEXT])
    (file,) = kept.iterdir()
    file.write_bytes(b"torn")
    (again,) = StreamedTarget(tiny_target).references([TEXT])
    assert torch.equal(again.states, first.states)
    loaded = ReferenceCache(tiny_target, "cpu").load_reference(TEXT)
    assert loaded is not None
    assert (loaded.candidates, loaded.num_blocks) == (first.candidates, 6)


INT8_INPUTS = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}


def quantized(target: Target, folder: Path, bits: int, inputs: dict[str, Any] | None = None) -> Target:
    """The target's projections rounded to nearest: int8 by row or int4 in groups of 8, as compressed-tensors has it."""
    path = shutil.copytree(target.path, folder)
    tensors = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        rows, columns = weight.shape
        grouped = weight.reshape(rows, -1, 8 if bits == 4 else columns)
        scale = grouped.abs().amax(2, keepdim=True) / (2 ** (bits - 1) - 1)
        codes = (grouped / scale).round().reshape(rows, columns)
        tensors[f"{name}_scale"] = scale[:, :, 0].contiguous()
        if bits == 8:
            tensors[name] = codes.to(torch.int8)
            continue
        digits = (codes.long() + 8).reshape(rows, -1, 8) * 16 ** torch.arange(8)
        tensors[f"{name}_packed"] = digits.sum(2).to(torch.uint32).view(torch.int32)
        tensors[f"{name}_shape"] = torch.tensor([rows, columns])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    groups = {"group_0": {"weights": {"num_bits": bits, "type": "int"}, "input_activations": inputs}}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": groups}
    (path / "config.json").write_text(json.dumps(config))
    return dataclasses.replace(target, path=path)


@pytest.mark.parametrize(("bits", "inputs"), [(8, None), (8, INT8_INPUTS), (4, None)])
def test_a_quantized_target(bits: int, inputs: dict[str, Any] | None, tiny_target: Target, tmp_path: Path) -> None:
    """Against the whole target with weights, and inputs of its projections, that were rounded here."""
    target = quantized(tiny_target, tmp_path / "quantized", bits, inputs)
    model = reference_model(tiny_target)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                rows, columns = weight.shape
                grouped = weight.reshape(rows, -1, 8 if bits == 4 else columns)
                scale = grouped.abs().amax(2, keepdim=True) / (2 ** (bits - 1) - 1)
                weight.copy_(((grouped / scale).round() * scale).reshape(rows, columns))

    def rounded(_module: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
        scale = args[0].abs().amax(-1, keepdim=True) / 127
        return (args[0] / scale).round() * scale

    if inputs:
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(rounded)
    expected = run_reference(model, TEXT)
    (found,) = StreamedTarget(target).references([TEXT])
    assert torch.equal(found.states, expected.states)
    assert (found.of(6) - reference_states(tiny_target, TEXT).of(6)).norm() > 0.01 * found.of(6).norm()


def test_half_of_the_free_memory_is_for_the_weights(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 4 * sum(t.numel() for t in load_file(tiny_target.path / "model.safetensors").values())
    monkeypatch.setattr(reference_module, "available_memory", lambda: 2 * needed)
    assert not must_stream(tiny_target)
    path = shutil.copytree(tiny_target.path, tmp_path / "target")
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (path / "config.json").write_text(json.dumps(config))
    assert must_stream(dataclasses.replace(tiny_target, path=path))
    whole = reference_states(tiny_target, TEXT)
    monkeypatch.setattr(reference_module, "available_memory", lambda: 2 * needed - 2)
    assert must_stream(tiny_target)
    assert torch.equal(reference_states(tiny_target, TEXT).states, whole.states)


def test_a_checkpoint_that_lacks_a_weight_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_target.path, tmp_path / "target")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.4.mlp.up_proj.weight"]
    tensors["model.layers.5.mlp.up_proj.weight"] = torch.ones(3, 3)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EagleError, match=r"missing or of another shape: model\.layers\.4\.mlp\.up_proj\.weight$"):
        list(StreamedTarget(dataclasses.replace(tiny_target, path=path)).references([TEXT]))


def test_a_decoder_that_does_more_between_its_blocks_is_refused(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm.forward
    monkeypatch.setattr(
        transformers.models.llama.modeling_llama.LlamaRMSNorm, "forward", lambda self, x: norm(self, x) + torch.rand(1)
    )
    with pytest.raises(EagleError, match="does more than hand its stream from block to block"):
        list(StreamedTarget(tiny_target).references([TEXT]))


HIDDEN, BLOCKS = 512, 12
LIMITED = """
import os, resource, sys
from pathlib import Path
import torch
from eagle3x.diagnosis.reference import reference_model
from eagle3x.diagnosis.streamed_reference import StreamedTarget
from eagle3x.config import TargetConfig
from eagle3x.targets import resolve

def target_at(path):
    return resolve(TargetConfig(
        name="target", path=path, wheel=None, hub_id=None, revision=None, trust_remote_code=False, aux_layer_ids=(1, 3),
    ))

small, large = map(target_at, sys.argv[1:3])
room, text = int(sys.argv[3]), [int(token) for token in sys.argv[4].split(",")]
list(StreamedTarget(small).references([text]))  # what is imported on the way is not what is measured
status = Path("/proc/self/status").read_text()
data = int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]) * 1024
# A checkpoint that is mapped counts as data too, although its pages can always be dropped.
limit = data + (large.path / "model.safetensors").stat().st_size + room
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if (child := os.fork()) == 0:
    try:
        reference_model(large)
    except (RuntimeError, MemoryError) as error:
        os._exit(0 if "memory" in str(error) or isinstance(error, MemoryError) else 2)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0, "the whole target fits: this test says nothing"
list(StreamedTarget(large).references([text]))
"""


def test_in_less_memory_than_the_target_takes(tiny_target: Target, tmp_path: Path) -> None:
    """12 blocks of 23 MB in float32, stored in bfloat16; with 126 MB for weights, states and threads."""
    path = tmp_path / "large"
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128, hidden_size=HIDDEN, intermediate_size=3072, num_hidden_layers=BLOCKS,
            num_attention_heads=8, num_key_value_heads=8, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    needed = 4 * sum(p.numel() for p in model.parameters())
    model.bfloat16().save_pretrained(path)
    del model
    for file in tiny_target.path.iterdir():
        if "token" in file.name:
            shutil.copyfile(file, path / file.name)
    room = 120 * 1024**2
    assert needed > 2 * room
    text = ",".join(map(str, TEXT))
    # Tensors above 1 MB go back to the system when they are freed, as a large target's, above 32 MB, always do.
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1024**2)}
    environment = os.environ | malloc | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tiny_target.path), str(path), str(room), text],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    target: Any = dataclasses.replace(tiny_target, path=path, num_blocks=BLOCKS)
    streamed = ReferenceCache(target, "cpu").load_reference(TEXT)
    assert streamed is not None
    expected = run_reference(reference_model(target), TEXT)
    assert streamed.candidates == expected.candidates
    torch.testing.assert_close(streamed.states, expected.states, rtol=1e-6, atol=1e-6)
