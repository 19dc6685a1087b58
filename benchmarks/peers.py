"""The step of other trainers of EAGLE-3 drafters, by their own classes, in turns with ours on the same documents.

    python benchmarks/trainer.py peers --shape 8B     # one H200

Needs specforge 0.2.0 and speculators 0.9.0 on PYTHONPATH, of what they import hs_connectors, pydantic and loguru; and
openai and datasets, of which nothing is used here. Every trainer has a process of its own (this file, called with its
name), so that all compile at a time; then one after the other is told to time its steps while the others wait.

What each does by itself is left to it: SpecForge trains the head, meets the whole vocabulary's teacher, and takes flex
attention and AdamW on float32 masters; speculators freezes the head, and takes simple flex attention, its fused KL loss
and here AdamW, which it does faster than its default, Muon. Neither leaves rows out that are not in the loss. They are
given full attention, 7 TTT steps, the mask and the random states of ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from random_training import SHAPES, BareStep, Bench, Shape, measured, wait
from torch import Tensor

from eagle3x.data.shards import Sample, Shards
from eagle3x.training.datamodule import DraftData

TTT_STEPS = 7
HEADER = "| trainer | ratio | to | ms a step | tokens/s | host ms | peak GiB |\n|" + " --- |" * 7
OURS, OURS_FROZEN, SPECFORGE, SPECULATORS = "eagle3x", "eagle3x, head frozen", "SpecForge", "speculators, head frozen"
PAIRS = ((SPECFORGE, OURS), (SPECULATORS, OURS_FROZEN))


@dataclass(frozen=True)
class Inputs:
    """B documents of S tokens: ids [B, S], aux [B, S, 3H], last [B, S, H], mask [B, S] (1: in the loss)."""

    ids: Tensor
    aux: Tensor
    last: Tensor
    mask: Tensor

    @classmethod
    def of(cls, documents: Sequence[Sample], device: torch.device) -> Inputs:
        """Documents of one length, one below the other."""
        names = ("token_ids", "aux", "last", "loss_mask")
        ids, aux, last, mask = (torch.stack([getattr(d, name) for d in documents]).to(device) for name in names)
        return cls(ids, aux, last, mask.long())


@dataclass(frozen=True)
class Vocabulary:
    """The target's head [V, H], and which of its rows are the drafter's: t2d [V], d2t [D].

    Random; the other rows are smaller, so that the target's argmax lies among the drafter's, as it mostly does where a
    vocabulary was built from text.
    """

    head: Tensor
    t2d: Tensor
    d2t: Tensor

    @classmethod
    def of(cls, shape: Shape, device: torch.device) -> Vocabulary:
        """Drawn."""
        random = torch.Generator().manual_seed(7)
        ids = torch.randperm(shape.vocab, generator=random)[: shape.draft_vocab].sort().values
        t2d = torch.zeros(shape.vocab, dtype=torch.bool)
        t2d[ids] = True
        head = torch.randn(shape.vocab, shape.hidden, device=device, dtype=torch.bfloat16) * (1.28 / shape.hidden**0.5)
        head[~t2d.to(device)] *= 0.8
        return cls(head, t2d, ids - torch.arange(shape.draft_vocab))


def llama(shape: Shape, **more: Any) -> Any:
    """The drafter's block, as both take it."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=1,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab, max_position_embeddings=131072, rms_norm_eps=1e-5, hidden_act="silu",
        tie_word_embeddings=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }, **more,
    )  # fmt: skip


def specforge(shape: Shape, device: torch.device, inputs: Inputs) -> Callable[[], None]:
    """SpecForge's offline step: its strategy on states, and its optimizer (clip 0.5, cosine)."""
    from specforge.algorithms.eagle3.model import OnlineEagle3Model  # pyright: ignore[reportMissingImports]
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # pyright: ignore[reportMissingImports]
    from specforge.modeling.target.target_head import TargetHead  # pyright: ignore[reportMissingImports]
    from specforge.optimizer import BF16Optimizer  # pyright: ignore[reportMissingImports]
    from specforge.runtime.contracts import TrainBatch  # pyright: ignore[reportMissingImports]
    from specforge.training.strategies.base import Eagle3TrainStrategy  # pyright: ignore[reportMissingImports]

    vocabulary, attention = Vocabulary.of(shape, device), "flex_attention" if device.type == "cuda" else "sdpa"
    cfg = llama(shape, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=shape.draft_vocab)
    if not hasattr(cfg, "pretraining_tp"):
        cfg.pretraining_tp = 1
    with device:
        draft = LlamaForCausalLMEagle3(cfg, attention_backend=attention).to(dtype=torch.bfloat16)
    draft.freeze_embedding()
    draft.t2d.copy_(vocabulary.t2d)
    draft.d2t.copy_(vocabulary.d2t)
    draft.vocab_mapping_loaded = True
    model = OnlineEagle3Model(draft_model=draft.to(device), length=TTT_STEPS, attention_backend=attention).train()
    head = TargetHead.__new__(TargetHead)  # its constructor reads a checkpoint
    torch.nn.Module.__init__(head)
    head.config, head.hidden_size, head.vocab_size = cfg, shape.hidden, shape.vocab
    with torch.device("meta"):
        head.fc = torch.nn.Linear(shape.hidden, shape.vocab, bias=False)
    head.fc.weight = torch.nn.Parameter(vocabulary.head, requires_grad=False)
    strategy = Eagle3TrainStrategy(model, target_head=head.eval())
    optimizer = BF16Optimizer(draft, lr=1e-4)
    mask = inputs.mask.clone()
    mask[:, -1] = 0  # as it normalises an offline sample
    batch = TrainBatch(
        sample_ids=[str(i) for i in range(len(mask))], strategy="eagle3", metadata={"target_repr": "hidden_state"},
        tensors={
            "input_ids": inputs.ids, "attention_mask": torch.ones_like(mask), "loss_mask": mask,
            "hidden_state": inputs.aux, "target": inputs.last,
        },
    )  # fmt: skip

    def step() -> None:
        strategy.forward_loss(batch).loss.backward()
        optimizer.step()

    return step


def compilable_on_torch_2_11() -> None:
    """speculators' fused loss as torch 2.11 can compile it (pytorch issue 177600: it takes a kernel's list of configs
    for a fresh object), and a sort that it compiles for minutes (issue 182060) left to ATen: compile time alone."""
    import speculators.losses.fused as fused  # pyright: ignore[reportMissingImports]
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import builder, functions
    from torch._inductor import ir

    def wrapped(self: Any, obj: Any, tx: Any, var: Any, name: str) -> Any:
        return builder.VariableBuilder(tx, AttrSource(var.kernel_source, str(name)))(obj)

    functions.DynamoTritonHOPifier.wrap_user_defined_obj = wrapped  # type: ignore[method-assign]
    fused.loss_backward_kernel.configs = list(fused.loss_backward_kernel.configs)
    ir.Sort.create = classmethod(lambda cls, *a, **k: (None, None))  # type: ignore[method-assign]


def speculators(shape: Shape, device: torch.device, inputs: Inputs) -> Callable[[], None]:
    """speculators' training step with the settings of its command line, full attention and AdamW."""
    from speculators import SpeculatorsConfig, VerifierConfig  # pyright: ignore[reportMissingImports]
    from speculators.models.eagle3 import (  # pyright: ignore[reportMissingImports]
        Eagle3DraftModel,
        Eagle3SpeculatorConfig,
    )  # fmt: skip
    from speculators.proposals.greedy import GreedyTokenProposalConfig  # pyright: ignore[reportMissingImports]
    from speculators.train.optimizers import build_optimizers  # pyright: ignore[reportMissingImports]
    from transformers import get_linear_schedule_with_warmup

    on_gpu = device.type == "cuda"
    if on_gpu and torch.__version__.startswith("2.11."):
        compilable_on_torch_2_11()
    layer = llama(shape, layer_types=["full_attention"], use_sliding_window=False)
    layer._attn_implementation = "simple_flex_attention" if on_gpu else "eager"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=TTT_STEPS)
    cfg = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=shape.draft_vocab, norm_before_residual=True,
        norm_before_fc=True, fc_norm=False, norm_output=True, embed_requires_grad=False,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
    )  # fmt: skip
    with device:
        model = Eagle3DraftModel(config=cfg)
    vocabulary = Vocabulary.of(shape, device)
    model.load_vocab_mappings(vocabulary.t2d, vocabulary.d2t)
    rows = vocabulary.head[vocabulary.t2d.to(device)].float()
    frozen = (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm)
    with torch.no_grad():
        torch.nn.init.normal_(model.embed_tokens.weight, 0, 0.02)
        model.lm_head.weight.copy_(rows)
        model.verifier_lm_head.weight.copy_(rows)
    for module in frozen:
        module.weight.requires_grad_(False)
    model.to(device).train()
    Eagle3DraftModel.verify_training_compatible(model)
    options, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="fused" if on_gpu else "eager", ttt_steps=TTT_STEPS,
        ttt_step_loss_decay=1.0,
    )  # fmt: skip
    optimizers = build_optimizers(model, SimpleNamespace(optimizer="adamw", lr=1e-3, weight_decay=0.01))
    schedules = [get_linear_schedule_with_warmup(o, 1000, 100000) for o in optimizers]
    (B, S), N = inputs.ids.shape, inputs.ids.numel()
    batch = {
        "hidden_states": inputs.aux.view(1, N, -1), "input_ids": inputs.ids.view(1, N),
        "verifier_last_hidden_states": inputs.last.view(1, N, -1), "loss_mask": inputs.mask.view(1, N),
        "position_ids": (1 + torch.arange(S, device=device)).repeat(B).view(1, N),
        "document_ids": torch.arange(B, device=device).repeat_interleave(S).view(1, N),
    }  # fmt: skip

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            _, loss, _ = model(**batch, **options)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in (*optimizers, *schedules):
            one.step()

    return step


def ours(bench: Bench, data: DraftData, frozen: bool) -> Callable[[], None]:
    """The bare step on the documents that the others get."""
    batch = data.reader()(data.plan[0]).to(bench.device)
    step = BareStep(bench, bench.config(bench.tokens, freeze_head=frozen))
    return lambda: step(batch)


def steps_of(trainer: str, bench: Bench, shards: Path) -> dict[str, Callable[[], None]]:
    """What a process times, by name."""
    data = DraftData(documents := Shards(shards), documents.lengths, bench.config(bench.tokens), 0, None)
    if trainer == "eagle3x":
        return {OURS: ours(bench, data, False), OURS_FROZEN: ours(bench, data, True)}
    inputs = Inputs.of([documents[i] for i in data.plan[0]], bench.device)
    make, name = {"specforge": (specforge, SPECFORGE), "speculators": (speculators, SPECULATORS)}[trainer]
    return {name: make(bench.shape, bench.device, inputs)}


def serve(trainer: str, bench: Bench, shards: Path) -> None:
    """Compile, say so, and time the step that a line of standard input names, until there are no more lines."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    steps = steps_of(trainer, bench, shards)
    for step in steps.values():
        _warmed(step, bench.device)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        found = measured(steps[line.strip()], bench.device, bench.steps)
        _leave_memory()
        print(json.dumps(found), file=answers, flush=True)


def _warmed(step: Callable[[], None], device: torch.device) -> None:
    """Two steps, which compile. The others do the same on this GPU: where memory does not do for all, wait for them."""
    for attempt in range(6):
        try:
            step()
            step()
            wait(device)
            break
        except torch.OutOfMemoryError:
            if attempt == 5:
                raise
            _leave_memory()
            time.sleep(5)
    _leave_memory()


def _leave_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare(bench: Bench, name: str) -> None:
    """Start all trainers on one step's documents, and have them take turns: every pair twice."""
    shards, trainers = bench.shards(bench.tokens).directory, ("eagle3x", "specforge", "speculators")
    _leave_memory()
    options = ["--shape", name, "--device", bench.device.type, "--steps", str(bench.steps), "--shards", str(shards)]
    started = {
        t: subprocess.Popen(
            [sys.executable, __file__, t, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for t in trainers
    }
    try:
        owners: dict[str, subprocess.Popen[str]] = {}
        for trainer, steps in zip(trainers, ((OURS, OURS_FROZEN), (SPECFORGE,), (SPECULATORS,)), strict=True):
            stdout = started[trainer].stdout
            assert stdout is not None
            if stdout.readline().strip() == "ready":
                owners.update(dict.fromkeys(steps, started[trainer]))
            else:
                print(f"{trainer} did not start: see above", file=sys.stderr)
        print(HEADER)
        for _ in range(2):
            for theirs, mine in PAIRS:
                if theirs in owners and mine in owners:
                    _pair(bench, name, {n: owners[n] for n in (mine, theirs)})
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def _pair(bench: Bench, shape: str, owners: dict[str, subprocess.Popen[str]]) -> None:
    """Time ours, then theirs."""
    first: float | None = None
    (mine, _) = owners
    for name, process in owners.items():
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(name + "\n")
        process.stdin.flush()
        ms, host, gib = json.loads(process.stdout.readline())
        first = first or ms
        cells = [f"{shape}: {name}", f"{ms / first:.3f}", mine, f"{ms:.2f}", f"{bench.tokens / ms * 1e3:.0f}"]
        print("| " + " | ".join([*cells, f"{host:.2f}", f"{gib:.2f}"]) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=("eagle3x", "specforge", "speculators"))
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--shards", type=Path, required=True)
    asked = parser.parse_args()
    here = Bench(SHAPES[asked.shape], torch.device(asked.device), asked.shards.parent, asked.steps)
    serve(asked.trainer, here, asked.shards)
