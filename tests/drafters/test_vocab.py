"""The draft vocabulary on counts that can be done by hand."""

from __future__ import annotations

import pytest
import torch

from eagle3x.drafters.vocab import DraftVocabulary, build
from eagle3x.types import EagleError


def test_stop_then_responses_then_prompts_then_low_ids() -> None:
    responses = [7, 7, 7, 5, 5, 9]
    prompts = [8, 8, 3, 7]
    ids = {size: build(responses, prompts, [2], size, 12).target_ids for size in range(1, 9)}
    assert ids[1] == (2,)
    assert ids[2] == (2, 7)
    assert ids[3] == (2, 5, 7)
    assert ids[4] == (2, 5, 7, 9)
    assert ids[5] == (2, 5, 7, 8, 9)
    assert ids[6] == (2, 3, 5, 7, 8, 9)
    assert ids[7] == (0, 2, 3, 5, 7, 8, 9)
    assert ids[8] == (0, 1, 2, 3, 5, 7, 8, 9)


def test_equal_counts_prefer_the_lower_id() -> None:
    assert build([6, 4, 6, 4, 5], [], [], 2, 10).target_ids == (4, 6)
    assert build([5, 4, 6], [], [], 2, 10).target_ids == (4, 5)


def test_maps_are_offsets_and_a_mask() -> None:
    vocabulary = DraftVocabulary((1, 2, 5), 6)
    assert vocabulary.d2t().tolist() == [1, 1, 3]
    assert vocabulary.d2t().dtype == torch.int64
    assert vocabulary.t2d().tolist() == [False, True, True, False, False, True]
    assert vocabulary.coverage([1, 1, 2, 3]) == 0.75


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(EagleError, match=r"draft_vocab_size=11 must be in 1\.\.10"):
        build([1], [], [0], 11, 10)
    with pytest.raises(EagleError, match=r"draft_vocab_size=1 must be in 2\.\.10"):
        build([1], [], [0, 3], 1, 10)
    for ids in ((), (2, 1), (1, 1), (0, 6), (-1, 2)):
        with pytest.raises(ValueError, match="ascending"):
            DraftVocabulary(ids, 6)
