"""Shards: what goes in comes out, what is damaged is refused, what was finished survives a kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from eagle3x.data import shards as shards_module
from eagle3x.data.shards import IN_FLIGHT, Shards, ShardSpec, ShardWriter, estimate_bytes, require_space
from eagle3x.types import EagleError, HiddenStates, Response

SPEC = ShardSpec(boundaries=(1, 3), hidden_size=4, dtype="float32", last_norm="post_norm")


def response(id: str, tokens: int, prompt: int = 1) -> Response:
    mask = tuple(i >= prompt for i in range(tokens))
    return Response(id, "math", "train", tuple(range(10, 10 + tokens)), mask, prompt, tokens - prompt, "stop")


def states_of(r: Response, spec: ShardSpec = SPEC, seed: int = 0) -> HiddenStates:
    """Random numbers that every storage dtype holds exactly: eighths up to 16."""
    g = torch.Generator().manual_seed(seed + len(r.token_ids))
    T, H = len(r.token_ids), spec.hidden_size
    aux = torch.randint(-128, 128, (T, len(spec.boundaries) * H), generator=g) / 8
    last = torch.randint(-128, 128, (T, H), generator=g) / 8
    return HiddenStates(r.id, r.token_ids, aux, last, spec.last_norm)


def write(directory: Path, lengths: list[int], max_tokens: int, spec: ShardSpec = SPEC) -> list[HiddenStates]:
    responses = [response(f"s{i}", n) for i, n in enumerate(lengths)]
    kept = [states_of(r, spec, seed=i) for i, r in enumerate(responses)]
    with ShardWriter(directory, spec, max_tokens) as writer:
        for s, r in zip(kept, responses, strict=True):
            writer.add(s, r)
    return kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_goes_in_comes_out(tmp_path: Path, dtype: str) -> None:
    spec = replace(SPEC, dtype=dtype)
    kept = write(tmp_path, [3, 2, 4, 1], max_tokens=5, spec=spec)
    shards = Shards(tmp_path)
    # 3+2 fill the first shard, 4+1 the second.
    assert [s.tokens for s in shards.shards] == [5, 5]
    assert [(e.shard, e.start, e.length) for e in shards.samples] == [(0, 0, 3), (0, 3, 2), (1, 0, 4), (1, 4, 1)]
    assert (len(shards), shards.lengths, shards.tokens, shards.spec) == (4, [3, 2, 4, 1], 10, spec)
    for sample, states in zip(shards, kept, strict=True):
        assert (sample.id, sample.category) == (states.id, "math")
        assert (sample.prompt_tokens, sample.response_tokens) == (1, len(states.token_ids) - 1)
        assert sample.token_ids.dtype == torch.int64
        assert sample.loss_mask.dtype == torch.bool
        assert sample.aux.dtype == sample.last.dtype == getattr(torch, dtype)
        assert sample.token_ids.tolist() == list(states.token_ids)
        assert sample.loss_mask.tolist() == [False] + [True] * (len(states.token_ids) - 1)
        assert torch.equal(sample.aux.float(), states.aux)
        assert torch.equal(sample.last.float(), states.last)
    assert shards[2].id == shards[-2].id == "s2"
    shards.verify()


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    kept = write(tmp_path, [3, 2], max_tokens=100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.json", "shard-00000.safetensors"]
    tensors = load_file(tmp_path / "shard-00000.safetensors")
    assert tensors["token_ids"].tolist() == [10, 11, 12, 10, 11]
    assert tensors["loss_mask"].tolist() == [False, True, True, False, True]
    assert torch.equal(tensors["aux"], torch.cat([kept[0].aux, kept[1].aux]))
    assert torch.equal(tensors["last"], torch.cat([kept[0].last, kept[1].last]))


def test_index_holds_checksums_and_mean_norms(tmp_path: Path) -> None:
    first, second = response("a", 1), response("b", 2)
    # Norms by hand: boundary 1: 5, 13, 25; boundary 3: 2, 0, 0; last: 3, 3, 9.
    aux = [[3, 4, 0, 0, 1, 1, 1, 1], [0, 5, 12, 0, 0, 0, 0, 0], [0, 7, 0, 24, 0, 0, 0, 0]]
    last = [[1, 2, 2, 0], [0, 1, 2, 2], [8, 4, 1, 0]]
    with ShardWriter(tmp_path, SPEC, max_tokens_per_shard=1) as writer:
        for r, rows in ((first, slice(0, 1)), (second, slice(1, 3))):
            parts = (torch.tensor(aux[rows], dtype=torch.float32), torch.tensor(last[rows], dtype=torch.float32))
            writer.add(HiddenStates(r.id, r.token_ids, *parts, "post_norm"), r)
    shards = Shards(tmp_path)
    assert shards.mean_norms == pytest.approx({"boundary 1": 43 / 3, "boundary 3": 2 / 3, "last": 5})
    # A sample longer than the limit gets a shard of its own.
    assert [s.mean_norms for s in shards.shards] == [pytest.approx((5, 2, 3)), pytest.approx((19, 0, 6))]
    for shard in shards.shards:
        told = subprocess.run(["sha256sum", tmp_path / shard.file], capture_output=True, text=True, check=True)
        assert shard.sha256 == told.stdout.split()[0]
        assert shard.bytes == (tmp_path / shard.file).stat().st_size


def with_norms(states: HiddenStates, spec: ShardSpec = SPEC) -> HiddenStates:
    """As an engine would give them."""
    columns = [*states.aux.split(spec.hidden_size, dim=1), states.last]
    norms = torch.stack([column.norm(dim=1, dtype=torch.float32) for column in columns], dim=1)
    return replace(states, norms=norms)


def test_norms_that_the_engine_worked_out_are_taken_where_the_states_are_stored_as_it_gave_them(tmp_path: Path) -> None:
    r = response("a", 2)
    states = replace(states_of(r), norms=torch.tensor([[1.0, 2, 3], [3, 4, 5]]))  # not theirs, to tell them apart
    for spec, wanted in ((SPEC, (2, 3, 4)), (replace(SPEC, dtype="bfloat16"), with_norms(states).norms)):
        with ShardWriter(tmp_path / spec.dtype, spec, 100) as writer:
            writer.add(states, r)
        wanted = wanted if isinstance(wanted, tuple) else tuple(wanted.mean(dim=0).tolist())
        assert Shards(tmp_path / spec.dtype).shards[0].mean_norms == pytest.approx(wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_states_whose_norms_say_that_they_are_not_finite_are_looked_at(tmp_path: Path, value: float) -> None:
    r = response("bad", 3)
    states = states_of(r)
    states.last[1, 2] = value
    with pytest.raises(EagleError, match=r"bad: last is NaN or infinite .* in 1 of 3 tokens, first at position 1"):
        ShardWriter(tmp_path / "bad", SPEC, 100).add(with_norms(states), r)
    large = states_of(r)
    large.last[1, 2] = 1e30  # its square is too large for float32, it is not
    assert not with_norms(large).norms.isfinite().all()  # type: ignore[union-attr]
    with ShardWriter(tmp_path / "large", SPEC, 100) as writer:
        writer.add(with_norms(large), r)
    written = Shards(tmp_path / "large")
    assert written[0].last[1, 2] == torch.tensor(1e30)
    assert written.mean_norms["last"] == pytest.approx(1e30 / 3)
    with pytest.raises(EagleError, match=r"bad: last .* as float16"):  # finite as given, not as stored
        ShardWriter(tmp_path / "narrow", replace(SPEC, dtype="float16"), 100).add(with_norms(large), r)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("column", "name"), [(0, "boundary 1"), (7, "boundary 3"), (None, "last")])
def test_refuses_what_is_not_finite(tmp_path: Path, value: float, column: int | None, name: str) -> None:
    r = response("bad-one", 3)
    states = states_of(r)
    tensor = states.last if column is None else states.aux
    tensor[2, column or 0] = value
    writer = ShardWriter(tmp_path, SPEC, 100)
    with pytest.raises(
        EagleError, match=rf"bad-one: {name} is NaN or infinite .* in 1 of 3 tokens, first at position 2"
    ):
        writer.add(states, r)
    writer.close()
    assert len(Shards(tmp_path)) == 0  # refused, not half kept


def test_refuses_states_too_large_for_the_storage_dtype(tmp_path: Path) -> None:
    r = response("big", 2)
    states = states_of(r)
    states.aux[0, 0] = 1e5  # above float16's 65504
    with pytest.raises(EagleError, match=r"big: boundary 1 .* as float16"):
        ShardWriter(tmp_path, replace(SPEC, dtype="float16"), 100).add(states, r)


def test_refuses_states_that_do_not_fit(tmp_path: Path) -> None:
    r, writer = response("a", 3), ShardWriter(tmp_path, SPEC, 100)
    good = states_of(r)
    for bad, message in (
        (replace(good, id="b"), "are not those of"),
        (replace(good, token_ids=(10, 11, 99)), "other tokens"),
        (replace(good, last_norm="pre_norm"), "pre_norm, not post_norm"),
        (replace(good, aux=good.aux[:, :4]), r"aux \[3, 4\].*\[3, 8\]"),
        (replace(good, last=good.last[:2]), r"last \[2, 4\]"),
    ):
        with pytest.raises(EagleError, match=message):
            writer.add(bad, r)
    empty = Response("none", "math", "train", (), (), 0, 0, "stop")
    with pytest.raises(EagleError, match="none has no tokens"):
        writer.add(states_of(empty), empty)
    writer.add(good, r)
    with pytest.raises(EagleError, match="a was added twice"):
        writer.add(good, r)
    writer.close()
    with pytest.raises(EagleError, match="closed"):
        writer.add(states_of(response("z", 2)), response("z", 2))


def test_resumes_at_the_last_finished_shard(tmp_path: Path) -> None:
    responses = [response(f"s{i}", 3) for i in range(5)]
    killed = ShardWriter(tmp_path, SPEC, max_tokens_per_shard=6)
    for r in responses[:3]:
        killed.add(states_of(r), r)
    # Two samples fill shard 0; the third is in the open shard, which a kill loses.
    killed.settle()
    del killed
    with pytest.raises(EagleError, match=r"index.json"):
        Shards(tmp_path)  # incomplete means absent
    resumed = ShardWriter(tmp_path, SPEC, max_tokens_per_shard=6)
    assert resumed.done_ids == {"s0", "s1"}
    with pytest.raises(EagleError, match="s0 was added twice"):
        resumed.add(states_of(responses[0]), responses[0])
    before = (tmp_path / "shard-00000.safetensors").stat()
    for r in responses[2:]:
        resumed.add(states_of(r), r)
    resumed.close()
    after = (tmp_path / "shard-00000.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)  # not written again
    shards = Shards(tmp_path)
    assert [s.id for s in shards] == [f"s{i}" for i in range(5)]
    assert all(torch.equal(s.aux, states_of(r).aux) for s, r in zip(shards, responses, strict=True))
    assert ShardWriter(tmp_path, SPEC, 6).done_ids == {f"s{i}" for i in range(5)}  # a closed directory is done


def test_an_error_leaves_the_directory_open(tmp_path: Path) -> None:
    def failing() -> None:
        with ShardWriter(tmp_path, SPEC, 100) as writer:
            writer.add(states_of(response("a", 2)), response("a", 2))
            raise EagleError("the engine died")

    with pytest.raises(EagleError, match="the engine died"):
        failing()
    assert not (tmp_path / "index.json").exists()


def test_full_shards_are_kept_when_the_engine_dies(tmp_path: Path) -> None:
    responses = [response(f"s{i}", 3) for i in range(7)]

    def failing() -> None:
        with ShardWriter(tmp_path, SPEC, max_tokens_per_shard=6) as writer:
            for r in responses:
                writer.add(states_of(r), r)
            raise EagleError("the engine died")

    with pytest.raises(EagleError, match="the engine died"):
        failing()
    assert ShardWriter(tmp_path, SPEC, 6).done_ids == {f"s{i}" for i in range(6)}


@pytest.mark.parametrize("step", ["publish", "write_json"])
def test_a_shard_that_was_not_finished_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Killed before the shard's rename, and between it and that of its part: in both cases the sample is not done."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shards_module, step, killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [3], max_tokens=100)
    monkeypatch.undo()
    assert [p.suffix for p in tmp_path.iterdir()] == [{"publish": ".new", "write_json": ".safetensors"}[step]]
    assert not ShardWriter(tmp_path, SPEC, 100).done_ids
    write(tmp_path, [3, 2], max_tokens=100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.json", "shard-00000.safetensors"]
    Shards(tmp_path).verify()


KILL_SPEC = ShardSpec((1,), 2, "float32", "post_norm")


def write_until_killed(directory: Path, pipe: Connection) -> None:
    """4000 samples of 2 tokens, two to a shard; tells the number of each after it was added."""
    writer = ShardWriter(directory, KILL_SPEC, 4)
    for i in range(len(writer.done_ids), 4000):
        r = Response(f"s{i}", "c", "train", (i, i), (False, True), 1, 1, "stop")
        writer.add(HiddenStates(r.id, r.token_ids, torch.full((2, 2), float(i)), torch.zeros(2, 2), "post_norm"), r)
        pipe.send_bytes(str(i).encode())


def test_kills_lose_at_most_the_open_shard_and_those_in_flight(tmp_path: Path) -> None:
    """SIGKILL at 20 moments: what was added before them is there, in order and whole."""
    context = multiprocessing.get_context("fork")  # a fresh interpreter would take seconds to import torch
    added, moments = -1, random.Random(0)
    for _ in range(20):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=write_until_killed, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        for _ in range(moments.randrange(2, 30)):
            added = int(ours.recv_bytes())
        time.sleep(moments.random() * 0.003)  # into the middle of something
        process.kill()
        process.join()
        with suppress(EOFError, OSError):  # the end of the pipe, or of a message cut by the kill
            while True:
                added = int(ours.recv_bytes())
        ours.close()
        writer = ShardWriter(tmp_path, KILL_SPEC, 4)
        assert writer.done_ids == {f"s{i}" for i in range(len(writer.done_ids))}
        # Sample `added` and the one before it may be the open shard, which is written when the next one comes.
        assert len(writer.done_ids) >= added - 1 - 2 * IN_FLIGHT
    writer.close()
    shards = Shards(tmp_path)
    shards.verify()
    assert len(shards) >= 20
    assert all(sample.aux.tolist() == [[float(i)] * 2] * 2 for i, sample in enumerate(shards))
    assert not list(tmp_path.glob("*new"))


def test_refuses_to_resume_another_spec(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, SPEC, 1)
    for r in (response("a", 2), response("b", 2)):
        writer.add(states_of(r), r)
    writer.settle()
    for other in (
        replace(SPEC, dtype="float16"),
        replace(SPEC, boundaries=(1, 2)),
        replace(SPEC, last_norm="pre_norm"),
    ):
        with pytest.raises(EagleError, match="was written for"):
            ShardWriter(tmp_path, other, 1)
    writer.close()
    with pytest.raises(EagleError, match="was written for"):
        ShardWriter(tmp_path, replace(SPEC, dtype="float16"), 1)


def test_verify_finds_a_changed_byte(tmp_path: Path) -> None:
    write(tmp_path, [3, 3, 3], max_tokens=3)
    shards = Shards(tmp_path)
    file = tmp_path / "shard-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(EagleError, match=r"shard-00001.safetensors changed"):
        shards.verify()


def test_refuses_an_index_that_disagrees_with_the_shards(tmp_path: Path) -> None:
    write(tmp_path, [3, 2, 3], max_tokens=5)
    index = tmp_path / "index.json"
    good = json.loads(index.read_text())

    def broken(change: str, value: object, *path: object) -> None:
        bad = json.loads(json.dumps(good))
        node = bad
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        index.write_text(json.dumps(bad))
        with pytest.raises(EagleError, match=change):
            list(Shards(tmp_path))

    broken("does not lie where", 2, "samples", 1, "start")
    broken("does not lie where", 7, "samples", 1, "shard")
    broken("of 5 tokens, not 4", 1, "samples", 1, "length")
    broken("bytes, its index says", 7, "shards", 0, "bytes")
    broken("holds .* its index says", "float16", "spec", "dtype")
    broken("holds .* its index says", [1, 3, 5], "spec", "boundaries")
    broken("holds .* its index says", 2, "spec", "hidden_size")
    broken("no index of hidden states", None, "spec")
    broken("schema 99", 99, "schema")
    broken("no index of hidden states", {"file": "x"}, "shards", 0)
    index.write_text(json.dumps(good)[:-5])
    with pytest.raises(EagleError, match="cannot read"):
        Shards(tmp_path)
    index.write_text(json.dumps(good))
    list(Shards(tmp_path))  # the good one is still good
    (tmp_path / "shard-00001.safetensors").unlink()
    with pytest.raises(EagleError, match=r"shard-00001.safetensors has no bytes"):
        Shards(tmp_path)


def test_an_index_whose_order_of_shards_is_swapped_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [3, 3], max_tokens=3)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"].reverse()
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(EagleError, match="is shard 0"):
        Shards(tmp_path)


def test_reads_only_what_is_asked_for(tmp_path: Path) -> None:
    """One sample of a shard of 64 MiB: the process does not grow by the shard."""
    spec = ShardSpec((1, 2, 3), 1024, "float32", "post_norm")
    write(tmp_path, [32] * 128, max_tokens=10**6, spec=spec)
    shards = Shards(tmp_path)
    assert shards.bytes > 64 * 2**20

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    assert shards[64].aux.sum().isfinite()
    assert resident() - before < 16 * 2**20
    assert all(sample.aux.sum().isfinite() for sample in shards)
    assert resident() - before > 40 * 2**20  # what the measure says when everything was read


def test_the_file_stays_as_it_is_when_a_view_is_changed(tmp_path: Path) -> None:
    write(tmp_path, [3], max_tokens=10)
    Shards(tmp_path)[0].aux.zero_()
    Shards(tmp_path).verify()


def test_goes_to_data_loader_workers(tmp_path: Path) -> None:
    kept = write(tmp_path, [3, 2], max_tokens=100)
    shards = Shards(tmp_path)
    assert torch.equal(shards[1].aux, kept[1].aux)  # has the file open now
    assert torch.equal(pickle.loads(pickle.dumps(shards))[1].aux, kept[1].aux)


@pytest.mark.parametrize(("hidden", "dtype", "lengths"), [
    (576, "float32", [400, 60, 233, 90] * 8), (576, "bfloat16", [200] * 40), (4096, "bfloat16", [37] * 20),
])  # fmt: skip
def test_estimate_is_within_one_percent(tmp_path: Path, hidden: int, dtype: str, lengths: list[int]) -> None:
    spec = ShardSpec((2, 14, 26), hidden, dtype, "post_norm")
    write(tmp_path, lengths, max_tokens=4096, spec=spec)
    truth = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert estimate_bytes(lengths, spec) == pytest.approx(truth, rel=0.01)


def test_refuses_when_the_disk_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 3 * 2**30

    monkeypatch.setattr(shards_module.shutil, "disk_usage", lambda path: Usage)
    require_space(tmp_path / "not" / "there", 3 * 2**30)
    with pytest.raises(EagleError, match=r"need 4\.50 GiB, but .* has 3\.00 GiB free"):
        require_space(tmp_path / "not" / "there", 9 * 2**29)
