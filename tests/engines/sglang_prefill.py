"""Runs in SGLang's environment: starts its offline engine, lets it read what stdin says, and prints what it answered.

stdin: {"engine": arguments of sglang.Engine, "batches": [[[request id, token ids, tokens to write], ...], ...]}
stdout's last line: [[[output ids, seconds], ...] per batch]
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    import sglang

    asked = json.load(sys.stdin)
    engine = sglang.Engine(**asked["engine"])
    answers = []
    for batch in asked["batches"]:
        start = time.perf_counter()
        outputs = engine.generate(
            input_ids=[ids for _, ids, _ in batch],
            rid=[rid for rid, _, _ in batch],
            sampling_params=[{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for _, _, n in batch],
        )
        answers.append([[o["output_ids"] for o in outputs], time.perf_counter() - start])
    engine.shutdown()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
