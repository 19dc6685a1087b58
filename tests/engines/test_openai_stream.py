"""What is sent for a request, and what is made of models that a server lists. The rest is in test_vllm_server.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle3x.engines.openai_stream import body
from eagle3x.engines.vllm_attach import served_model
from eagle3x.targets import Target
from eagle3x.types import EagleError, Request

REQUEST = Request("a", (5, 6, 7), max_tokens=9, temperature=0.5, top_p=0.9, seed=4)


def test_nothing_is_left_to_the_servers_defaults() -> None:
    """A server started with the model's own generation config would otherwise sample by that."""
    assert body(REQUEST, "m", (2, 3), None) == {
        "model": "m", "prompt": [5, 6, 7], "max_tokens": 9, "ignore_eos": True, "stop_token_ids": [2, 3],
        "temperature": 0.5, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 4, "return_token_ids": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_what_a_request_adds() -> None:
    assert body(replace(REQUEST, ignore_eos=True), "m", (2, 3), None)["stop_token_ids"] == []
    assert body(REQUEST, "m", (), "salt")["cache_salt"] == "salt"
    gaps = body(replace(REQUEST, top2_gaps=True), "m", (), None)
    assert (gaps["logprobs"], gaps["return_tokens_as_token_ids"]) == (2, True)


def test_the_model_that_an_attached_server_has(tiny_target: Target) -> None:
    def models(*listed: tuple[str, str, str | None]) -> dict[str, list[dict[str, str | None]]]:
        return {"data": [{"id": name, "root": root, "parent": parent} for name, root, parent in listed]}

    adapter = ("lora", "/lora", "base")
    assert served_model(models(("base", "/there", None), adapter), tiny_target, "u") == "base"
    assert served_model(models(("alias", "/there", None), ("base", "/there", None)), tiny_target, "u") == "alias"
    assert served_model(models(("x", "/x", None), ("y", str(tiny_target.path), None)), tiny_target, "u") == "y"
    with pytest.raises(EagleError, match=r"the server has x, y; target\.name must be one of them"):
        served_model(models(("x", "/x", None), ("y", "/y", None)), tiny_target, "u")
    with pytest.raises(EagleError, match="the server has no model"):
        served_model(models(adapter), tiny_target, "u")
