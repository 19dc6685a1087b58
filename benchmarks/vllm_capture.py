"""How fast does vLLM capture states, storage included, beside its own plain prefill of the same texts?

    python benchmarks/vllm_capture.py --target DIRECTORY --boundaries 2,14,26                    # CPU
    python benchmarks/vllm_capture.py --target DIRECTORY --boundaries 2,16,29 --device cuda --random-weights

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

from eagle3x.config import Hardware, TargetConfig
from eagle3x.data.extraction import tokens_per_shard
from eagle3x.data.shards import ShardSpec, ShardWriter
from eagle3x.engines import interpreter
from eagle3x.engines.config import Attention, Backend, Quantization, Slot
from eagle3x.engines.gpus import compute_capability
from eagle3x.engines.inside.states_ring import RingReader
from eagle3x.engines.resolved import DTYPE_BYTES, resolved_dtype
from eagle3x.engines.vllm_arguments import arguments, environment, resolved_attention
from eagle3x.engines.vllm_offline import OfflineVllm, capture_arguments, states_ring
from eagle3x.targets import resolve
from eagle3x.types import Request, Response, TokenSample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--boundaries", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--python", help="interpreter that has vLLM")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--eager", action="store_true")
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
    extra = {"load_format": "dummy"} if asked.random_weights else {}
    extra |= {"enforce_eager": True} if asked.eager else {}
    backend = Backend(
        name="vllm", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=asked.tensor_parallel,
        batch_size=asked.batch_size, engine_args=extra, python=asked.python, url=None, port=None,
        memory_fraction=asked.memory, start_timeout=600.0,
    )  # fmt: skip
    slot = Slot("extract", backend, Quantization(scheme="none"), Attention(name=asked.attention))
    found = interpreter.find("vllm", asked.python, asked.device)
    dtype = resolved_dtype(slot, hardware)
    attention = resolved_attention(slot, target, hardware, compute_capability(hardware))
    longest = asked.longest + 1
    shared = arguments(slot, target, hardware, attention, longest)
    shared |= {"skip_tokenizer_init": True, "worker_extension_cls": "vllm_extension.Report"}
    ids = [*boundaries, target.num_blocks]
    ring = states_ring(longest, asked.batch_tokens, len(ids), target.hidden_size, dtype)
    capture = capture_arguments(ids, ring, longest, asked.batch_tokens)
    batching = {name: capture[name] for name in ("enable_chunked_prefill", "max_num_batched_tokens")}
    variables = environment(slot, target, hardware, longest, found.python)

    texts = sequences(asked.tokens, asked.longest, target.vocab_size)
    tokens = sum(len(text) for text in texts)
    spec = ShardSpec(boundaries, target.hidden_size, dtype, "pre_norm")
    logs = Path(tempfile.mkdtemp(prefix="eagle3x-bench-"))
    per_token = len(ids) * target.hidden_size * DTYPE_BYTES[dtype]
    try:
        with (
            OfflineVllm(found.python, {**shared, **batching}, variables, logs / "plain.log") as plain,
            OfflineVllm(found.python, {**shared, **capture}, variables, logs / "capture.log") as capturing,
        ):
            print(f"vLLM {found.version}, {capturing.report}, {len(texts)} sequences, {tokens} tokens a turn")
            print(
                "| target | shards in | capture / plain (median, all) | capture tok/s | dropped | plain | stored GB/s |"
            )
            print("| --- | --- | --- | --- | --- | --- | --- |")
            for place in asked.store:
                folder = Path(tempfile.mkdtemp(prefix="eagle3x-bench-", dir=place)) / "shards"
                seconds: dict[str, list[float]] = {"plain": [], "capture": [], "drop": []}
                for round_ in range(asked.rounds + 1):
                    for turn, side in enumerate(("plain", "capture", "drop", "drop", "capture", "plain")):
                        name = f"{place}-{round_}-{turn}"
                        if side == "plain":
                            spent = prefill(plain, texts, name)
                        elif side == "drop":
                            spent = captured(capturing, texts, spec, ring, name, None)
                        else:
                            spent = captured(capturing, texts, spec, ring, name, folder)
                        if round_:
                            seconds[side].append(spent)
                shutil.rmtree(folder.parent)
                pairs = zip(seconds["plain"], seconds["capture"], strict=True)
                ratios = sorted(without / with_ for without, with_ in pairs)
                rates = {side: tokens * len(spent) / sum(spent) for side, spent in seconds.items()}
                shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                print(
                    f"| {target.name} | {place} | {statistics.median(ratios):.3f} ({shown}) | {rates['capture']:,.0f}"
                    f" | {rates['drop']:,.0f} | {rates['plain']:,.0f} | {rates['capture'] * per_token / 1e9:.2f} |",
                    flush=True,
                )
    finally:
        ring.close()


def sequences(tokens: int, longest: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Random texts of mixed lengths, a quarter of the longest to the longest, about `tokens` in all."""
    draw = random.Random(0)
    texts: list[tuple[int, ...]] = []
    while sum(map(len, texts)) < tokens:
        length = draw.randint(longest // 4, longest)
        texts.append(tuple(draw.randrange(10, vocabulary) for _ in range(length)))
    return texts


def prefill(engine: OfflineVllm, texts: Sequence[tuple[int, ...]], name: str) -> float:
    """Seconds."""
    request = Request("", (), 1, ignore_eos=True)
    asked = [replace(request, id=f"{name}-{i}", prompt_ids=text) for i, text in enumerate(texts)]
    start = time.perf_counter()
    assert len(list(engine.generate(asked, ()))) == len(texts)
    return time.perf_counter() - start


def captured(
    engine: OfflineVllm,
    texts: Sequence[tuple[int, ...]],
    spec: ShardSpec,
    ring: RingReader,
    name: str,
    folder: Path | None,
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
    found = engine.capture(samples, len(spec.boundaries), ring)
    if folder is None:
        assert sum(len(states.token_ids) for states in found) == sum(map(len, texts))
    else:
        with ShardWriter(folder, spec, tokens_per_shard(spec)) as writer:
            for states in found:
                writer.add(states, responses[states.id])
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
