"""Speculation above temperature 0: the distribution of what is written, by counting against the target's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eagle3x.benchmark.config import Speculation
from eagle3x.config import Hardware, TargetConfig
from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.checkpoint import save
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.engines import adapter
from eagle3x.engines.config import Attention, Backend, Job, Quantization, Slot
from eagle3x.engines.transformers_decoding import Decoding
from eagle3x.targets import Target, resolve
from eagle3x.types import Completion, Request, total

V, TOKENS, K, REQUESTS = 6, 3, 2, 6000
KEPT = torch.tensor([0, 2, 3, 5])
"""The draft vocabulary: two tokens are never drafted."""
PROMPT = (5, 1, 3, 3)
TEMPERATURE = 1.4
SLOT = Slot(
    "serve",
    Backend(name="transformers", runner="auto", dtype="auto", kv_cache_dtype="auto", tensor_parallel=1, batch_size=8,
            engine_args={}, python=None, url=None, port=None, memory_fraction=0.85, start_timeout=60.0),
    Quantization("none"),
    Attention("auto"),
)  # fmt: skip


@pytest.fixture(scope="module")
def small(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random Llama of 3 blocks that knows V tokens, so that every text of TOKENS tokens can be counted."""
    path = tmp_path_factory.mktemp("small")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.35, eos_token_id=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tiny_target.path / name).read_bytes())
    return resolve(
        TargetConfig(name="small", path=str(path), wheel=None, hub_id=None, revision=None, trust_remote_code=False,
                     aux_layer_ids=(1, 2))
    )  # fmt: skip


@pytest.fixture(scope="module")
def drafter(small: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random: its drafts are accepted as often as chance has it."""
    torch.manual_seed(4)
    eagle = Eagle3(
        Architecture(
            hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8, rms_norm_eps=1e-5,
            rope_theta=10000.0, max_position_embeddings=64, vocab_size=V, draft_vocab_size=len(KEPT),
            target_hidden_size=16, num_aux=2, norm_before_residual=False, norm_before_fc=False, fc_norm=False,
            norm_output=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        eagle.embed_tokens.weight.copy_(small.embedding())
        eagle.d2t.copy_(KEPT - torch.arange(len(KEPT)))
        eagle.t2d.zero_().index_fill_(0, KEPT, True)
    directory = tmp_path_factory.mktemp("random") / "drafter"
    save(eagle, directory, {"eagle_aux_hidden_state_layer_ids": [1, 2], "num_aux_hidden_states": 2})
    return directory


def asked(top_p: float = 1.0, tokens: int = TOKENS, requests: int = REQUESTS, ignore_eos: bool = True) -> list[Request]:
    return [Request(str(i), PROMPT, tokens, TEMPERATURE, top_p, i, ignore_eos) for i in range(requests)]


def answers(
    target: Target, drafter: Path | None, requests: Sequence[Request], concurrency: int = 1000
) -> list[Completion]:
    """In the order of the requests."""
    hardware = Hardware(device="cpu", threads=None, devices=None)
    with adapter("transformers").open(SLOT, target, hardware, Job(longest=64, logs=Path("logs"))) as engine:
        endpoint = engine.serve(drafter, None if drafter is None else Speculation.chain(K))
        done = {c.id: c for c in endpoint.complete(requests, concurrency)}
    return [done[r.id] for r in requests]


def probabilities(target: Target, top_p: float) -> dict[tuple[int, ...], float]:
    """Of every text, from transformers' own forward of each prefix."""
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float64).eval()
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        texts = list(found)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPT + text for text in texts])).logits[:, -1]
        for text, p in zip(texts, (logits / TEMPERATURE).softmax(-1).tolist(), strict=True):
            kept, mass = [], 0.0
            for token in sorted(range(V), key=lambda token, p=p: -p[token]):
                if mass < top_p:
                    kept.append(token)
                    mass += p[token]
            longer |= {(*text, token): found[text] * p[token] / mass for token in kept}
        found = longer
    return found


def p_value(texts: Sequence[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of Pearson's chi-square; texts that are expected fewer than 5 times are counted together."""
    counted = Counter(texts)
    if not counted.keys() <= expected.keys():
        return 0.0
    rare = (0.0, 0.0)
    cells: list[tuple[float, float]] = []
    for text, p in expected.items():
        seen, wanted = counted[text], p * len(texts)
        if wanted < 5:
            rare = (rare[0] + seen, rare[1] + wanted)
        else:
            cells.append((seen, wanted))
    cells += [rare] if rare[1] else []
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_texts_are_as_frequent_as_the_target_says(small: Target, drafter: Path, top_p: float) -> None:
    expected = probabilities(small, top_p)
    assert sum(expected.values()) == pytest.approx(1)
    assert (len(expected) == V**TOKENS) == (top_p == 1)
    done = answers(small, drafter, asked(top_p))
    counters = total([c.counters for c in done if c.counters is not None])
    assert 0 < counters.accepted_at[1] < counters.accepted_at[0] < counters.verify_steps, "right and wrong drafts"
    assert p_value([c.token_ids for c in done], expected) > 1e-3


def test_accepting_every_draft_is_noticed(small: Target, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Decoding._step

    def accept_all(self: Decoding, drafts: torch.Tensor) -> object:
        choose = self._choose

        def drafted(logits: torch.Tensor, rows: object) -> tuple[torch.Tensor, torch.Tensor]:
            ids, gaps = choose(logits, rows)  # type: ignore[arg-type]
            ids[:, :-1] = drafts
            return ids, gaps

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "_choose", drafted)
            return step(self, drafts)

    monkeypatch.setattr(Decoding, "_step", accept_all)
    done = answers(small, drafter, asked(requests=1000))
    assert p_value([c.token_ids for c in done], probabilities(small, 1.0)) < 1e-9


def test_acceptance_is_the_targets_probability_of_the_first_draft(small: Target, drafter: Path) -> None:
    """Of texts whose first token is t, the first draft x(t) is accepted with p(x | t), and is then what is written."""
    expected = probabilities(small, 1.0)
    done = answers(small, drafter, asked(tokens=2))  # one verify step each
    for first in range(V):
        mine = [c for c in done if c.token_ids[0] == first]
        taken = {c.token_ids[1] for c in mine if c.counters and c.counters.accepted_at[0]}
        assert len(taken) <= 1, "the drafter drafts one token after the same text"
        others = {c.token_ids[1] for c in mine if c.counters and not c.counters.accepted_at[0]}
        assert not taken & others, "a rejected draft is never written"
        for draft in taken:
            p = sum(q for text, q in expected.items() if text[:2] == (first, draft)) / sum(
                q for text, q in expected.items() if text[0] == first
            )
            share = sum(c.counters.accepted_at[0] for c in mine if c.counters) / len(mine)
            assert abs(share - p) < 4.5 * (p * (1 - p) / len(mine)) ** 0.5 + 1e-9


def test_text_depends_neither_on_the_drafter_nor_on_the_batch(small: Target, drafter: Path) -> None:
    requests = asked(0.9, 7, 40, ignore_eos=False)
    plain = [(c.token_ids, c.finish) for c in answers(small, None, requests, 7)]
    assert {finish for _, finish in plain} == {"stop", "length"}
    for concurrency in (1, 16):
        assert [(c.token_ids, c.finish) for c in answers(small, drafter, requests, concurrency)] == plain


def test_greedy_and_sampled_requests_share_a_batch(small: Target, drafter: Path) -> None:
    sampled, greedy = asked(tokens=12, requests=6), [Request(f"g{i}", PROMPT[i:], 12) for i in range(3)]
    mixed = [sampled[0], greedy[0], *sampled[1:4], *greedy[1:], *sampled[4:]]
    alone = {r.id: answers(small, drafter, [r])[0] for r in mixed}
    for completion in answers(small, drafter, mixed, 4):
        assert (completion.token_ids, completion.counters) == (
            alone[completion.id].token_ids,
            alone[completion.id].counters,
        )
        assert (completion.top2_gaps is None) == (completion.id[0] != "g")
