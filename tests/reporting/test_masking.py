from __future__ import annotations

import pytest

from eagle3x.reporting.masking import masked, masked_strings, masked_text


def test_values_of_secret_names_go_and_counts_of_tokens_stay() -> None:
    config = {
        "engine_args": {"api_key": "abc", "hf_token": "def", "max_num_batched_tokens": 512, "password": "x"},
        "train": {"tokens_per_step": 1024},
        "eos_token": "<|im_end|>",
        "list": [{"secret": "y"}],
    }
    assert masked(config) == {
        "engine_args": {"api_key": "***", "hf_token": "***", "max_num_batched_tokens": 512, "password": "***"},
        "train": {"tokens_per_step": 1024},
        "eos_token": "<|im_end|>",
        "list": [{"secret": "***"}],
    }


def test_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert masked_text("python -m eagle3x serve.backend.engine_args.api_key=abc seed=2") == (
        "python -m eagle3x serve.backend.engine_args.api_key=*** seed=2"
    )
    assert masked_text("http://me:pw@host:80/v1") == "http://***@host:80/v1"
    assert masked_text("401 for hf_abcdefghijklmnopqrstuv") == "401 for ***"
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert masked_text("key 0123456789abcdef refused") == "key *** refused"
    monkeypatch.setenv("WANDB_API_KEY", "short")
    assert masked_text("a short key") == "a short key"


def test_manifest_keys_are_no_secrets() -> None:
    assert masked_strings({"key": "a1b2", "facts": {"tokens": 3}}) == {"key": "a1b2", "facts": {"tokens": 3}}
