"""The closed-form start on states that a linear map makes: the untrained drafter must already say them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.drafters.warm_start import random_start, warm_start
from eagle3x.kernels.layout import layout_of
from eagle3x.types import EagleError, LastNorm

V, H, A = 64, 32, 2
ARCH = Architecture(
    hidden_size=H, intermediate_size=16, num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6,
    rope_theta=10000.0, max_position_embeddings=512, vocab_size=V, draft_vocab_size=V, target_hidden_size=H,
    num_aux=A, norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
)  # fmt: skip


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


EMBEDDING, HEAD, FINAL_NORM = 1 + draw(V, H, seed=1), draw(V, H, seed=2), 1 + 0.3 * draw(H, seed=3)
"""The embeddings have a mean, as those of trained models: a direction that is constant can be found."""
FROM_AUX, FROM_EMBEDDING = draw(A * H, H, seed=4) / 8, draw(H, H, seed=5) / 5
EVERY_ROW = layout_of(torch.arange(20), [20])
TARGET = SimpleNamespace(
    hidden_size=H, embedding=lambda: EMBEDDING, head=lambda: HEAD, final_norm=lambda: FINAL_NORM,
)  # fmt: skip


def documents(count: int, seed: int, last_norm: LastNorm) -> list[SimpleNamespace]:
    """Texts of 20 tokens; the first 4 are a prompt. last[p+1] is linear in aux[p] (of unequal scales) and token p+1."""
    result = []
    for number in range(count):
        tokens = torch.randint(0, V, (20,), generator=torch.Generator().manual_seed(1000 * seed + number))
        aux = draw(20, A * H, seed=2000 * seed + number)
        embedding = EMBEDDING[tokens] / EMBEDDING[tokens].pow(2).mean(-1, keepdim=True).sqrt()
        state = torch.zeros(20, H)
        state[1:] = aux[:-1] @ FROM_AUX + embedding[1:] @ FROM_EMBEDDING
        state = state / (state.pow(2).mean(-1, keepdim=True) + 1e-9).sqrt()
        aux = torch.cat([aux[:, :H] * 20, aux[:, H:]], dim=-1)
        last = state * FINAL_NORM if last_norm == "post_norm" else state * 7
        mask = torch.arange(20) >= 4
        result.append(SimpleNamespace(token_ids=tokens, loss_mask=mask, aux=aux, last=last, state=state))
    return result


def cosine(drafter: Eagle3, held_out: list[SimpleNamespace]) -> float:
    """Of the drafter's state at step 0 and the state that it should say."""
    total = []
    for document in held_out:
        with torch.no_grad():
            (state,) = drafter.ttt(document.aux, document.token_ids, EVERY_ROW, 1)
        total.append(torch.cosine_similarity(state[4:-1], document.state[5:], dim=-1))
    return float(torch.cat(total).mean())


@pytest.mark.parametrize("last_norm", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("variant", [{}, {"norm_before_residual": True}, {"fc_norm": True}, {"norm_before_fc": True}])
def test_the_untrained_drafter_says_what_a_linear_map_makes(last_norm: LastNorm, variant: dict[str, bool]) -> None:
    torch.manual_seed(0)
    drafter = Eagle3(dataclasses.replace(ARCH, **variant))
    held_out = documents(20, 2, last_norm)
    random_start(drafter, TARGET)  # type: ignore[arg-type]
    assert abs(cosine(drafter, held_out)) < 0.2
    warm_start(drafter, TARGET, documents(100, 1, last_norm), last_norm)  # type: ignore[arg-type]
    assert cosine(drafter, held_out) > 0.9
    assert torch.equal(drafter.lm_head.weight, HEAD)
    assert torch.equal(drafter.norm.weight, FINAL_NORM)
    assert torch.equal(drafter.embed_tokens.weight, EMBEDDING)


def test_a_row_looks_at_itself() -> None:
    torch.manual_seed(0)
    drafter = Eagle3(ARCH)
    warm_start(drafter, TARGET, documents(50, 1, "post_norm"), "post_norm")  # type: ignore[arg-type]
    document = documents(1, 3, "post_norm")[0]
    other = document.token_ids.clone()
    other[5] = (other[5] + 1) % V  # the token that row 4 reads
    with torch.no_grad():
        (a,), (b,) = (drafter.ttt(document.aux, tokens, EVERY_ROW, 1) for tokens in (document.token_ids, other))
    moved = (a - b).norm(dim=-1)
    assert moved[:4].max() == 0
    assert moved[4] > 10 * moved[6:].max()
    assert moved[4] > 3 * moved[5]


def test_rows_outside_the_loss_teach_nothing() -> None:
    texts = documents(30, 1, "post_norm")
    spoiled = [SimpleNamespace(**vars(d)) for d in texts]
    for document in spoiled:
        document.last = document.last.clone()
        document.last[:3] = 1e3  # positions 0..2 teach tokens 1..3, all of the prompt
    starts = []
    for given in (texts, spoiled):
        torch.manual_seed(0)
        starts.append(Eagle3(ARCH))
        warm_start(starts[-1], TARGET, given, "post_norm")  # type: ignore[arg-type]
    for a, b in zip(starts[0].parameters(), starts[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_cannot_be_started() -> None:
    nothing = [
        SimpleNamespace(**{**vars(d), "loss_mask": torch.zeros(20, dtype=torch.bool)})
        for d in documents(2, 1, "post_norm")
    ]
    with pytest.raises(EagleError, match="no row of the training states"):
        warm_start(Eagle3(ARCH), TARGET, nothing, "post_norm")  # type: ignore[arg-type]
    with pytest.raises(EagleError, match="32 wide"):
        warm_start(Eagle3(dataclasses.replace(ARCH, hidden_size=16)), TARGET, nothing, "post_norm")  # type: ignore[arg-type]
