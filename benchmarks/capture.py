"""How fast does an engine capture states, storage included, beside its own plain prefill of the same texts?

    python benchmarks/capture.py --engine vllm --target DIRECTORY --boundaries 2,14,26                    # CPU
    python benchmarks/capture.py --engine vllm --target DIRECTORY --boundaries 2,16,29 --device cuda --random-weights
    python benchmarks/capture.py --engine sglang ... --device cuda --batch-tokens 8192 --longest 2048 --tokens 131072

Both engines are loaded at the same time and take turns (plain, capture, drop, drop, capture, plain; one round first,
not counted), with the same sequences, batching and dtype. "Capture" ends when the last shard is on disk; "drop"
captures and forgets, which tells what storing costs. `--random-weights` takes the shape from the directory's
config.json and needs no weights: right for throughput, not for states.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3x.config import Hardware, TargetConfig
from eagle3x.data.extraction import tokens_per_shard
from eagle3x.data.shards import ShardSpec, ShardWriter
from eagle3x.engines import adapter
from eagle3x.engines.base import Engine
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.targets import resolve
from eagle3x.types import Request, Response, TokenSample

TURNS = ("plain", "capture", "drop", "drop", "capture", "plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--boundaries", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--python", help="interpreter that has the engine")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--eager", action="store_true", help="both engines without compilation and graphs")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096, help="of one turn")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU's memory for each engine")
    parser.add_argument(
        "--store", nargs="+", default=[tempfile.gettempdir()], help="folders for the shards, each timed"
    )
    asked = parser.parse_args()

    boundaries = tuple(int(b) for b in asked.boundaries.split(","))
    target = resolve(
        TargetConfig(
            name=Path(asked.target).name, path=asked.target, wheel=None, hub_id=None, revision=None,
            trust_remote_code=False, aux_layer_ids=boundaries,
        )
    )  # fmt: skip
    hardware = Hardware(device=asked.device, threads=None, devices=None)
    backend = Backend(
        name=asked.engine, runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=asked.tensor_parallel,
        batch_size=asked.batch_size, engine_args=batching(asked), python=asked.python, url=None, port=None,
        memory_fraction=asked.memory, start_timeout=600.0,
    )  # fmt: skip
    slot = Slot("extract", backend, Quantization(scheme="none"), Attention(name=asked.attention))
    engine = adapter(asked.engine)
    whole_prompts = {"enable_chunked_prefill": False} if asked.engine == "vllm" else {}  # as where it captures
    plain_slot = replace(slot, backend=replace(backend, engine_args={**backend.engine_args, **whole_prompts}))
    texts = sequences(asked.tokens, asked.longest, target.vocab_size)
    tokens = sum(len(text) for text in texts)
    logs = Path(tempfile.mkdtemp(prefix="eagle3x-bench-"))
    with (
        engine.open(plain_slot, target, hardware, Job(asked.longest, logs / "plain")) as plain,
        engine.open(slot, target, hardware, Job(asked.longest, logs / "capture")) as capturing,
    ):
        (first,) = capturing.capture([TokenSample("first", texts[0])], boundaries)
        dtype = str(first.aux.dtype).removeprefix("torch.")
        spec = ShardSpec(boundaries, target.hidden_size, dtype, first.last_norm)
        print(f"{engine.identity(slot, target, hardware)}\n{len(texts)} sequences, {tokens} tokens a turn")
        print("| target | shards in | capture / plain (median, all) | capture tok/s | dropped | plain | stored GB/s |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for place in asked.store:
            folder = Path(tempfile.mkdtemp(prefix="eagle3x-bench-", dir=place)) / "shards"
            seconds: dict[str, list[float]] = {turn: [] for turn in TURNS}
            for round_ in range(asked.rounds + 1):
                for number, turn in enumerate(TURNS):
                    name = f"{Path(place).name}-{round_}-{number}"
                    if turn == "plain":
                        spent = prefill(plain, texts, name)
                    else:
                        spent = captured(capturing, texts, spec, name, folder if turn == "capture" else None)
                    if round_:
                        seconds[turn].append(spent)
            shutil.rmtree(folder.parent)
            pairs = zip(seconds["plain"], seconds["capture"], strict=True)
            ratios = sorted(without / with_ for without, with_ in pairs)
            rates = {turn: tokens * len(spent) / sum(spent) for turn, spent in seconds.items()}
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(
                f"| {target.name} | {place} | {statistics.median(ratios):.3f} ({shown}) | {rates['capture']:,.0f}"
                f" | {rates['drop']:,.0f} | {rates['plain']:,.0f} | {rates['capture'] * spec.bytes_per_token / 1e9:.2f}"
                " |",
                flush=True,
            )


def batching(asked: argparse.Namespace) -> dict[str, Any]:
    """The engine's own names for what was asked."""
    extra: dict[str, Any] = {"load_format": "dummy"} if asked.random_weights else {}
    if asked.engine == "vllm":
        extra |= {"enforce_eager": True} if asked.eager else {}
        return {**extra, "max_num_batched_tokens": asked.batch_tokens}
    extra |= {"disable_cuda_graph": True} if asked.eager else {}
    return {**extra, "chunked_prefill_size": asked.batch_tokens, "max_prefill_tokens": asked.batch_tokens}


def sequences(tokens: int, longest: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Random texts of mixed lengths, a quarter of the longest to the longest, about `tokens` in all."""
    draw = random.Random(0)
    texts: list[tuple[int, ...]] = []
    while sum(map(len, texts)) < tokens:
        length = draw.randint(longest // 4, longest)
        texts.append(tuple(draw.randrange(10, vocabulary) for _ in range(length)))
    return texts


def prefill(engine: Engine, texts: Sequence[tuple[int, ...]], name: str) -> float:
    """Seconds."""
    asked = [Request(f"{name}-{i}", text, 1, ignore_eos=True) for i, text in enumerate(texts)]
    start = time.perf_counter()
    assert len(list(engine.generate(asked))) == len(texts)
    return time.perf_counter() - start


def captured(
    engine: Engine, texts: Sequence[tuple[int, ...]], spec: ShardSpec, name: str, folder: Path | None
) -> float:
    """Seconds, until the last shard is in `folder`, or until the last states were forgotten."""
    responses = {
        f"{name}-{i}": Response(f"{name}-{i}", "", "train", text, (True,) * len(text), 0, len(text), "given")
        for i, text in enumerate(texts)
    }
    samples = [TokenSample(id_, response.token_ids) for id_, response in responses.items()]
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    start = time.perf_counter()
    found = engine.capture(samples, spec.boundaries)
    if folder is None:
        assert sum(len(states.token_ids) for states in found) == sum(map(len, texts))
    else:
        with ShardWriter(folder, spec, tokens_per_shard(spec)) as writer:
            for states in found:
                writer.add(states, responses[states.id])
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
