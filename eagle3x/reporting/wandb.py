"""The run in Weights & Biases. Offline unless this machine is logged in; a failure here never costs the report."""

from __future__ import annotations

import netrc
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from eagle3x.progress import log
from eagle3x.reporting.summary import CellSummary, Summary
from eagle3x.reporting.tables import Table, all_tables

PUBLIC_HOST = "https://api.wandb.ai"
INIT_SECONDS = 20
FINISH_SECONDS = 120
"""After these W&B is given up: a network that hangs must not hold the run."""

Mode = Literal["online", "offline", "disabled"]


def track_run(summary: Summary, tracking: Mapping[str, Any], run_dir: Path) -> None:
    """Log configs (masked), training curves, tables and the report. Never raises for a failure of W&B: it warns."""
    mode = resolve_mode(tracking["mode"])
    if mode == "disabled":
        return
    try:
        _track(summary, tracking, run_dir, mode)
    except Exception as e:  # whatever W&B does, the report is on the disk and must stay the run's result
        log(f"W&B failed, the report is complete without it: {type(e).__name__}: {e}")


def resolve_mode(asked: str) -> Mode:
    """`auto` is WANDB_MODE if set, else online if credentials are at hand, else offline. No network, no W&B import."""
    if asked == "auto":
        asked = os.environ.get("WANDB_MODE", "") or ("online" if logged_in() else "offline")
    match asked:
        case "online" | "offline" | "disabled":
            return asked
        case "dryrun":
            return "offline"
        case _:
            return "online"


def logged_in() -> bool:
    """Whether an API key is in the environment or in netrc for W&B's host."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or PUBLIC_HOST).netloc
    named = os.environ.get("NETRC")
    files = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        try:
            credentials = netrc.netrc(file).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if credentials and credentials[2]:
            return True
    return False


def _track(summary: Summary, tracking: Mapping[str, Any], run_dir: Path, mode: Mode) -> None:
    import wandb

    directory = Path(tracking["dir"] or run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    if mode == "online" and not logged_in():
        log("W&B: this machine is not logged in (wandb login), so the run is kept offline")
        mode = "offline"
    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=INIT_SECONDS,
        finish_timeout=FINISH_SECONDS,
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
        x_disable_meta=True,  # it would hold the command line and paths as they were typed
        x_save_requirements=False,
    )
    init = partial(
        wandb.init, project=tracking["project"], entity=tracking["entity"], tags=list(tracking["tags"]) or None,
        name=_name(summary), dir=str(directory), config=_config(summary), settings=settings,
    )  # fmt: skip
    try:
        opened = init(mode=mode)
    except wandb.Error as e:
        if mode == "offline":
            raise
        log(f"W&B cannot be reached, so the run is kept offline (wandb sync uploads it): {e}")
        opened = init(mode="offline")
    with opened as run:
        run.define_metric("train/step", hidden=True)
        run.define_metric("*", step_metric="train/step")
        for record in _history(summary):
            run.log(record)
        for table in all_tables(summary):
            run.log({f"tables/{table.id}": _table(wandb, table)})
        run.log({"report": wandb.Html(str(run_dir / "report.html"), inject=False)})
        run.summary.update(_figures(summary))
        for name in ("report.html", "report.md", "summary.json"):
            kept = shutil.copy(run_dir / name, run.dir)
            run.save(kept, base_path=run.dir, policy="now")


def _name(summary: Summary) -> str:
    return summary.cells[0].name[:120] if len(summary.cells) == 1 else f"{len(summary.cells)} cells"


def _config(summary: Summary) -> dict[str, Any]:
    """The one cell's config, or each cell's under its name; already masked."""
    if len(summary.cells) == 1:
        return {**summary.cells[0].config, "overrides": list(summary.cells[0].overrides), "command": summary.command}
    return {"cells": {c.name: c.config for c in summary.cells}, "command": summary.command}


def _history(summary: Summary) -> list[dict[str, float]]:
    """Training curves of each drafter once, by optimizer step."""
    seen: set[str] = set()
    records: list[dict[str, float]] = []
    for cell in summary.cells:
        key = cell.stages["drafter"].key if "drafter" in cell.stages else cell.name
        if cell.curves is not None and key not in seen:
            seen.add(key)
            records += _points(cell, "" if len(summary.cells) == 1 else f"/{key[:8]}")
    return records


def _points(cell: CellSummary, suffix: str) -> list[dict[str, float]]:
    assert cell.curves is not None
    curves = cell.curves
    named = {"train/learning_rate": curves.learning_rate, "val/tau": curves.val_tau}
    named |= {f"train/loss_ttt_{k}": line for k, line in enumerate(curves.loss)}
    named |= {f"train/accuracy_ttt_{k}": line for k, line in enumerate(curves.accuracy)}
    named |= {f"val/survival_{i}": line for i, line in enumerate(curves.val_survival, 1)}
    points: dict[int, dict[str, float]] = {}
    for name, line in named.items():
        for step, value in line:
            points.setdefault(step, {})[f"{name}{suffix}"] = value
    return [{"train/step": step, **points[step]} for step in sorted(points)]


def _figures(summary: Summary) -> dict[str, Any]:
    """Headline figures, so that W&B's run table can sort by them."""
    figures: dict[str, Any] = {"headline": summary.headline}
    for cell, m in summary.measured:
        prefix = "" if len(summary.cells) == 1 else f"{cell.name}/"
        figures |= {f"{prefix}tau": m.tau.value, f"{prefix}tau_low": m.tau.low, f"{prefix}tau_high": m.tau.high}
        figures |= {f"{prefix}mismatched": m.mismatched, f"{prefix}slot_use": m.slot_use}
        figures |= {f"{prefix}survival_{i}": s.value for i, s in enumerate(m.survival, 1)}
        figures |= {f"{prefix}tau@temperature={s.temperature:g}": s.tau.value for s in m.sampled}
        figures |= {f"{prefix}speedup_decode@{c}": s.decode.value for c, s in m.speedup.items()}
        if m.replay:
            figures |= {f"{prefix}tau_replay": m.replay.tau.value}
    return figures


def _table(wandb: Any, table: Table) -> Any:
    return wandb.Table(columns=list(table.headers), data=[[e.flat for e in row] for row in table.rows])
