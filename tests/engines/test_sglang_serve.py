"""How an SGLang server is started, and what is refused before it is. No server is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sglang_pair import CHAIN, TREE, launch_of, scaled_pair

from eagle3x.benchmark.config import Speculation
from eagle3x.diagnosis.known_answer import KnownAnswer
from eagle3x.engines.sglang_serve import Launch, argv, serve
from eagle3x.types import EagleError


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> KnownAnswer:
    return scaled_pair(tmp_path_factory.mktemp("known"))


@pytest.fixture(scope="module")
def launch(known: KnownAnswer) -> Launch:
    return launch_of(known, Path("sglang.log"))


def test_command_line(launch: Launch, known: KnownAnswer) -> None:
    def given(words: Sequence[str]) -> dict[str, str]:
        return {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}

    words = argv(launch, 1234, known.drafter_dir, TREE)
    assert words[1].endswith("engine_server.py")
    assert words[2:7] == ["sglang.launch_server", "--host", "127.0.0.1", "--port", "1234"]
    speculative = {name: value for name, value in given(words).items() if name.startswith("--speculative")}
    assert speculative == {
        "--speculative-algorithm": "EAGLE3", "--speculative-draft-model-path": str(known.drafter_dir),
        "--speculative-draft-model-quantization": "unquant", "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "2", "--speculative-num-draft-tokens": "7",
    }  # fmt: skip
    assert given(argv(launch, 1, known.drafter_dir, CHAIN))["--speculative-num-draft-tokens"] == "4"
    assert not any("speculative" in word for word in argv(launch, 1, None, None))


def test_what_is_refused(launch: Launch, known: KnownAnswer) -> None:
    wrong = replace(launch, arguments={**launch.arguments, "port": 1, "speculative_algorithm": "EAGLE"})
    for drafter, speculation in ((known.drafter_dir, CHAIN), (None, None)):
        with pytest.raises(EagleError, match=r"engine_args: port, speculative_algorithm cannot be set there"):
            argv(wrong, 1, drafter, speculation)
    wide = Speculation(num_speculative_tokens=17, topk=8, num_draft_tokens=64)
    with pytest.raises(EagleError, match="needs 272 tokens of KV cache for the drafts of a request, and 256 are kept"):
        serve(launch, known.drafter_dir, wide)
    with pytest.raises(ValueError, match="arguments lack max_running_requests"):
        replace(launch, arguments={k: v for k, v in launch.arguments.items() if k != "max_running_requests"})
