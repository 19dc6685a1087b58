"""The known-answer pair on a real SGLang on the CPU: what tests of its server share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eagle3x.benchmark.config import Speculation
from eagle3x.config import TargetConfig
from eagle3x.diagnosis.known_answer import EOS, START, VOCAB, KnownAnswer, build
from eagle3x.engines import interpreter
from eagle3x.engines.server_endpoint import ServerEndpoint
from eagle3x.engines.sglang_serve import Launch, capacity
from eagle3x.targets import resolve
from eagle3x.types import Completion, Request, SpecCounters

K = 3
EOS_AT = 18
"""The third token of a verify step: two drafts before it are accepted, and what comes behind it is counted too."""
MISSING = (11, 12)
LENGTH = 512
SETTLE_SECONDS = 10.0
CHAIN = Speculation.chain(K)
TREE = Speculation(num_speculative_tokens=K, topk=2, num_draft_tokens=7)
REQUESTS = tuple(
    Request(f"{start}", (40, 9, start), max_tokens=5 + 3 * (start % 9), ignore_eos=start % 2 == 0)
    for start in range(START, START + 24)
    if start != EOS
)


def scaled_pair(folder: Path) -> KnownAnswer:
    """The pair, its target's logits scaled by the token they follow: other top-2 gaps, the same text."""
    pair = build(folder, K, MISSING, EOS_AT)
    file = pair.target_dir / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][:, :VOCAB] *= 1 + torch.arange(VOCAB) / VOCAB
    save_file(weights, file, metadata={"format": "pt"})
    return pair


def launch_of(known: KnownAnswer, log: Path) -> Launch:
    """A server of its target, for 8 requests of at most LENGTH tokens."""
    target = resolve(
        TargetConfig(
            name="known", path=str(known.target_dir), wheel=None, hub_id=None, revision=None,
            trust_remote_code=False, aux_layer_ids=(3, 5, 8),
        )
    )  # fmt: skip
    arguments = {
        "model_path": str(known.target_dir), "device": "cpu", "dtype": "float32", "attention_backend": "torch_native",
        "prefill_attention_backend": "intel_amx", "decode_attention_backend": "intel_amx",
        "sampling_backend": "pytorch", "grammar_backend": "none", "disable_cuda_graph": True,
        "disable_radix_cache": True, "skip_tokenizer_init": True, "sleep_on_idle": True, "random_seed": 0,
        "mem_fraction_static": 0.3, **capacity(8, LENGTH, LENGTH),
    }  # fmt: skip
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return Launch(
        interpreter.find("sglang", None, "cpu"), target, arguments, variables, device="cpu", attention="intel_amx",
        quantization=None, log=log, timeout=400,
    )  # fmt: skip


def check(completions: Sequence[Completion], requests: Sequence[Request], known: KnownAnswer) -> None:
    for asked, done in zip(asked_of(completions, requests), completions, strict=True):
        assert done.token_ids == known.output(asked.prompt_ids, asked.max_tokens, asked.ignore_eos)
        assert done.finish == ("stop" if not asked.ignore_eos and done.token_ids[-1] == EOS else "length")
        assert len(done.token_ids) == asked.max_tokens or not asked.ignore_eos
        assert done.timing.start < done.timing.first_token < done.timing.end


def asked_of(completions: Sequence[Completion], requests: Sequence[Request]) -> list[Request]:
    by_id = {r.id: r for r in requests}
    return [by_id[c.id] for c in completions]


def settled(endpoint: ServerEndpoint, before: SpecCounters | None, wanted: SpecCounters) -> SpecCounters | None:
    """The totals' difference."""
    deadline = time.monotonic() + SETTLE_SECONDS
    assert before is not None
    while True:
        after = endpoint.totals()
        assert after is not None
        if after - before == wanted or time.monotonic() > deadline:
            return after - before
        time.sleep(0.05)
