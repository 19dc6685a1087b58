"""A drafter that is sometimes right: fitted to a few texts, as small as the test allows. And one engine at a time."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from eagle3x.drafters.architecture import Architecture
from eagle3x.drafters.checkpoint import save
from eagle3x.drafters.eagle3 import Eagle3
from eagle3x.kernels.layout import layout_of
from eagle3x.targets import Target
from eagle3x.types import HiddenStates

sys.path.insert(0, str(Path(__file__).parent))  # tests import what they share


@pytest.fixture(scope="module")
def no_other_engine() -> Iterator[None]:
    """Hold a lock while a file's tests run an engine: two of them on two cores starve each other."""
    with FileLock(Path(tempfile.gettempdir()) / "eagle3x-test-engine.lock"):
        yield


FitDrafter = Callable[[Target, Sequence[HiddenStates], tuple[int, ...], torch.Tensor, int, Path], Path]


def _fit(
    target: Target,
    states: Sequence[HiddenStates],
    boundaries: tuple[int, ...],
    draft_vocab: torch.Tensor,
    steps: int,
    directory: Path,
) -> Path:
    """`steps` of Adam on the first two drafts after each row of `states`. `draft_vocab`: ascending target ids [D]."""
    torch.manual_seed(0)
    eagle = Eagle3(
        Architecture(
            hidden_size=target.hidden_size, intermediate_size=48, num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads, head_dim=target.head_dim, rms_norm_eps=1e-5, rope_theta=10000.0,
            max_position_embeddings=512, vocab_size=target.vocab_size, draft_vocab_size=len(draft_vocab),
            target_hidden_size=target.hidden_size, num_aux=len(boundaries), norm_before_residual=False,
            norm_before_fc=False, fc_norm=False, norm_output=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        eagle.embed_tokens.weight.copy_(target.embedding())
        eagle.d2t.copy_(draft_vocab - torch.arange(len(draft_vocab)))
        eagle.t2d.zero_().index_fill_(0, draft_vocab, True)
    tokens = torch.tensor([token for s in states for token in s.token_ids])
    wanted = []  # for TTT steps 0 and 1: which rows have a label in the draft vocabulary, and its draft id
    for step in (0, 1):
        labels = torch.cat([torch.tensor([*s.token_ids[2 + step :], *[-1] * (2 + step)]) for s in states])
        known = eagle.t2d[labels.clamp_min(0)] & (labels >= 0)
        wanted.append((known, torch.searchsorted(draft_vocab, labels[known])))
    aux = torch.cat([s.aux for s in states]).clone()
    layout = layout_of(torch.arange(len(tokens)), [len(s.token_ids) for s in states])
    optimizer = torch.optim.Adam([p for p in eagle.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        outputs = eagle.ttt(aux, tokens, layout, 2)
        losses = [
            torch.nn.functional.cross_entropy(eagle.unit_logits(state[known]), draft_ids)
            for state, (known, draft_ids) in zip(outputs, wanted, strict=True)
        ]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids = {"eagle_aux_hidden_state_layer_ids": list(boundaries), "num_aux_hidden_states": len(boundaries)}
    save(eagle, directory, ids)
    return directory


@pytest.fixture(scope="session")
def fit_drafter() -> FitDrafter:
    return _fit
