"""A wheel of this checkout runs where the checkout is not: conf/, prompts and templates travel in it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_wheel_runs_elsewhere(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        tmp_path / "dist",
        ROOT,
    ]
    subprocess.run(build, check=True, timeout=120)
    [wheel] = (tmp_path / "dist").glob("eagle3x-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {**os.environ, "PYTHONPATH": str(site)}
    for args in (["--cfg", "job"], ["stage=prompts"]):
        done = subprocess.run(
            [sys.executable, "-m", "eagle3x", *args],
            cwd=elsewhere,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    where = "import eagle3x.composition as c; print(c.CONF_DIR)"
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=elsewhere, env=env, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == site / "eagle3x" / "conf"
    packed = {str(f.relative_to(site)) for f in site.rglob("*") if f.is_file()}
    for source in ("eagle3x/data/builtin.jsonl", "eagle3x/reporting/templates"):
        assert any(name.startswith(source) for name in packed), source
    assert len(list(elsewhere.glob("outputs/artifacts/prompts/*/prompts.parquet"))) == 1
