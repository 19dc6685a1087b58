"""Config of training."""

from __future__ import annotations

from typing import Annotated, Literal

from eagle3x.identity import PLACEMENT, Added
from eagle3x.schema import config

BF16_HEAD_SIZES = (16, 32, 64, 128)
"""What the Triton kernels were compiled for: powers of two, whose tiles fit into a multiprocessor."""

Loss = Literal["cross_entropy", "total_variation", "lk"]
"""Soft cross-entropy; 1 - alpha; -log alpha, where alpha is the acceptance of speculative sampling
(kernels/acceptance.py)."""


@config
class Train:
    """Training-time test (TTT). A step reads `tokens_per_step` packed tokens."""

    ttt_steps: int
    loss: Annotated[Loss, Added("cross_entropy")]
    step_weight_decay: float
    """Loss of TTT step k weighs step_weight_decay ** k."""
    tokens_per_step: int
    epochs: int
    learning_rate: float
    warmup_fraction: float
    weight_decay: float
    adam_betas: tuple[float, float]
    grad_clip: float
    precision: Literal["fp32", "bf16"]
    out_of_vocab: Literal["mask", "renormalise"]
    """Rows whose target argmax is outside the draft vocabulary: left out, or taught the rest of the distribution."""
    freeze_head: bool
    """The head, and the norm before it, stay what they are at the start."""
    head_chunk: int
    """Rows per chunk that meet a head together."""
    validations: int
    """How often, evenly, the drafter is replayed on the val split; the best by tau is kept."""
    checkpoints: Annotated[int, PLACEMENT]
    """How often, evenly, training can be resumed from."""
    num_workers: Annotated[int, PLACEMENT]
    """Processes that read ahead, for each device; 0 reads when a step begins. So many steps, and two, are in memory."""

    def __post_init__(self) -> None:
        if min(self.ttt_steps, self.tokens_per_step, self.epochs, self.head_chunk, self.validations) < 1:
            raise ValueError("ttt_steps, tokens_per_step, epochs, head_chunk, validations must be at least 1")
        if not 0 <= self.warmup_fraction < 1 or self.learning_rate <= 0:
            raise ValueError("warmup_fraction must be in [0, 1) and learning_rate > 0")
        if self.num_workers < 0 or self.checkpoints < 1:
            raise ValueError("num_workers must be at least 0, and checkpoints at least 1")

    def refusals(self, device: str, head_size: int) -> list[str]:
        """Why a drafter with heads of this size cannot be trained so on `device` ("cpu", "cuda")."""
        if self.precision != "bf16":
            return []
        if device == "cpu":
            return ["train.precision=bf16 needs hardware=cuda: bfloat16 is many times slower on a CPU"]
        if head_size not in BF16_HEAD_SIZES:
            sizes = ", ".join(map(str, BF16_HEAD_SIZES))
            return [f"train.precision=bf16 has kernels for heads of {sizes}, not {head_size}: use train.precision=fp32"]
        return []

    @property
    def step_weights(self) -> list[float]:
        """Of each TTT step's loss."""
        return [self.step_weight_decay**step for step in range(self.ttt_steps)]
