"""Training of a drafter by training-time test (TTT), as a LightningModule.

T tokens, K TTT steps, R rows that a batch asks for.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.drafters.losses import StepStats, Teacher, ttt_loss
from eagle3x.training.config import Train
from eagle3x.training.packing import Packed
from eagle3x.training.validation import History
from eagle3x.types import EagleError

EMBEDDING = "drafter.embed_tokens.weight"
"""The target's, frozen: left out of checkpoints."""


class DraftModule(LightningModule):
    """The drafter and its teacher.

    input_scale: typical root mean square of what `fc` reads. Adam moves a weight by the learning rate whatever it is
    multiplied with, so fc, which reads raw states, gets a rate that is divided by that.
    """

    def __init__(
        self, drafter: Eagle3, teacher: Teacher, cfg: Train, total_steps: int, input_scale: float, history: History
    ) -> None:
        super().__init__()
        self.drafter, self.teacher, self.cfg = drafter, teacher, cfg
        self.total_steps, self.input_scale, self.history = total_steps, input_scale, history
        self.step_weights = [cfg.step_weight_decay**step for step in range(cfg.ttt_steps)]
        self.strict_loading = False
        self.tokens_seen = 0
        self.kept_rows = 0
        self.asked_rows = 0
        self._started = time.monotonic()

    def setup(self, stage: str) -> None:
        """The teacher follows the drafter to its device."""
        device, t = self.device, self.teacher
        self.teacher = Teacher(t.head.to(device), t.final_norm.to(device), t.eps, t.last_norm)

    def training_step(self, batch: Packed, batch_idx: int) -> Tensor:
        """Loss of one packed batch."""
        rows = torch.nonzero(batch.keep.any(dim=0))[:, 0]
        fused = self.drafter.fuse(batch.aux)
        states = self.drafter.ttt(fused, batch.token_ids, batch.document_lengths, self.cfg.ttt_steps, rows)
        loss, stats = ttt_loss(
            [self.drafter.normed(state) for state in states],
            self.drafter.lm_head.weight,
            rows,
            batch.keep,
            batch.last,
            self.teacher,
            self.step_weights,
            self.cfg.head_chunk,
        )
        self.asked_rows += len(rows)
        self._record(batch, stats)
        return loss

    def _record(self, batch: Packed, stats: StepStats) -> None:
        self.tokens_seen += len(batch.token_ids)
        self.kept_rows += int(stats.rows.sum())
        self.history.append(
            {
                "step": self.global_step + 1,
                "tokens": self.tokens_seen,
                "learning_rate": self.learning_rate(self.global_step),
                "loss": stats.loss.tolist(),
                "accuracy": stats.accuracy.tolist(),
                "rows": stats.rows.tolist(),
                "seconds": time.monotonic() - self._started,
            }
        )

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
        optimizer = torch.optim.AdamW(groups, betas=self.cfg.adam_betas)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.learning_rate(step) / base)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Everything that the rest of the run depends on and Lightning does not save."""
        del checkpoint["state_dict"][EMBEDDING]
        checkpoint["rng"] = torch.get_rng_state()
        checkpoint["counts"] = [self.tokens_seen, self.kept_rows, self.asked_rows]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises EagleError if the checkpoint is not of this drafter."""
        expected = self.state_dict().keys() - {EMBEDDING}
        if checkpoint["state_dict"].keys() != expected:
            different = sorted(checkpoint["state_dict"].keys() ^ expected)
            raise EagleError(f"the checkpoint to resume from is of another drafter: {', '.join(different)}")
        torch.set_rng_state(checkpoint["rng"])
        self.tokens_seen, self.kept_rows, self.asked_rows = checkpoint["counts"]
        self.history.truncate(checkpoint["global_step"])
