"""Every variant of the tagged known-answer pair through vLLM's server: is its tau what is certain beforehand?

    python benchmarks/known_answer_vllm.py            # CPU; a server start for each variant, 10 to 20 minutes
    python benchmarks/known_answer_vllm.py --device cuda --attention triton

Beside the variants of diagnosis/known_answer.py two ways in which people export: nested ids alone, as SGLang wants them
(vLLM reads them as they are: one block early), and raw ids plus one in both keys (one late).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from eagle3x.benchmark.config import Speculation
from eagle3x.benchmark.metrics import tau
from eagle3x.capture import KEY, NESTED, Reader, predicted_boundaries
from eagle3x.config import Hardware, TargetConfig
from eagle3x.diagnosis.known_answer import BLOCKS, PROMPT, KnownAnswer, Variant, build, variants
from eagle3x.engines import adapter
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.engines.vllm import VllmEngine
from eagle3x.targets import resolve
from eagle3x.types import Request, total

K = 3
TOKENS = 40
EOS_AT = 18


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--runner", choices=("auto", "v1", "v2"), default="auto")
    parser.add_argument("--python")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        known = build(folder / "pair", K, eos_at=EOS_AT)
        served = [*variants(known, folder / "variants"), *by_hand(known, folder)]
        target = resolve(
            TargetConfig(
                name="known-answer", path=str(known.target_dir), wheel=None, hub_id=None, revision=None,
                trust_remote_code=False, aux_layer_ids=known.boundaries,
            )
        )  # fmt: skip
        backend = Backend(
            name="vllm", runner=asked.runner, dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=8,
            engine_args={"enforce_eager": True}, python=asked.python, url=None, port=None, memory_fraction=0.5,
            start_timeout=600.0,
        )  # fmt: skip
        slot = Slot("serve", backend, Quantization(scheme="none"), Attention(name=asked.attention))
        hardware = Hardware(device=asked.device, threads=None, devices=None)
        engine = adapter("vllm").open(slot, target, hardware, Job(256, folder / "logs"))
        assert isinstance(engine, VllmEngine)
        print("| variant | fed | tau | certain |\n| --- | --- | --- | --- |", flush=True)
        wrong = 0
        with engine:
            for variant in served:
                found = measured(engine, known, variant)
                wrong += found != variant.tau
                print(f"| {variant.name} | {list(variant.fed)} | {found:.3f} | {variant.tau:.3f} |", flush=True)
    sys.exit(f"{wrong} variants are not what is certain" if wrong else 0)


def measured(engine: VllmEngine, known: KnownAnswer, variant: Variant) -> float:
    """Tau of a text without a stop, and, for the right drafter, the exact counters with the stop in mid-draft too."""
    requests = [Request("through", PROMPT, TOKENS, ignore_eos=True), Request("stopped", PROMPT, TOKENS)]
    with engine.serve(variant.drafter_dir, Speculation.chain(K)) as endpoint:
        before = endpoint.totals()
        completions = {c.id: c for c in endpoint.complete(requests, 1)}
        after = endpoint.totals()
    for request in requests:
        assert completions[request.id].token_ids == known.output(PROMPT, TOKENS, request.ignore_eos), variant.name
    counted = [c.counters for c in completions.values() if c.counters is not None]
    if counted and variant.tau > 1:
        assert [completions[r.id].counters for r in requests] == [
            known.counters(PROMPT, TOKENS, r.ignore_eos) for r in requests
        ], variant.name
    if counted:
        return tau(total(counted))
    assert before is not None
    assert after is not None
    return tau(after - before)


def by_hand(known: KnownAnswer, folder: Path) -> list[Variant]:
    """Exports as people write them."""
    found = []
    for name in ("nested_only", "plus_one_in_both"):
        shutil.copytree(known.drafter_dir, folder / name)
        file = folder / name / "config.json"
        config = json.loads(file.read_text())
        if name == "nested_only":
            del config[KEY]
        else:
            late = [b + 1 for b in known.boundaries]
            config |= {KEY: late, NESTED: {**config[NESTED], KEY: late}}
        file.write_text(json.dumps(config))
        fed = predicted_boundaries(Reader("vllm", "0.32.0", runner="v1"), config, BLOCKS)
        found.append(Variant(name, folder / name, fed, 1.0))
    return found


if __name__ == "__main__":
    main()
