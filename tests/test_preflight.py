"""What cannot work is refused before any work, with what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3x.composition import cells
from eagle3x.preflight import check
from eagle3x.targets import Target
from eagle3x.types import ConfigError

REFUSED = {
    ("target.path=/nowhere",): "/nowhere does not exist",
    ("backend=vllm", "attention=triton"): "attention=triton: vLLM has one attention backend on a CPU",
    ("backend=vllm", "speculation.num_speculative_tokens=129", "sampling.continuation_tokens=129"): "at most 128",
    ("speculation=tree",): "topk=4: transformers drafts chains only; use speculation=chain",
    ("backend=vllm", "speculation=tree"): "topk=4: vLLM drafts chains only; use speculation=chain",
    ("backend=vllm", "backend.python=/nowhere/python"): "make env-vllm-cpu",
    ("backend=vllm", "benchmark.temperatures=[0,0.7]"): "loses the temperature of requests when it speculates on a CPU",
    ("backend=sglang", "benchmark.temperatures=[0,0.7]"): "SGLang verifies greedily on a CPU",
    ("quantization=nvfp4",): "extract: quantization=nvfp4: its 4-bit floats have kernels on GPUs alone",
    ("quantization@serve.quantization=fp8_online",): "serve: quantization=fp8_online: is made by an engine",
    ("attention=flashinfer",): "sdpa",
    ("target.aux_layer_ids=[1,2,7]",): "0..6",
    ("capture=plus_one", "target.aux_layer_ids=[1,2,6]"): "outside 0..6",
    ("drafter=pretrained", "drafter.path=/nowhere"): "no such directory",
    ("drafter=pretrained", "drafter.hub_id=no/such/repository"): "no repository of the hub",
    ("drafter.init_from=/nowhere/at/all",): "no repository of the hub",
    ("drafter=pretrained", "drafter.path=published"): "drafter.boundaries=[0,2,3] or [1,3,4]",
    ("drafter.init_from=published", "drafter.made_by=specforge"): "trained on boundaries [1, 3, 4]",
    ("data=jsonl", "data.path=/nowhere.jsonl"): "does not exist",
    ("+data.chat_template_kwargs.enable_thinking=false",): "chat template has no enable_thinking",
    ("responses.from=/nowhere.parquet",): "no such file",
    ("hidden_states.from=/nowhere",): "no such directory",
    ("artifacts=a_file/store",): "is a file",
    ("tracking=online",): "wandb login",
    ("train.precision=bf16",): "bf16 needs hardware=cuda",
    ("train.freeze_head=true", "drafter.init=random"): "keeps a random head",
    ("backend.tensor_parallel=2",): "tensor_parallel",
}


def fixed(target: Target) -> list[str]:
    return ["target=directory", f"target.path={target.path}", "target.aux_layer_ids=[1,2,4]"]


@pytest.fixture(autouse=True)
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    (tmp_path / "published").symlink_to(Path(__file__).parent / "fixtures" / "drafters" / "specforge-yarn")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def test_the_small_target_passes(tiny_target: Target) -> None:
    check(cells(fixed(tiny_target), multirun=False)[0].config)


@pytest.mark.parametrize("overrides", REFUSED)
def test_refused(overrides: tuple[str, ...], tiny_target: Target) -> None:
    cfg = cells([*fixed(tiny_target), *overrides], multirun=False)[0].config
    with pytest.raises(ConfigError) as error:
        check(cfg)
    assert REFUSED[overrides] in str(error.value)


def test_only_slots_that_are_opened_are_asked(tiny_target: Target) -> None:
    unservable = ["backend@serve.backend=sglang", "attention@serve.attention=sdpa"]
    check(cells([*fixed(tiny_target), "stage=hidden_states", *unservable], multirun=False)[0].config)
