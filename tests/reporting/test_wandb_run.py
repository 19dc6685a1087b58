from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3x.reporting import report
from eagle3x.reporting import wandb as tracking

SECRET = "sk-0123456789abcdef0123456789"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_auto_is_offline_without_credentials_and_online_with_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert tracking.resolve_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine example.org login user password 1234\n")
    assert tracking.resolve_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 1234\n")
    assert tracking.resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert tracking.resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert tracking.resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.resolve_mode("auto") == "disabled"
    assert tracking.resolve_mode("offline") == "offline"


def test_a_broken_netrc_is_no_login(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login\n")
    assert not tracking.logged_in()


def test_disabled_does_not_import_wandb() -> None:
    code = (
        "import sys; from eagle3x.reporting import report, wandb;"
        "wandb.track_run(None, {'mode': 'disabled'}, None); print('wandb' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_offline_run_holds_config_curves_and_tables_and_no_secret(make_cell: Any, tmp_path: Path) -> None:
    cell = make_cell()
    cell.config["tracking"]["mode"] = "offline"
    cell.config["serve"]["backend"]["engine_args"] = {"api_key": SECRET, "max_model_len": 512}
    run_dir = tmp_path / "run"
    report.save_cell(cell, tmp_path / "sweep" / "0")
    record = json.loads((tmp_path / "sweep" / "0" / "cell_record.json").read_text())
    assert SECRET not in json.dumps(record)
    code = (
        "import sys; from pathlib import Path; from eagle3x.reporting import report\n"
        "cell, = report.load_cells(Path(sys.argv[1])); cell.config['note'] = sys.argv[3]\n"
        "cell.config['serve']['backend']['engine_args']['api_key'] = sys.argv[3]\n"
        "report.write_report(Path(sys.argv[2]), [cell], 'python -m eagle3x api_key=' + sys.argv[3])"
    )
    start = time.monotonic()
    argv = [sys.executable, "-c", code, str(tmp_path / "sweep"), str(run_dir), SECRET]
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    assert time.monotonic() - start < 60
    assert "wandb:" not in done.stdout + done.stderr
    leaks = [f for f in tmp_path.rglob("*") if f.is_file() and SECRET.encode() in f.read_bytes()]
    assert leaks == []

    (run_file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    config, history, summary, files = read_run(run_file)
    assert config["train"]["ttt_steps"] == 3
    assert config["serve"]["backend"]["engine_args"] == {"api_key": "***", "max_model_len": 512}
    losses = [r["train/loss_ttt_0"] for r in history if "train/loss_ttt_0" in r]
    assert len(losses) == 400
    assert losses[0] == pytest.approx(2.3 + 3.4 * math.exp(-1 / 110))
    assert history[1]["train/learning_rate"] == pytest.approx(1e-3 * 399 / 400)
    assert [r["train/step"] for r in history if "val/tau" in r] == [0, 80, 160, 240, 320, 400]
    assert any("tables/cells" in r for r in history)
    assert any("report" in r for r in history)
    measured = json.loads((run_dir / "summary.json").read_text())["cells"][0]
    assert summary["tau"] == measured["tau"]["value"]
    assert {"report.html", "report.md", "summary.json"} <= files


def test_failure_of_wandb_keeps_the_report(
    make_cell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(wandb, "init", broken)
    cell = make_cell()
    cell.config["tracking"]["mode"] = "offline"
    with caplog.at_level("INFO", logger="eagle3x"):
        summary = report.write_report(tmp_path / "run", [cell], "python -m eagle3x")
    assert "no space left on device" in caplog.text
    assert summary.cells[0].status == "ok"
    assert (tmp_path / "run" / "report.html").is_file()


def test_online_without_login_is_kept_offline_and_said(
    make_cell: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = make_cell()
    cell.config["tracking"]["mode"] = "online"
    with caplog.at_level("INFO", logger="eagle3x"):
        report.write_report(tmp_path / "run", [cell], "python -m eagle3x")
    assert "not logged in" in caplog.text
    assert list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))


def test_a_server_that_cannot_be_reached_does_not_hold_the_run(
    make_cell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setattr(tracking, "INIT_SECONDS", 2)
    cell = make_cell()
    cell.config["tracking"]["mode"] = "auto"
    start = time.monotonic()
    with caplog.at_level("INFO", logger="eagle3x"):
        report.write_report(tmp_path / "run", [cell], "python -m eagle3x")
    assert time.monotonic() - start < 30
    assert "cannot be reached" in caplog.text
    assert list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))


def read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], set[str]]:
    """What an offline run's file would upload: config, history, summary, names of files."""
    from wandb.proto import wandb_internal_pb2

    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    files: set[str] = set()
    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in (*record.run.config.update, *record.config.update):
            config[item.key or item.nested_key[0]] = json.loads(item.value_json)
        if record.history.item:
            history.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item})
        for item in record.summary.update:
            summary[item.key or item.nested_key[0]] = json.loads(item.value_json)
        files |= {f.path for f in record.files.files}
    return config, history, summary, files


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log (blocks of 32 KiB; crc, length, type) after W&B's header of 7 bytes."""
    assert content.startswith(b":W&B")
    block, at, parts = 32768, 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
