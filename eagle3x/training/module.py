"""Training of a drafter by training-time test (TTT), as a LightningModule.

T tokens, K TTT steps, R rows that a batch asks for.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.drafters.losses import Teacher, ttt_loss
from eagle3x.training.config import Train
from eagle3x.training.packing import Packed
from eagle3x.training.validation import History
from eagle3x.types import EagleError


@dataclass(frozen=True)
class PendingRecord:
    """A step's record whose sums [2, K] (see `ttt_loss`) are on their way from the device."""

    known: Mapping[str, Any]
    rows: Sequence[int]
    sums: Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, known: Mapping[str, Any], rows: Sequence[int], sums: Tensor) -> PendingRecord:
        """Start the copy."""
        if not sums.is_cuda:
            return cls(known, rows, sums, None)
        here = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        here.copy_(sums, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(sums.device))
        return cls(known, rows, here, copied)

    def arrived(self) -> bool:
        """Whether `record` would not wait."""
        return self.copied is None or self.copied.query()

    def record(self) -> dict[str, Any]:
        """Of metrics.jsonl: by step, mean loss, share of right argmaxes, and rows."""
        if self.copied is not None:
            self.copied.synchronize()
        loss, right = ([x / max(1, n) for x, n in zip(row, self.rows, strict=True)] for row in self.sums.tolist())
        return {**self.known, "loss": loss, "accuracy": right, "rows": list(self.rows)}


SECONDS_OF_RECORDS = 1.0
"""Records are written that often: opening the file may take as long as a small step's Python."""
EMBEDDING = "drafter.embed_tokens.weight"
"""The target's, frozen: left out of checkpoints."""


class DraftModule(LightningModule):
    """The drafter and its teacher.

    segment_ends: the steps after which the run is validated or saved, the last of which is its end.

    input_scale: typical root mean square of what `fc` reads. Adam moves a weight by the learning rate whatever it is
    multiplied with, so fc, which reads raw states, gets a rate that is divided by that.
    """

    def __init__(
        self,
        drafter: Eagle3,
        teacher: Teacher,
        cfg: Train,
        segment_ends: Sequence[int],
        input_scale: float,
        history: History,
    ) -> None:
        super().__init__()
        self.segment_ends, total_steps = segment_ends, segment_ends[-1]
        if cfg.freeze_head:
            drafter.lm_head.requires_grad_(False)
            drafter.norm.requires_grad_(False)
        self.drafter, self.teacher, self.cfg = drafter, teacher, cfg
        self.total_steps, self.input_scale, self.history = total_steps, input_scale, history
        self.dtype_of_step = torch.bfloat16 if cfg.precision == "bf16" else drafter.fc.weight.dtype
        self.strict_loading = False
        self.tokens_seen = 0
        self._pending: deque[PendingRecord] = deque()
        self._started = self._written = time.monotonic()

    def setup(self, stage: str) -> None:
        """The teacher follows the drafter to its device, in the precision of the steps."""
        device, t = self.trainer.strategy.root_device, self.teacher
        head = t.head.to(device, self.dtype_of_step)
        self.teacher = Teacher(head, t.final_norm.to(device), t.eps, t.last_norm)

    def training_step(self, batch: Packed, batch_idx: int) -> Tensor:
        """Loss of one packed batch. Nothing here waits for the device."""
        drafter, dtype = self.drafter, self.dtype_of_step
        states = drafter.ttt(batch.aux.to(dtype), batch.token_ids, batch.layout, self.cfg.ttt_steps)
        head, norm, last = drafter.lm_head.weight, drafter.norm.weight, batch.last.to(dtype)
        loss, sums = ttt_loss(states, head, norm, batch.pairs, last, self.teacher, self.cfg.loss)
        self._record(batch, sums)
        return loss

    def _record(self, batch: Packed, sums: Tensor) -> None:
        """Keep what the step's record needs, and now and then write those that have arrived."""
        self.tokens_seen += batch.step.tokens
        if self.trainer.world_size > 1:
            sums = sums * (batch.times / self.trainer.world_size)
            torch.distributed.all_reduce(sums)
        if not self.trainer.is_global_zero:
            return
        known = {
            "step": self.global_step + 1,
            "tokens": self.tokens_seen,
            "asked": batch.step.asked,
            "learning_rate": self.learning_rate(self.global_step),
            "seconds": time.monotonic() - self._started,
        }
        self._pending.append(PendingRecord.of(known, batch.step.kept, sums))
        if time.monotonic() - self._written > SECONDS_OF_RECORDS:
            self._written = time.monotonic()
            arrived = list(takewhile(PendingRecord.arrived, self._pending))
            self.history.append(*(self._pending.popleft().record() for _ in arrived))

    def write_records(self) -> None:
        """Wait for every record of the steps so far."""
        if self._pending:
            self.history.append(*(pending.record() for pending in self._pending))
            self._pending.clear()

    def on_train_epoch_end(self) -> None:
        """A segment has ended: what is validated or saved next comes after its records."""
        self.write_records()

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to 0 (Loshchilov and Hutter 2017). step counts from 0."""
        warmup = self.cfg.warmup_fraction * self.total_steps
        progress = max(0.0, step + 1 - warmup) / max(1.0, self.total_steps - warmup)
        return self.cfg.learning_rate * min(
            1.0, (step + 1) / max(1.0, warmup), 0.5 + 0.5 * math.cos(math.pi * progress)
        )

    def configure_optimizers(self) -> Any:
        """AdamW; norms do not decay; fc's rate is divided by the scale of what it reads."""
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        fc = [p for name, p in trained if name == "drafter.fc.weight"]
        matrices = [p for name, p in trained if p.dim() > 1 and name != "drafter.fc.weight"]
        norms = [p for _, p in trained if p.dim() == 1]
        base = self.cfg.learning_rate
        groups = [
            {"params": fc, "lr": base / max(1.0, self.input_scale), "weight_decay": self.cfg.weight_decay},
            {"params": matrices, "lr": base, "weight_decay": self.cfg.weight_decay},
            {"params": norms, "lr": base, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, betas=self.cfg.adam_betas, fused=self.device.type == "cuda")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.learning_rate(step) / base)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Everything that the rest of the run depends on and Lightning does not save."""
        self.write_records()
        del checkpoint["state_dict"][EMBEDDING]
        checkpoint["rng"] = torch.get_rng_state()
        checkpoint["tokens"] = self.tokens_seen
        checkpoint["segment_ends"] = list(self.segment_ends)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises EagleError if the checkpoint is not of this drafter."""
        expected = self.state_dict().keys() - {EMBEDDING}
        if checkpoint["state_dict"].keys() != expected:
            different = sorted(checkpoint["state_dict"].keys() ^ expected)
            raise EagleError(f"the checkpoint to resume from is of another drafter: {', '.join(different)}")
        if checkpoint["segment_ends"] != list(self.segment_ends):  # the data position is counted in segments
            raise EagleError(
                f"the attempt to resume saved or validated after steps {checkpoint['segment_ends']}, this one would"
                f" after {list(self.segment_ends)}: set train.checkpoints to what it was, or drop the attempt"
            )
        torch.set_rng_state(checkpoint["rng"])
        self.tokens_seen = checkpoint["tokens"]
        if self.trainer.is_global_zero:
            self.history.truncate(checkpoint["global_step"])
