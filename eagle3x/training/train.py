"""The drafter stage: train a drafter on hidden states, or check a pretrained one and pass it on.

checkpoint/      the drafter, as LlamaForCausalLMEagle3 (boundary ids are the export's)
metrics.jsonl    of each step and each validation (trained here only)
resume/          Lightning checkpoints while training runs
"""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3x.data.shards import Sample, Shards, Subset
from eagle3x.drafters import checkpoint, location, vocab
from eagle3x.drafters import origin as origins
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.config_keys import ignored
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.drafters.losses import Teacher
from eagle3x.drafters.warm_start import random_start, warm_start
from eagle3x.progress import log, track
from eagle3x.quantization import in_slot
from eagle3x.training.datamodule import DraftData
from eagle3x.training.module import DraftModule
from eagle3x.training.packing import keep_rows
from eagle3x.training.validation import History, Validation, load_trained
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from eagle3x.config import Hardware
    from eagle3x.drafters.config import Drafter
    from eagle3x.pipeline import StageRun
    from eagle3x.targets import Target
    from eagle3x.training.config import Train

CHECKPOINT = "checkpoint"
METRICS = "metrics.jsonl"


def make(run: StageRun) -> dict[str, Any]:
    """Write the drafter into `run.work`; returns what is known of it, of its boundaries, and of its training."""
    if run.cfg.drafter.source == "pretrained":
        return {"source": "pretrained", **_take_over(run)}
    return {"source": "custom", **_train(run)}


def _take_over(run: StageRun) -> dict[str, Any]:
    """Check a published drafter by loading it, and write it in our format."""
    published = _published(run.cfg.drafter)
    drafter = checkpoint.republish(published, run.work / CHECKPOINT, run.target)
    log(f"Drafter: {checkpoint.format_of(published.config)} in {published.dtype}, {published.arch}")
    origin = origins.of(run.cfg.drafter, published.config, run.target.num_blocks)
    likeness = checkpoint.embedding_likeness(drafter, run.target)
    if likeness is not None and likeness < checkpoint.UNRELATED:
        log(
            f"Drafter: its embedding has a median cosine of {likeness:.2f} to the target's: random, or another model's;"
            " vLLM uses it, SGLang always takes the target's"
        )
    return {
        "format": checkpoint.format_of(published.config),
        "draft_vocab_size": drafter.arch.draft_vocab_size,
        "ignored_keys": ignored(published.config),
        "boundaries": None if origin.boundaries is None else list(origin.boundaries),
        "boundaries_said_by": origin.said_by,
        "embedding_likeness": likeness,
    }


def initial_drafter(
    cfg: Drafter,
    target: Target,
    train: Shards,
    samples: Sequence[Sample],
    seed: int,
    device: torch.device,
    start: bool = True,
) -> Eagle3:
    """The drafter before its first step, on `device`: architecture, draft vocabulary, weights by `cfg.init`.

    start: False leaves the weights random, for a run that is about to load them.
    """
    torch.manual_seed(seed)
    if cfg.init_from is not None:
        return _fine_tuned(cfg, target, len(train.spec.boundaries)).to(device)
    vocabulary = vocab.build(
        responses=(t for s in samples for t in s.token_ids[s.loss_mask].tolist()),
        prompts=(t for s in samples for t in s.token_ids[~s.loss_mask].tolist()),
        always=target.eos_token_ids,
        size=cfg.draft_vocab_size,
        vocab_size=target.vocab_size,
    )
    with device:
        drafter = Eagle3(_architecture(cfg, target, len(train.spec.boundaries)))
    drafter.d2t.copy_(vocabulary.d2t())
    drafter.t2d.copy_(vocabulary.t2d())
    if start and cfg.init == "warm_start":
        log(f"Drafter: regressing the target's next state on {len(samples)} samples")
        warm_start(drafter, target, samples, train.spec.last_norm)
    else:
        random_start(drafter, target)
    return drafter


def _fine_tuned(cfg: Drafter, target: Target, num_aux: int) -> Eagle3:
    """A published drafter that training goes on with. EagleError if its fc reads another number of boundaries."""
    drafter = checkpoint.module(_published(cfg), target)
    if drafter.arch.num_aux != num_aux:
        raise EagleError(f"drafter.init_from={cfg.init_from} reads {drafter.arch.num_aux} boundaries, not {num_aux}")
    return drafter


def with_labels(shards: Shards) -> tuple[Subset, list[int]]:
    """The samples that have a row in the loss, and their lengths. EagleError if there are none."""
    indices = [index for index, sample in enumerate(shards) if keep_rows(sample.loss_mask, 1).any()]
    if not indices:
        raise EagleError(f"{shards.directory}: no sample has two tokens that the target wrote: nothing to train on")
    return Subset(shards, indices), [shards.lengths[index] for index in indices]


def devices_of(hardware: Hardware) -> list[torch.device]:
    """Where a drafter is trained: the GPUs that are named, or the first one, or the CPU."""
    if hardware.device == "cpu":
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in hardware.devices or (0,)]


def _architecture(cfg: Drafter, target: Target, num_aux: int) -> Architecture:
    """A block of the target's shape."""
    return Architecture(
        hidden_size=target.hidden_size,
        intermediate_size=cfg.intermediate_size or target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        draft_vocab_size=cfg.draft_vocab_size,
        target_hidden_size=target.hidden_size,
        num_aux=num_aux,
        norm_before_residual=cfg.norm_before_residual,
        norm_before_fc=cfg.norm_before_fc,
        fc_norm=cfg.fc_norm,
        norm_output=cfg.norm_output,
    )


def _train(run: StageRun) -> dict[str, Any]:
    cfg, work = run.cfg, run.work
    # Whose head and final norm make a distribution of the states.
    target = in_slot.in_slot(run.slot("extract"), run.target, cfg.hardware)
    if reasons := cfg.train.refusals(cfg.hardware.device, target.head_dim):
        raise EagleError("; ".join(reasons))
    if cfg.hardware.threads is not None:
        torch.set_num_threads(cfg.hardware.threads)
    states = run.inputs["hidden_states"].path
    train, val = Shards(states / "train"), Shards(states / "val")
    samples, lengths = with_labels(train)
    resume = max((work / "resume").glob("*.ckpt"), default=None)

    devices = devices_of(cfg.hardware)
    device = devices[0]
    drafter = initial_drafter(cfg.drafter, target, train, samples, cfg.seed, device, start=resume is None)
    head, final_norm = target.head().to(device), target.final_norm().to(device)
    full = Teacher(head, final_norm, target.rms_norm_eps, train.spec.last_norm)
    teachable, labels, outside = _teachable(full, drafter.t2d, samples, work / "argmax.safetensors")
    data = DraftData(samples, lengths, cfg.train, cfg.seed, teachable if cfg.train.out_of_vocab == "mask" else None)
    history = History(work / METRICS)
    if resume is None:
        history.truncate(-1)  # what a run left that was killed before its first checkpoint
    taught = head[drafter.target_ids()].cpu()
    teacher = Teacher(taught, final_norm.cpu(), target.rms_norm_eps, train.spec.last_norm)
    del full, head
    module = DraftModule(drafter, teacher, cfg.train, data.segment_ends, _input_scale(drafter, samples), history)
    best = work / "best.safetensors"
    validation = Validation(val, data.validation_steps, best, history, cfg.train.ttt_steps, log)

    if len(devices) > 1:  # each has a process of its own, which is given all this
        module.to("cpu")
        torch.cuda.empty_cache()
    started = time.monotonic()
    trainer = lightning_trainer(run, data, [validation, Bar(len(data.plan))])
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    seconds = time.monotonic() - started
    done = history.records()
    steps, validations = [r for r in done if "loss" in r], [r for r in done if "val" in r]
    if steps[-1]["step"] != len(data.plan):
        raise EagleError(f"training ended after {steps[-1]['step']} of {len(data.plan)} steps: nothing is published")

    drafter.cpu()
    load_trained(drafter, best)
    # A published drafter may have brought an embedding of its own.
    own = cfg.drafter.init_from is not None and not torch.equal(drafter.embed_tokens.weight, target.embedding())
    checkpoint.save(drafter, work / CHECKPOINT, {}, with_embedding=own)
    covered = drafter.t2d
    tokens, asked = steps[-1]["tokens"], sum(r["asked"] for r in steps)
    best_record = max(validations, key=lambda r: r["val"]["tau"])
    facts = {
        "boundaries": list(train.spec.boundaries),
        "boundaries_said_by": None,
        "steps": len(data.plan),
        "tokens": tokens,
        "kept_rows": sum(sum(r["rows"]) for r in steps),
        "samples": len(samples),
        "samples_without_label": len(train) - len(samples),
        "label_rows": labels,
        "out_of_vocab_rows": outside,
        "coverage": {"train": _coverage(covered, samples), "val": _coverage(covered, val)},
        "val_tau": best_record["val"]["tau"],
        "best_step": best_record["step"],
        "val_prompts": len(val),
        "trainable_parameters": sum(p.numel() for p in drafter.parameters() if p.requires_grad),
        "tokens_per_second": sum(lengths) * cfg.train.epochs / seconds if resume is None else None,
        "flops_per_token": flops_per_token(drafter.arch, cfg.train, asked / tokens),
    }
    shutil.rmtree(work / "resume")  # last: it was paid for
    for scrap in (best, work / "argmax.safetensors"):
        scrap.unlink()
    return facts


def flops_per_token(arch: Architecture, cfg: Train, asked: float) -> float:
    """FLOPs that one trained token costs, counted from the matrices alone (2 per multiply-add, backward twice forward).

    asked: share of the rows that are in the loss. The others lend their step-0 keys and values and go no further.
    """
    H, D = arch.hidden_size, arch.draft_vocab_size
    heads, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    fc, key_value = arch.num_aux * arch.target_hidden_size * H, 2 * 2 * H * keys
    block = 2 * H * heads + heads * H + 3 * H * arch.intermediate_size
    rows = cfg.ttt_steps * block + (cfg.ttt_steps - 1) * key_value
    head = (2 if cfg.freeze_head else 3) * cfg.ttt_steps * H * D + H * D
    return 2 * (3 * (fc + key_value + asked * rows) + asked * head)


class Bar(Callback):
    """One progress bar over all steps of this run."""

    def __init__(self, total: int) -> None:
        self.total = total

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start where the run starts."""
        rest = self.total - trainer.global_step
        self._ticks = track(range(rest), "Training", rest) if trainer.is_global_zero else iter(())
        next(self._ticks, None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One step is done."""
        next(self._ticks, None)


def lightning_trainer(run: StageRun, data: DraftData, callbacks: list[Callback]) -> Trainer:
    """A process for each device; a checkpoint at the end of every segment, of which the newest is kept."""
    cfg = run.cfg
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    keep = ModelCheckpoint(
        run.work / "resume", "{step:08d}", auto_insert_metric_name=False, save_on_train_epoch_end=True
    )
    devices = devices_of(cfg.hardware)
    spread = DDPStrategy(start_method="spawn", broadcast_buffers=False, gradient_as_bucket_view=True)
    return Trainer(
        accelerator="gpu" if cfg.hardware.device == "cuda" else "cpu",
        devices=[device.index for device in devices] if cfg.hardware.device == "cuda" else len(devices),
        strategy=spread if len(devices) > 1 else "auto",
        max_epochs=len(data.segment_ends),
        reload_dataloaders_every_n_epochs=1,
        gradient_clip_val=cfg.train.grad_clip,
        callbacks=[*callbacks, keep],
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=run.work,
    )


def _teachable(full: Teacher, t2d: Tensor, samples: Sequence[Sample], cache: Path) -> tuple[list[Tensor], int, int]:
    """Per sample [T]: whether the target's argmax at a position is in the draft vocabulary.

    Also how many positions are labels, and how many of those are not. Only labels are worked out (others: False); the
    argmaxes over the whole vocabulary are cached in `cache`.
    """
    positions = [torch.nonzero(s.loss_mask[2:])[:, 0] + 1 for s in samples]
    labels = sum(map(len, positions))
    if cache.is_file():
        best = load_file(cache)["argmax"]
    else:
        pairs = track(zip(samples, positions, strict=True), "Target's argmax", len(samples))
        device = full.head.device
        best = torch.cat([full.argmax(s.last[at].to(device).float(), 1024).cpu() for s, at in pairs])
        save_file({"argmax": best}, new := cache.with_suffix(".new"))
        new.rename(cache)
    inside = t2d.cpu()[best]
    result = []
    for sample, at, known in zip(samples, positions, inside.split([len(at) for at in positions]), strict=True):
        mask = torch.zeros(len(sample.token_ids), dtype=torch.bool)
        mask[at] = known
        result.append(mask)
    return result, labels, labels - int(inside.sum())


@torch.no_grad()
def _input_scale(drafter: Eagle3, samples: Sequence[Sample]) -> float:
    """Median over positions of the root mean square of what fc reads; a few samples tell."""
    device = drafter.fc.weight.device
    rows = torch.cat([drafter.fc_input(s.aux.to(device).float()) for s in islice(samples, 32)])
    return float(rows.pow(2).mean(-1).sqrt().median())


def _coverage(t2d: Tensor, samples: Sequence[Sample]) -> float:
    """Share of the tokens that the target wrote that the drafter can say."""
    return float(torch.cat([t2d[s.token_ids[s.loss_mask]] for s in samples]).float().mean())


def _published(cfg: Drafter) -> checkpoint.Published:
    """Somebody's checkpoint, as the config names it."""
    directory = location.resolve(cfg)
    assert directory is not None, "the config refuses a published drafter without a source"
    return checkpoint.read(directory, cfg.made_by, cfg.allow_bin)
