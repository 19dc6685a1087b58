"""A drafter's training on random states, of a target's sizes: whole (`Trainer.fit` on shards) and as a bare step."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback

from eagle3x.config import Hardware
from eagle3x.data.shard_index import ShardSpec
from eagle3x.data.shards import Shards, ShardWriter
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.drafters.losses import Teacher, ttt_loss
from eagle3x.training.config import Train
from eagle3x.training.datamodule import DraftData
from eagle3x.training.module import DraftModule
from eagle3x.training.packing import Packed
from eagle3x.training.train import flops_per_token, lightning_trainer
from eagle3x.training.validation import History
from eagle3x.types import HiddenStates, Response


@dataclass(frozen=True)
class Shape:
    """A target's sizes, documents x tokens of a step, and how many steps are timed."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    documents: int = 8
    length: int = 2048
    steps: int = 24

    def arch(self) -> Architecture:
        """Of the drafter."""
        return Architecture(
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_heads=self.heads,
            num_kv_heads=self.kv_heads, head_dim=self.head_dim, rms_norm_eps=1e-5, rope_theta=500000.0,
            max_position_embeddings=131072, vocab_size=self.vocab, draft_vocab_size=self.draft_vocab,
            target_hidden_size=self.hidden, num_aux=3, norm_before_residual=False, norm_before_fc=False, fc_norm=False,
            norm_output=False,
        )  # fmt: skip


SHAPES = {
    "8B": Shape(4096, 14336, 32, 8, 128, 128256, 32000),
    "small": Shape(576, 1536, 9, 3, 64, 49152, 16384, steps=240),
    "tiny": Shape(64, 128, 4, 2, 16, 512, 128, 4, 64, 12),
}
KEPT = 0.6
ATTENTION = ("_attend", "_attend_backward", "_own_backward", "_shared_backward")
PRODUCTS = ("gemm", "cutlass", "nvjet", "cublas", "xmma")


class Clock(Callback):
    """When steps ended on the device, after the first third of them; written to a file by the first process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.marks: list[tuple[float, torch.cuda.Event | None]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mark the step without waiting for it."""
        event = None
        if trainer.strategy.root_device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append((time.perf_counter(), event))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what was measured."""
        if not trainer.is_global_zero:
            return
        marks = self.marks[len(self.marks) // 3 :]
        (began, first), (ended, last) = marks[0], marks[-1]
        ms = (ended - began) * 1e3
        if first is not None and last is not None:
            last.synchronize()
            ms = first.elapsed_time(last)
        host = (ended - began) * 1e3 / (len(marks) - 1)
        self.file.write_text(json.dumps({"ms": ms / (len(marks) - 1), "host": host, "gib": peak_memory()}))


def peak_memory() -> float:
    """GiB of the GPU, since it was last asked for anew."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


class Bench:
    """One shape on one device: its drafter, teacher, config, shards."""

    def __init__(self, shape: Shape, device: torch.device, store: Path, steps: int) -> None:
        self.shape, self.device, self.store, self.steps = shape, device, store, steps
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.random = torch.Generator(device=device).manual_seed(0)
        self.peak = self._peak() if device.type == "cuda" else None

    def _peak(self) -> float:
        x, y = (torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * 8192**3 / (timed(lambda: x @ y, self.device, 10) / 1e3)

    @property
    def tokens(self) -> int:
        """Of one GPU's step."""
        return self.shape.documents * self.shape.length

    def config(self, tokens: int, steps: int = 1, freeze_head: bool = False) -> Train:
        """Seven TTT steps; as many epochs over two steps' documents as `steps` asks for."""
        return Train(
            ttt_steps=7, loss="cross_entropy", step_weight_decay=0.9, tokens_per_step=tokens,
            epochs=max(1, steps // 2), learning_rate=1e-4, warmup_fraction=0.1, weight_decay=0.01,
            adam_betas=(0.9, 0.95), grad_clip=1.0,
            precision="bf16" if self.device.type == "cuda" else "fp32", out_of_vocab="renormalise",
            freeze_head=freeze_head, head_chunk=8192, validations=1, checkpoints=1, num_workers=8,
        )  # fmt: skip

    def shards(self, tokens: int) -> Shards:
        """Two steps' documents of random states, as an extraction leaves them."""
        shape, folder = self.shape, Path(tempfile.mkdtemp(dir=self.store))
        spec = ShardSpec(
            (1, 2, 3), shape.hidden, "bfloat16" if self.dtype == torch.bfloat16 else "float32", "post_norm"
        )
        first = int(shape.length * (1 - KEPT))
        mask = tuple(i >= first for i in range(shape.length))
        with ShardWriter(folder, spec, 16 * shape.length) as writer:
            for number in range(2 * tokens // shape.length):
                drawn = torch.randint(0, shape.vocab, (shape.length,), generator=self.random, device=self.device)
                ids = tuple(drawn.tolist())
                states = torch.randn(
                    shape.length, 4 * shape.hidden, generator=self.random, device=self.device, dtype=self.dtype
                ).cpu()
                aux, last = states[:, : 3 * shape.hidden].contiguous(), states[:, 3 * shape.hidden :].contiguous()
                name = f"random-{number}"
                counts = (first, shape.length - first)
                response = Response(name, "random", "train", ids, mask, *counts, "length")
                writer.add(HiddenStates(name, ids, aux, last, "post_norm"), response)
        return Shards(folder)

    def drafter(self) -> Eagle3:
        """Random matrices, norms of ones."""
        with self.device:
            model = Eagle3(self.shape.arch())
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0) if p.dim() == 1 else p.normal_(std=0.02)
        return model

    def teacher(self) -> Teacher:
        """A random head on normed states."""
        shape = (self.shape.draft_vocab, self.shape.hidden)
        head = torch.randn(shape, generator=self.random, device=self.device) * (2 / self.shape.hidden**0.5)
        return Teacher(head.cpu(), torch.ones(self.shape.hidden), 1e-5, "post_norm")

    def data(self, tokens: int, steps: int = 1) -> DraftData:
        """The product's data module on new shards."""
        shards = self.shards(tokens)
        return DraftData(shards, shards.lengths, self.config(tokens, steps), 0, None)

    def figures(self, ms: float, host: float, gib: float, cfg: Train, asked: float, gpus: int = 1) -> list[str]:
        """The table's columns after the first three."""
        rate = cfg.tokens_per_step / ms * 1e3
        share = (
            ""
            if self.peak is None
            else f"{flops_per_token(self.shape.arch(), cfg, asked) * rate / gpus / self.peak:.1%}"
        )
        return [f"{ms:.2f}", f"{rate:.0f}", share, f"{host:.2f}", f"{gib:.2f}"]

    def fit(self, data: DraftData, devices: tuple[int, ...] = (0,)) -> dict[str, float]:
        """`Trainer.fit` as the drafter stage calls it: milliseconds a step, seconds after the last step."""
        work = Path(tempfile.mkdtemp(dir=self.store))
        hardware = Hardware(device="cuda" if self.device.type == "cuda" else "cpu", threads=None, devices=devices)
        history = History(work / "metrics.jsonl")
        module = DraftModule(self.drafter(), self.teacher(), data.cfg, data.segment_ends, 1.0, history)
        if len(devices) > 1:
            module.cpu()
        run: Any = SimpleNamespace(cfg=SimpleNamespace(train=data.cfg, hardware=hardware), work=work)
        reset_memory(self.device)
        began = time.perf_counter()
        lightning_trainer(run, data, [Clock(work / "clock.json")]).fit(module, datamodule=data)
        seconds = time.perf_counter() - began
        print(f"fit of {len(data.plan)} steps: {seconds:.1f} s with start and checkpoint", file=sys.stderr)
        found = json.loads((work / "clock.json").read_text())
        records = history.records()
        assert len(records) == len(data.plan), "every step has its record"
        return {**found, "asked": records[-1]["asked"] / data.cfg.tokens_per_step}


class BareStep:
    """Forward, loss, backward, clipping and AdamW on a batch that is there, with nothing else in the loop."""

    def __init__(self, bench: Bench, cfg: Train) -> None:
        module = DraftModule(bench.drafter(), bench.teacher(), cfg, [1], 1.0, History(Path("unused")))
        self.model, self.cfg, self.dtype, self.device = module.drafter, cfg, bench.dtype, bench.device
        t = module.teacher
        self.teacher = replace(t, head=t.head.to(bench.device, bench.dtype), final_norm=t.final_norm.to(bench.device))
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=bench.device.type == "cuda")

    def __call__(self, batch: Packed) -> None:
        m = self.model
        self.optimizer.zero_grad(set_to_none=True)
        states = m.ttt(batch.aux.to(self.dtype), batch.token_ids, batch.layout, self.cfg.ttt_steps)
        last = batch.last.to(self.dtype)
        loss, _ = ttt_loss(states, m.lm_head.weight, m.norm.weight, batch.pairs, last, self.teacher, self.cfg.loss)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()

    def profiled(self, batch: Packed) -> str:
        """What the kernels of one step are."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self(batch)
            wait(self.device)
        times = [(e.key, e.self_device_time_total / 1e3, e.count) for e in seen.key_averages()]
        total = sum(ms for _, ms, _ in times)
        products = sum(ms for key, ms, _ in times if any(word in key.lower() for word in PRODUCTS))
        attention = sum(ms for key, ms, _ in times if key in ATTENTION)
        launches = sum(count for *_, count in times)
        return (
            f"{total:.1f} ms in {launches} kernels: products {products / total:.1%}, attention {attention:.1f} ms"
            f" ({attention / total:.1%}), all else {1 - (products + attention) / total:.1%}"
        )


def measured(step: Callable[[], Any], device: torch.device, steps: int) -> tuple[float, float, float]:
    """Milliseconds a step of `steps` queued one after another, of which the host needs; peak GiB."""
    for _ in range(2):
        step()
    wait(device)
    reset_memory(device)
    step()
    wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    queued = time.perf_counter()
    wait(device)
    return (time.perf_counter() - began) / steps * 1e3, (queued - began) / steps * 1e3, peak_memory()


def timed(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median milliseconds."""
    call()
    times = []
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        call()
        wait(device)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_memory(device: torch.device) -> None:
    """Peak memory is counted from here."""
    gc.collect()  # a trainer that is done with holds its module in a cycle
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
