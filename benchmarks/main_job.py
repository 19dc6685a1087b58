"""How long does the main job take, cold and with everything cached, and how much memory? How quick is the command line?

    python benchmarks/main_job.py            # in a scratch directory; about 6 minutes

Prints Markdown rows for docs/benchmarks.md. The model's one-time conversion is done before (it counts as installation).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMITS = {"cold": 360.0, "cached": 15.0, "--help": 1.5, "--cfg job": 1.5}
GIB = 2**30


def timed(args: list[str], cwd: Path) -> tuple[float, float]:
    """Seconds and peak GiB of `python -m eagle3x ARGS`, its children included."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle3x", *args], cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    log = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(log)
    return time.monotonic() - start, usage.ru_maxrss * 1024 / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="runs of the quick commands")
    repeat = parser.parse_args().repeat
    with tempfile.TemporaryDirectory() as scratch:
        cwd = Path(scratch)
        timed(["stage=prompts"], cwd)
        rows: dict[str, list[tuple[float, float]]] = {"cold": [timed([], cwd)]}
        rows["cached"] = [timed([], cwd) for _ in range(repeat)]
        rows["--help"] = [timed(["--help"], cwd) for _ in range(repeat)]
        rows["--cfg job"] = [timed(["--cfg", "job"], cwd) for _ in range(repeat)]
        summary = json.loads((cwd / "outputs/latest/summary.json").read_text())
        print(
            "| run | share of the limit | seconds (median, max) | limit | peak GiB |\n| --- | --- | --- | --- | --- |"
        )
        for name, runs in rows.items():
            seconds = sorted(s for s, _ in runs)
            median = seconds[len(seconds) // 2]
            limit = LIMITS[name]
            peak = max(gib for _, gib in runs)
            print(f"| {name} | {median / limit:.2f} | {median:.1f}, {seconds[-1]:.1f} | {limit:g} | {peak:.2f} |")
        print("\n| stage | seconds | tokens |\n| --- | --- | --- |")
        for stage, figures in summary["cells"][0]["stages"].items():
            print(f"| {stage} | {figures['wall_seconds']:.1f} | {figures['tokens'] or ''} |")
    print(f"\nhighest of all children: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / GIB:.2f} GiB")


if __name__ == "__main__":
    main()
