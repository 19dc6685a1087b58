"""Train states from an existing dump: probed, put into ascending order, and written as shards with their loss masks.

A dump is copied: its files are of other layouts, and cannot be mapped by the trainer where they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.data.reuse import labelled
from eagle3x.data.shard_index import ShardSpec
from eagle3x.data.shards import ShardWriter, require_space
from eagle3x.data.sources import NO_CATEGORY
from eagle3x.progress import log, track
from eagle3x.types import EagleError, HiddenStates, Response

if TYPE_CHECKING:
    from eagle3x.data.dumps import Dump, DumpSample
    from eagle3x.data.leaks import HeldOut
    from eagle3x.diagnosis.dump_probe import DumpVerdict
    from eagle3x.targets import Target

PROBED_SAMPLES = 3
LOOKED_UP = 16
"""Texts are first told apart by this many of their tokens; those that have fewer are all looked at."""


def probed(dump: Dump, target: Target, boundaries: Sequence[int], probe_tokens: int) -> DumpVerdict:
    """What the dump is. EagleError, with nothing written, unless it is `boundaries` (in any order) and a last state."""
    from eagle3x.diagnosis.dump_probe import probe_dump

    verdict = probe_dump(dump, target, PROBED_SAMPLES, probe_tokens)
    log(verdict.describe())
    if not verdict.usable:
        raise EagleError(f"hidden_states.from={dump.directory} is not what a drafter can be trained on: see above")
    if sorted(verdict.boundaries or ()) != list(boundaries):
        raise EagleError(
            f"hidden_states.from={dump.directory} has boundaries {list(verdict.boundaries or ())}, but the config says"
            f" {list(boundaries)}: set 'target.aux_layer_ids={sorted(verdict.boundaries or ())}' capture=as_is"
        )
    return verdict


def write_train(
    dump: Dump,
    verdict: DumpVerdict,
    texts: Sequence[Response],
    held_out: HeldOut,
    dtype: str,
    directory: Path,
    tokens_per_shard: Callable[[ShardSpec], int],
) -> dict[str, Any]:
    """Write the dump's samples as train shards into `directory`, going on where a killed attempt stopped.

    texts: responses whose masks are used where the dump has none. Samples that ask what is held out, or in which
    nothing is a label, are left out and counted. Raises EagleError for a sample without a mask anywhere.
    """
    import torch

    found, last_norm = verdict.boundaries, verdict.last_norm
    assert found is not None, "a dump that is not usable is refused"
    assert last_norm is not None, "a dump that is not usable is refused"
    order = sorted(range(len(found)), key=found.__getitem__)
    own = str(dump[0].last.dtype).removeprefix("torch.")
    spec = ShardSpec(tuple(sorted(found)), dump.hidden_size, own if dtype == "auto" else dtype, last_norm)
    written = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    require_space(directory, sum(file.stat().st_size for file in dump.files) - written)
    masks = _by_beginning(texts)
    counts = {"samples": len(dump), "same_prompt": 0, "leak": 0, "empty_masks": 0}
    with ShardWriter(directory, spec, tokens_per_shard(spec)) as writer:
        done = writer.done_ids
        for sample in track((dump[i] for i in range(len(dump))), "Hidden states of the dump", len(dump)):
            response = _response(sample, masks, dump)
            if (why := held_out.why_not(response.token_ids, response.loss_mask)) is not None:
                counts[why] += 1
            elif not any(response.loss_mask):
                counts["empty_masks"] += 1
            elif sample.id not in done:
                rows = len(response.token_ids)
                parts = sample.aux[:rows].split(dump.hidden_size, dim=1)
                aux = torch.cat([parts[i] for i in order], dim=1)
                states = HiddenStates(sample.id, response.token_ids, aux, sample.last[:rows], spec.last_norm)
                writer.add(states, response)
    for what, count in counts.items():
        if count and what != "samples":
            log(f"Hidden states: {count} of the dump's {len(dump)} samples left out ({what.replace('_', ' ')})")
    return {**counts, "probe": verdict.as_dict()}


def _response(sample: DumpSample, masks: Mapping[tuple[int, ...], Sequence[Response]], dump: Dump) -> Response:
    tokens = tuple(sample.token_ids.tolist())
    if sample.loss_mask is not None:
        return labelled(sample.id, NO_CATEGORY, tokens, sample.loss_mask.tolist())
    near = (*masks.get(tokens[:LOOKED_UP], ()), *masks.get((), ()))
    fitting = [text for text in near if tokens[: len(text.token_ids)] == text.token_ids]
    if fitting:  # the longest: a conversation's first turn is also how its second begins
        text = max(fitting, key=lambda text: len(text.token_ids))
        return labelled(sample.id, text.category, text.token_ids, text.loss_mask)
    raise EagleError(
        f"{dump.directory}: {sample.id} has no loss mask, and no text of responses.from is its own: name the file that"
        " the dump was made from, responses.from=FILE (for speculators the folder of its prepared data)"
    )


def _by_beginning(texts: Iterable[Response]) -> Mapping[tuple[int, ...], Sequence[Response]]:
    found: dict[tuple[int, ...], list[Response]] = defaultdict(list)
    for text in texts:
        found[text.token_ids[:LOOKED_UP] if len(text.token_ids) >= LOOKED_UP else ()].append(text)
    return found
