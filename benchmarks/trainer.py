"""How fast is the training of a drafter, how near the hardware's limit, and what does `Trainer.fit` add to a bare step?

    python benchmarks/trainer.py                             # all sections; one H200 (and a second one for `two`)
    python benchmarks/trainer.py fit --shape small           # one of them
    python benchmarks/trainer.py fit --shape tiny --device cpu

fit        the product's own `Trainer.fit` on shards of random states (loader, records, a checkpoint at the end), beside
           the bare step before and after it (forward, backward, clipping, AdamW), and the loader alone
lengths    the bare step with other lengths of documents, and with a frozen head; a profile tells what the time goes to
two        `Trainer.fit` on two GPUs with twice the tokens a step, beside one GPU
products   the step's matrix products in fp8 (torch._scaled_mm) beside bf16
peers      the step of SpecForge and of speculators in turns with the bare step (`peers.py` says what it needs)

Each section has a process of its own. Documents' last 60 % are in the loss. "of peak": by counted FLOPs of rows in the
loss (`flops_per_token`), beside a bf16 product of 8192^3 in the same process. Prints Markdown.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from peers import compare
from random_training import KEPT, SHAPES, BareStep, Bench, measured, timed, wait

from eagle3x.training.loader import loaded

LOADED = 96
"""Steps that the loader alone reads at least: with few, its start is what is timed."""
HEADER = "| run | ratio | to | ms a step | tokens/s | of peak | host ms | peak GiB |\n|" + " --- |" * 8


def row(run: str, ratio: float | None, to: str, *figures: str) -> None:
    """One line of the table."""
    shown = "" if ratio is None else f"{ratio:.3f}"
    print("| " + " | ".join([run, shown, to, *figures]) + " |", flush=True)


def fit(bench: Bench, name: str) -> None:
    """`Trainer.fit`, the bare step before and after it, the loader alone."""
    data = bench.data(bench.tokens, bench.steps)
    reader = data.reader()
    batch = reader(data.plan[0]).to(bench.device)
    asked = batch.step.asked / batch.step.tokens

    def bare() -> tuple[float, float, float]:
        return measured(partial(BareStep(bench, data.cfg), batch), bench.device, max(2, bench.steps // 3))

    before = bare()
    whole = bench.fit(data)
    after = bare()
    for when, found in (("before", before), ("after", after)):
        row(f"{name}: bare step, {when}", 1.0, "", *bench.figures(*found, data.cfg, asked))
    ratio = 2 * whole["ms"] / (before[0] + after[0])
    figures = bench.figures(whole["ms"], whole["host"], whole["gib"], data.cfg, asked)
    row(f"{name}: `Trainer.fit`", ratio, "bare step's time", *figures)
    workers = data.cfg.num_workers
    steps = data.plan * -(-LOADED // len(data.plan))
    batches = loaded(steps + data.plan[: 2 * workers], reader, bench.device, workers, reader.room(data.plan))
    for _ in range(2 * workers):  # what was read while they started
        next(batches)
    began = time.perf_counter()
    count = sum(1 for _ in batches)
    wait(bench.device)
    ms = (time.perf_counter() - began) / count * 1e3
    row(
        f"{name}: loader alone",
        whole["ms"] / ms,
        "`Trainer.fit`'s appetite",
        f"{ms:.2f}",
        f"{bench.tokens / ms * 1e3:.0f}",
        "",
        "",
        "",
    )


def lengths(bench: Bench, name: str) -> None:
    """Other lengths at the same tokens and at twice as many, and a frozen head; with profiles."""
    shape, base, notes = bench.shape, 0.0, []
    for documents, length, frozen in (
        (shape.documents, shape.length, False), (shape.documents // 4, 4 * shape.length, False),
        (1, 16 * shape.length, False), (shape.documents, shape.length, True),
    ):  # fmt: skip
        bench.shape = replace(shape, documents=documents, length=length)
        data = bench.data(bench.tokens)
        cfg = bench.config(bench.tokens, freeze_head=frozen)
        batch = data.reader()(data.plan[0]).to(bench.device)
        step = BareStep(bench, cfg)
        found = measured(partial(step, batch), bench.device, max(2, bench.steps // 4))
        per_token = found[0] / bench.tokens
        base = base or per_token
        what = f"{name}: bare step, {documents} x {length}{', head frozen' if frozen else ''}"
        asked = batch.step.asked / batch.step.tokens
        row(what, per_token / base, "time per token of the first", *bench.figures(*found, cfg, asked))
        if bench.device.type == "cuda":
            notes.append(f"{what}: {step.profiled(batch)}")
        del step, batch
    print("\n" + "\n".join(f"- {note}" for note in notes))


def two(bench: Bench, name: str) -> None:
    """Two GPUs with twice the tokens a step, and one."""
    found = {}
    for gpus in (1, 2):
        data = bench.data(gpus * bench.tokens, bench.steps)
        found[gpus] = bench.fit(data, tuple(range(gpus)))
        ms, host, gib = (found[gpus][key] for key in ("ms", "host", "gib"))
        figures = bench.figures(ms, host, gib, data.cfg, found[gpus]["asked"], gpus)
        ratio = gpus * found[1]["ms"] / found[gpus]["ms"]
        row(
            f"{name}: `Trainer.fit` on {gpus} GPU{'s' * (gpus > 1)}, {gpus * bench.tokens} tokens a step",
            ratio,
            "one GPU's rate",
            *figures,
        )


def products(bench: Bench, name: str) -> None:
    """fp8 (e4m3) products beside bf16, in the shapes of forward and weight gradient."""
    s, rows = bench.shape, int(KEPT * bench.tokens) // 16 * 16
    one = torch.ones((), device=bench.device)
    print("| product | scale | ratio | fp8 TFLOP/s | bf16 TFLOP/s |\n| --- | --- | --- | --- | --- |")
    for what, out, inner in (
        ("gate and up", 2 * s.intermediate, s.hidden), ("down", s.hidden, s.intermediate),
        ("q, k, v", (s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden), ("head", s.draft_vocab, s.hidden),
    ):  # fmt: skip
        for use, (m, k, n) in {
            "forward": (rows, inner, out),
            "weight gradient": (out, 7 * rows, inner),
        }.items():
            x, y = (torch.randn(size, k, device=bench.device, dtype=torch.bfloat16) for size in (m, n))
            x8, y8 = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn)
            wide = timed(lambda a=x, b=y: a @ b.T, bench.device, 5)
            scales = {
                "tensor": (one, one),
                "row": (torch.ones(m, 1, device=bench.device), torch.ones(1, n, device=bench.device)),
            }
            for kind, pair in scales.items():
                call = partial(torch._scaled_mm, x8, y8.T, *pair, out_dtype=torch.bfloat16, use_fast_accum=True)  # pyright: ignore[reportPrivateImportUsage]
                ms, rate = timed(call, bench.device, 5), 2 * m * k * n / 1e9
                sizes = f"{name}: {what}, {use} {m}x{k}x{n}"
                print(f"| {sizes} | {kind} | {wide / ms:.2f} | {rate / ms:.0f} | {rate / wide:.0f} |", flush=True)


SECTIONS = {"fit": fit, "lengths": lengths, "two": two, "products": products, "peers": compare}
ON_CPU = ("fit", "lengths", "peers")
OWN_HEADER = ("products", "peers")
AS_MODULE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import trainer; trainer.main()"
"""How a section's process is called: a script, with all that it imports, would be imported by every reader again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all, where none is named")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["8B", "small"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, help="of a fit; where it is left out, as many as suit the shape")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="folder for shards: page cache")
    parser.add_argument("--here", action="store_true", help="in this process: one section, one shape")
    asked = parser.parse_args()
    if unknown := set(asked.sections) - SECTIONS.keys():
        parser.error(f"no section {', '.join(sorted(unknown))}")
    sections = asked.sections or [name for name in SECTIONS if asked.device == "cuda" or name in ON_CPU]
    if asked.here:
        (section,), (shape,) = sections, asked.shape
        with tempfile.TemporaryDirectory(dir=asked.store) as scratch:
            bench = Bench(SHAPES[shape], torch.device(asked.device), Path(scratch), asked.steps or SHAPES[shape].steps)
            SECTIONS[section](bench, shape)
        return
    where = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}\n")
    for section in sections:
        for shape in asked.shape:
            began = time.monotonic()
            print(f"\n## {section}, {shape}\n\n{'' if section in OWN_HEADER else HEADER}", flush=True)
            options = ["--here", "--shape", shape, "--device", asked.device, "--store", str(asked.store)]
            options += [] if asked.steps is None else ["--steps", str(asked.steps)]
            done = subprocess.run([sys.executable, "-c", AS_MODULE, section, *options])
            print(f"\n{'' if done.returncode == 0 else 'FAILED after '}{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
