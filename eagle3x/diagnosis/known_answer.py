"""The tagged known-answer pair: a target and a drafter whose acceptance length is known before they run.

The target's next token is a fixed permutation f of the current one, and every block moves a tag in the stream:

    x_b = e[token] + e[CONST] + e[TAG + b]          boundary b, unit vectors; attention writes nothing

The drafter's fc adds up the token from all its slots, and for slot j, which wants boundary w_j, the fault

    z_j = x[CONST] - x[TAG + w_j]                   0 if slot j holds w_j, 1 for another boundary,
                                                    -1 for a block's output without the stream it is added to

Its MLP moves e[token] to e[f(token)] and adds z_j squared, many times over, to a trap that its head reads as token 1,
which the target never writes. So with the right states every draft is right, tau = k + 1; if one slot is wrong no
draft is ever right, tau = 1. A normed stream is 6.5 times as long, so the token that the MLP should have moved stays in
front: wrong again. (RMSNorm forgets scale, but the residual does not.)

Both are plain Llama checkpoints. What decides is whole units apart, so bfloat16 engines give the same answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3x.capture import default_boundaries, exported_keys
from eagle3x.drafters.architecture import Architecture
from eagle3x.types import SpecCounters

VOCAB, HIDDEN, BLOCKS, HEADS, KV_HEADS, HEAD_DIM, EPS = 64, 128, 12, 4, 2, 64, 1e-5
BOUNDARIES = (3, 5, 8)
"""Every id off by one is a boundary that all engines capture, and no slot is right by default (2, 6, 9)."""
UNKNOWN, TRAP_TOKEN, EOS = 0, 1, 2
START = 3
"""The last token of `PROMPT`: where the walk along f starts."""
PROMPT = (17, 40, 9, 22, START)
CONST, TAG = VOCAB, VOCAB + 1
"""Coordinates of the target's stream, after one for each token."""
FAULT, TRAP = VOCAB, VOCAB + len(BOUNDARIES)
"""Coordinates of the drafter's stream, after one for each token."""
TRAP_WEIGHT = 1.0
LOGIT = 4.0

Corruption = Literal["none", "early", "late", "swapped", "normed", "without_residual"]


@dataclass(frozen=True)
class KnownAnswer:
    """The pair on disk, and what it must do. `successor[t]` = f(t). `missing`: tokens not in the draft vocabulary."""

    target_dir: Path
    drafter_dir: Path
    boundaries: tuple[int, ...]
    num_speculative_tokens: int
    successor: tuple[int, ...]
    missing: frozenset[int]

    def text(self, prompt_ids: Sequence[int], tokens: int) -> tuple[int, ...]:
        """The next `tokens` tokens after the prompt, whatever they are."""
        out, current = [], prompt_ids[-1]
        for _ in range(tokens):
            current = self.successor[current]
            out.append(current)
        return tuple(out)

    def output(self, prompt_ids: Sequence[int], max_tokens: int, ignore_eos: bool = False) -> tuple[int, ...]:
        """What the target answers: up to and including the stop token."""
        text = self.text(prompt_ids, max_tokens)
        if ignore_eos or EOS not in text:
            return text
        return text[: text.index(EOS) + 1]

    def counters(self, prompt_ids: Sequence[int], max_tokens: int, ignore_eos: bool = False) -> SpecCounters:
        """What an engine that counts past the stop must count with the right drafter."""
        k, wanted = self.num_speculative_tokens, len(self.output(prompt_ids, max_tokens, ignore_eos))
        text = self.text(prompt_ids, wanted + k + 1)
        steps, accepted_at, known = 0, [0] * k, 1
        while known < wanted:
            drafts = text[known : known + k]
            accepted = next((i for i, token in enumerate(drafts) if token in self.missing), k)
            for i in range(accepted):
                accepted_at[i] += 1
            steps, known = steps + 1, known + accepted + 1
        return SpecCounters(steps, steps * k, tuple(accepted_at))


@dataclass(frozen=True)
class Variant:
    """A drafter directory and the tau that any engine must measure with it.

    fed: the boundaries that the config's ids make vLLM and SGLang feed. `names_ids` is False where they come from the
    engines' defaults: the transformers engine refuses such a drafter.
    """

    name: str
    drafter_dir: Path
    fed: tuple[int, ...]
    tau: float
    names_ids: bool = True


def build(
    directory: Path, num_speculative_tokens: int = 3, missing: Sequence[int] = (), eos_at: int | None = None
) -> KnownAnswer:
    """Write the pair to `directory`/target and `directory`/drafter.

    missing: tokens left out of the draft vocabulary. eos_at: after `PROMPT` the output token of this number (from 1) is
    the stop token; the text goes on behind it. None: the stop token is never written.
    """
    successor = _successor(eos_at)
    known = KnownAnswer(
        directory / "target",
        directory / "drafter",
        BOUNDARIES,
        num_speculative_tokens,
        successor,
        frozenset(missing),
    )
    _write_target(known.target_dir, successor)
    _write_drafter(known.drafter_dir, successor, known.missing)
    return known


def variants(known: KnownAnswer, directory: Path) -> list[Variant]:
    """The right drafter and wrong ones, written to `directory`: tau is k+1 for the first and 1 for all others.

    Ids off by one (each slot, and all), the engines' default boundaries (by name, and by naming none), and fc columns
    in another order, which is the same as feeding the right boundaries to the wrong slots.
    """
    right = float(known.num_speculative_tokens + 1)
    made = [Variant("right", known.drafter_dir, known.boundaries, right)]
    for way, offset in (("early", -1), ("late", 1)):
        for slot in range(len(known.boundaries)):
            fed = tuple(b + offset * (j == slot) for j, b in enumerate(known.boundaries))
            made.append(_rewired(known, directory, f"slot_{slot}_{way}", fed))
        made.append(_rewired(known, directory, f"all_{way}", tuple(b + offset for b in known.boundaries)))
    made.append(_rewired(known, directory, "default_boundaries", default_boundaries(BLOCKS)))
    made.append(_rewired(known, directory, "missing_ids", default_boundaries(BLOCKS), names_ids=False))
    for order in ((1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        name = "slots_" + "".join(map(str, order))
        made.append(_rewired(known, directory, name, known.boundaries, order=order))
    return made


def corrupted(streams: Sequence[Tensor], boundaries: Sequence[int], corruption: Corruption, slot: int) -> Tensor:
    """What a capture with one fault feeds: `streams[b]` is [T, H] at boundary b, the result [T, A*H].

    The fault is in `slot`; `swapped` exchanges it with the next one. Only "none" gives tau = k + 1.
    """
    parts = [streams[b] for b in boundaries]
    at, after = boundaries[slot], (slot + 1) % len(boundaries)
    match corruption:
        case "none":
            pass
        case "early":
            parts[slot] = streams[at - 1]
        case "late":
            parts[slot] = streams[at + 1]
        case "swapped":
            parts[slot], parts[after] = parts[after], parts[slot]
        case "normed":
            parts[slot] = parts[slot] * torch.rsqrt(parts[slot].pow(2).mean(-1, keepdim=True) + EPS)
        case "without_residual":
            parts[slot] = streams[at] - streams[at - 1]
    return torch.cat(parts, dim=-1)


def _successor(eos_at: int | None) -> tuple[int, ...]:
    """One cycle over tokens 3..62, odd ones first, with the stop token `eos_at` steps after START if it is wanted."""
    cycle = [*range(START, VOCAB - 1, 2), *range(START + 1, VOCAB - 1, 2)]
    if eos_at is not None:
        if not 1 <= eos_at <= len(cycle):
            raise ValueError(f"eos_at must be in 1..{len(cycle)}, not {eos_at}")
        cycle.insert(eos_at, EOS)
    following = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    return tuple(following.get(token, token) for token in range(VOCAB))


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def _normed_unit(units: int) -> float:
    """A coordinate 1 after RMSNorm, in a stream of `units` such coordinates."""
    return 1 / math.sqrt(units / HIDDEN + EPS)


def _write_target(directory: Path, successor: Sequence[int]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=EPS,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=TRAP_TOKEN,
        eos_token_id=EOS,
        pad_token_id=UNKNOWN,
    )
    model = LlamaForCausalLM(config)
    weights = model.state_dict()
    units = _normed_unit(3)
    for name, weight in weights.items():
        weight.fill_(1 if name.endswith("norm.weight") else 0)
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, :VOCAB] = torch.eye(VOCAB)
    embedding[:, [CONST, TAG]] = 1
    for token, following in enumerate(successor):
        weights["lm_head.weight"][following, token] = LOGIT
    for b in range(BLOCKS):
        # One neuron that is always on: it reads CONST, and takes the tag from b to b + 1.
        for projection in ("gate_proj", "up_proj"):
            weights[f"model.layers.{b}.mlp.{projection}.weight"][0, CONST] = 1
        down = weights[f"model.layers.{b}.mlp.down_proj.weight"]
        down[TAG + b, 0] = -1 / (_silu(units) * units)
        down[TAG + b + 1, 0] = 1 / (_silu(units) * units)
    model.save_pretrained(directory)
    _write_tokenizer(directory)


def _write_tokenizer(directory: Path) -> None:
    """Words `t3` .. `t63`, and the three special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(("<unk>", "<s>", "</s>", *(f"t{i}" for i in range(START, VOCAB))))}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",  # noqa: S106
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        pad_token="<unk>",  # noqa: S106
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    tokenizer.save_pretrained(directory)


def _write_drafter(directory: Path, successor: Sequence[int], missing: frozenset[int]) -> None:
    ids = [token for token in range(VOCAB) if token not in missing and token != UNKNOWN]
    slots = len(BOUNDARIES)
    fc = torch.zeros(HIDDEN, slots, HIDDEN)
    for slot, boundary in enumerate(BOUNDARIES):
        fc[:VOCAB, slot, :VOCAB] = torch.eye(VOCAB) / slots
        fc[FAULT + slot, slot, CONST] = 1
        fc[FAULT + slot, slot, TAG + boundary] = -1
    gate, up, down = (torch.zeros(HIDDEN, HIDDEN) for _ in range(3))
    unit = _normed_unit(1)
    for token, following in enumerate(successor):
        gate[token, token] = up[token, token] = 1
        down[following, token] += 1 / (_silu(unit) * unit)
        down[token, token] -= 1 / (_silu(unit) * unit)
    for slot in range(slots):
        # silu(z) z + silu(-z) (-z) = z squared: two neurons for each fault, whatever its sign.
        for neuron, sign in ((VOCAB + 2 * slot, 1), (VOCAB + 2 * slot + 1, -1)):
            gate[neuron, FAULT + slot] = up[neuron, FAULT + slot] = sign
            down[TRAP, neuron] = TRAP_WEIGHT
    head = torch.zeros(VOCAB, HIDDEN)
    for token, following in enumerate(successor):
        head[following, token] = LOGIT
    head[TRAP_TOKEN] = 0
    head[TRAP_TOKEN, TRAP] = LOGIT
    noise = torch.Generator().manual_seed(0)

    def attention(rows: int) -> Tensor:
        # Runs, but o_proj is zero: what attention computes is written nowhere.
        return torch.randn(rows, 2 * HIDDEN, generator=noise) * 0.02

    block = {
        "self_attn.q_proj": attention(HEADS * HEAD_DIM),
        "self_attn.k_proj": attention(KV_HEADS * HEAD_DIM),
        "self_attn.v_proj": attention(KV_HEADS * HEAD_DIM),
        "self_attn.o_proj": torch.zeros(HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": down,
        "hidden_norm": torch.ones(HIDDEN),
        "input_layernorm": torch.ones(HIDDEN),
        "post_attention_layernorm": torch.ones(HIDDEN),
    }
    chosen = torch.tensor(ids)
    weights = {f"midlayer.{name}.weight": weight for name, weight in block.items()} | {
        "fc.weight": fc.reshape(HIDDEN, slots * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head[chosen],
        "d2t": chosen - torch.arange(len(ids)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True),
    }
    architecture = Architecture(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=EPS,
        rope_theta=10000.0,
        max_position_embeddings=2048,
        vocab_size=VOCAB,
        draft_vocab_size=len(ids),
        target_hidden_size=HIDDEN,
        num_aux=slots,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )
    _write_checkpoint(directory, weights, architecture.to_config() | _tokens() | _ids(BOUNDARIES))


def _tokens() -> dict[str, object]:
    return {"bos_token_id": TRAP_TOKEN, "eos_token_id": EOS, "torch_dtype": "float32"}


def _ids(boundaries: Sequence[int]) -> dict[str, object]:
    """Keys that make every engine feed `boundaries`."""
    return exported_keys(boundaries, BLOCKS, "LlamaForCausalLM").config()


def _write_checkpoint(directory: Path, weights: dict[str, Tensor], config: dict[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _rewired(
    known: KnownAnswer,
    directory: Path,
    name: str,
    fed: tuple[int, ...],
    names_ids: bool = True,
    order: tuple[int, ...] | None = None,
) -> Variant:
    """A copy of the drafter with other ids, or with its fc columns in another order."""
    weights = load_file(known.drafter_dir / "model.safetensors")
    config = json.loads((known.drafter_dir / "config.json").read_text(encoding="utf-8"))
    for key in _ids(known.boundaries).keys() - {"num_aux_hidden_states"}:
        del config[key]
    if names_ids:
        config |= _ids(fed)
    if order is not None:
        columns = weights["fc.weight"].reshape(HIDDEN, len(order), HIDDEN)
        weights["fc.weight"] = columns[:, list(order)].reshape(HIDDEN, -1)
    _write_checkpoint(directory / name, weights, config)
    return Variant(name, directory / name, fed, 1.0, names_ids)
