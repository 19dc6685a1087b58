"""Manifests: what they keep, what they refuse, and that no secret gets into one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from eagle3x.manifest import FileRecord, Manifest, masked, plain
from eagle3x.provenance import GitRevision
from eagle3x.types import EagleError

MANIFEST = Manifest(
    schema_version=1, stage="responses", key="0123456789abcdef0123", version=3, identity={"seed": 1},
    parents={"prompts": "abcdef0123456789abcd"}, config={"train": {"betas": [0.9, 0.95]}}, packages={"numpy": "2.4"},
    python="3.11.7", git=GitRevision("c0ffee", dirty=True), host={"cpus": 2}, started="2026-01-02T03:04:05+00:00",
    ended="2026-01-02T03:05:05+00:00", wall_seconds=60.5, facts={"tokens": 12},
    files={"a/b.bin": FileRecord(5, "00ff"), "c.bin": FileRecord(7, "11ee")},
)  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path / "manifest.json")
    assert Manifest.read(tmp_path / "manifest.json") == MANIFEST
    assert MANIFEST.bytes == 12
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    written = json.loads((tmp_path / "manifest.json").read_text())
    assert written["schema_version"] == 1
    assert written["files"]["a/b.bin"] == {"bytes": 5, "sha256": "00ff"}
    assert written["git"] == {"revision": "c0ffee", "dirty": True}


def test_without_git(tmp_path: Path) -> None:
    MANIFEST_NO_GIT = replace(MANIFEST, git=None)
    MANIFEST_NO_GIT.write(tmp_path / "m.json")
    assert Manifest.read(tmp_path / "m.json").git is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"schema_version": 1}'])
def test_nonsense_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(EagleError, match=r"m\.json is not a manifest"):
        Manifest.read(tmp_path / "m.json")


def test_other_schema_version_is_refused(tmp_path: Path) -> None:
    replace(MANIFEST, schema_version=2).write(tmp_path / "m.json")
    with pytest.raises(EagleError, match="schema version 2, this eagle3x reads 1"):
        Manifest.read(tmp_path / "m.json")


@pytest.mark.parametrize("value", ["hunter2", {"nested": "hunter2"}, ["hunter2"]])
@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "API_KEY", "api-key", "apikey", "access_key", "wandb_api_key", "ssh_keys", "token",
     "hf_token", "HF_TOKEN", "api_token", "authToken", "api_tokens", "secret", "client_secret", "password",
     "db_password"],
)  # fmt: skip
def test_secrets_are_masked(name: str, value: Any) -> None:
    kept = masked({"backend": {"engine_args": {name: value, "dtype": "float32"}}, "list": [{name: value}]})
    assert "hunter2" not in json.dumps(kept)
    assert kept["backend"]["engine_args"]["dtype"] == "float32"


def test_numeric_password_is_masked() -> None:
    assert masked({"password": 123456}) == {"password": "***"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", 128), ("tokens_per_step", 2048), ("cut_tokens", 3), ("num_speculative_tokens", 3),
     ("tokens", 5), ("num_key_value_heads", 8), ("key_heads", 4), ("eos_token", "<|im_end|>"), ("bos_token", "<s>"),
     ("token_ids", [1, 2]), ("tokenizer", "ab12"), ("use_auth_token", True), ("api_key", None), ("monk", "x"),
     ("stop_tokens", ["a"]), ("kv_cache_dtype", "fp8"), ("probe_tokens", 24)],
)  # fmt: skip
def test_what_is_no_secret_stays(name: str, value: Any) -> None:
    assert masked({name: value}) == {name: value}


@pytest.mark.parametrize(
    ("text", "kept"),
    [("http://bob:hunter2@host:8000/v1", "http://***@host:8000/v1"),
     ("http://host/v1?api_key=hunter2&x=1", "http://host/v1?api_key=***&x=1"),
     ("--api-key=hunter2 --port=80", "--api-key=*** --port=80"),
     ("http://host:8000/a@b", "http://host:8000/a@b"),
     ("--max-new-tokens=5", "--max-new-tokens=5")],
)  # fmt: skip
def test_secrets_inside_text(text: str, kept: str) -> None:
    assert masked({"url": text, "args": [text]}) == {"url": kept, "args": [kept]}


def test_masking_leaves_its_argument() -> None:
    config = {"api_key": "hunter2"}
    masked(config)
    assert config == {"api_key": "hunter2"}


def test_plain() -> None:
    @dataclass(frozen=True)
    class Node:
        betas: tuple[float, float]
        path: Path

    values = plain({"a": Node((0.9, 0.95), Path("/x")), 3: None})
    assert values == {"a": {"betas": [0.9, 0.95], "path": "/x"}, "3": None}
    with pytest.raises(TypeError, match="not set"):
        plain({"a": {1, 2}})
