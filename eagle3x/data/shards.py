"""Hidden states on disk: safetensors shards of concatenated samples, and an index that says what lies where.

    index.json               spec, samples (where each lies), shards (checksum, bytes, mean norms)
    shard-00000.safetensors  token_ids [N] int64, loss_mask [N] bool, aux [N, A*H], last [N, H]
    shard-00000.json         its part of the index, while the writer is not closed yet

Shapes: T tokens of one sample, N of one shard, A boundaries, H hidden size of the target. No torch at import time.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from eagle3x.data.shard_index import (
    INDEX,
    SampleEntry,
    ShardEntry,
    ShardSpec,
    index_of,
    publish,
    read_index,
    read_parts,
    read_spec,
    sha256,
    write_json,
)
from eagle3x.data.state_values import all_finite, row_norms
from eagle3x.data.streamed_safetensors import write_pieces
from eagle3x.types import EagleError, HiddenStates, Response

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

IN_FLIGHT = max(2, min(8, (os.cpu_count() or 2) // 2))
"""Full shards that are written at the same time: one thread neither hashes nor copies as fast as a GPU captures."""
CHECKS = max(1, IN_FLIGHT // 2)
"""Threads that look whether a sample is finite: its giver waits for the answer, and would else be the slowest part."""
SAMPLE_BYTES = 130
"""A sample's line in the index, about."""
GIB = 1024**3


@dataclass(frozen=True)
class Sample:
    """The states of one sample: row p of `aux` [T, A*H] and `last` [T, H] belongs to `token_ids[p]` [T]."""

    id: str
    category: str
    token_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor
    prompt_tokens: int
    response_tokens: int


def estimate_bytes(lengths: Sequence[int], spec: ShardSpec) -> int:
    """Bytes on disk of samples of these lengths (within 1 % for hidden sizes that targets have)."""
    return sum(lengths) * spec.bytes_per_token + len(lengths) * SAMPLE_BYTES


def require_space(path: Path, needed: int) -> None:
    """EagleError if the file system of `path` (which need not exist yet) has less than `needed` bytes free."""
    free = shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free
    if needed > free:
        raise EagleError(
            f"the hidden states need {needed / GIB:.2f} GiB, but {path} has {free / GIB:.2f} GiB free: make room,"
            " choose another place (artifacts=DIRECTORY), capture.dtype=bfloat16, or fewer samples (data.limit_train)"
        )


@dataclass(frozen=True)
class OpenSample:
    """A sample of the shard that is not full yet."""

    states: HiddenStates
    response: Response


class ShardWriter:
    """Writes samples; every shard is complete once it is there.

    Full shards are written by threads while the next ones fill, and appear in order, so a killed writer loses at most
    the open shard and `IN_FLIGHT` before it. Continues a directory that such a writer of the same spec left: `done_ids`
    are not to be added again. A context manager that closes if nothing was raised, and else keeps what is full.
    """

    def __init__(self, directory: Path, spec: ShardSpec, max_tokens_per_shard: int) -> None:
        self.directory, self.spec, self.max_tokens_per_shard = directory, spec, max_tokens_per_shard
        self._open: list[OpenSample] = []
        self._open_tokens = 0
        self._threads = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="shards")
        self._checks = ThreadPoolExecutor(CHECKS, thread_name_prefix="checks")
        self._in_flight: deque[tuple[Future[ShardEntry], list[SampleEntry]]] = deque()
        directory.mkdir(parents=True, exist_ok=True)
        for scrap in directory.glob("*new"):  # what a kill left half written
            scrap.unlink()
        self._closed = (directory / INDEX).is_file()
        self._shards, self._samples = read_index(directory, spec) if self._closed else read_parts(directory, spec)
        self._ids = {sample.id for sample in self._samples}

    @property
    def done_ids(self) -> frozenset[str]:
        """Samples that are on disk, in finished shards."""
        return frozenset(sample.id for sample in self._samples)

    def add(self, states: HiddenStates, response: Response) -> None:
        """Take one sample. EagleError, before anything of it is kept, if it does not fit the spec or is not finite."""
        if self._closed:
            raise EagleError(f"{self.directory} is closed: {states.id} cannot be added")
        if states.id in self._ids:
            raise EagleError(f"sample {states.id} was added twice")
        sample = self._checked(states, response)
        if self._open and self._open_tokens + len(states.token_ids) > self.max_tokens_per_shard:
            self._flush()
        self._open.append(sample)
        self._open_tokens += len(states.token_ids)
        self._ids.add(states.id)

    def close(self) -> None:
        """Write the open shard and the index."""
        if self._closed:
            return
        if self._open:
            self._flush()
        self.settle()
        self._threads.shutdown()
        self._checks.shutdown()
        write_json(self.directory / INDEX, index_of(self.spec, self._shards, self._samples))
        self._closed = True
        for part in self.directory.glob("shard-*.json"):
            part.unlink()

    def settle(self) -> None:
        """Wait until every full shard is on disk: they were paid for, whatever ends the capture."""
        while self._in_flight:
            self._publish_oldest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.settle()

    def _checked(self, states: HiddenStates, response: Response) -> OpenSample:
        """The states in the storage dtype."""
        import torch

        spec, T = self.spec, len(response.token_ids)
        if T == 0:
            raise EagleError(f"sample {states.id} has no tokens")
        if (states.id, states.token_ids) != (response.id, response.token_ids):
            raise EagleError(f"states of {states.id} are not those of the text of {response.id}: other tokens")
        if states.last_norm != spec.last_norm:
            raise EagleError(
                f"{states.id}: the last hidden state is {states.last_norm}, not {spec.last_norm} as before"
            )
        if states.norms is not None and tuple(states.norms.shape) != (T, len(spec.boundaries) + 1):
            raise EagleError(f"{states.id}: norms are {list(states.norms.shape)}, not one for each state of {T} tokens")
        wanted = ((T, len(spec.boundaries) * spec.hidden_size), (T, spec.hidden_size))
        if (tuple(states.aux.shape), tuple(states.last.shape)) != wanted:
            raise EagleError(
                f"{states.id}: states are aux {list(states.aux.shape)} and last {list(states.last.shape)}, should be"
                f" {list(wanted[0])} and {list(wanted[1])}"
            )
        dtype = getattr(torch, spec.dtype)
        as_given = states.aux.dtype == states.last.dtype == dtype
        norms = states.norms if as_given else None  # a narrower dtype may not hold what the engine's did
        kept = HiddenStates(
            states.id, states.token_ids, states.aux.to(dtype), states.last.to(dtype), states.last_norm, norms
        )
        if norms is None or not all_finite(norms):  # a length may also be too much for float32 where its parts are not
            parts = [*kept.aux.split(rows := max(1, -(-T // CHECKS))), *kept.last.split(rows)]
            if not all(self._checks.map(all_finite, parts)):
                self._refuse_not_finite(kept)
        return OpenSample(kept, response)

    def _refuse_not_finite(self, states: HiddenStates) -> None:
        """Raise for the first column with such a value."""
        import torch

        spec, T = self.spec, len(states.token_ids)
        for name, column in zip(spec.columns, [*states.aux.split(spec.hidden_size, dim=1), states.last], strict=True):
            bad = (~torch.isfinite(column)).any(dim=-1)
            if bad.any():
                first = int(bad.nonzero()[0])
                raise EagleError(
                    f"sample {states.id}: {name} is NaN or infinite as {spec.dtype} in {int(bad.sum())} of {T} tokens,"
                    f" first at position {first}; the engine's states are wrong, or capture.dtype is too narrow"
                )

    def _flush(self) -> None:
        """Hand the open shard to a thread."""
        number, start = len(self._shards) + len(self._in_flight), 0
        entries: list[SampleEntry] = []
        for sample in self._open:
            r, length = sample.response, len(sample.states.token_ids)
            entries.append(SampleEntry(r.id, r.category, number, start, length, r.prompt_tokens, r.response_tokens))
            start += length
        file = self.directory / f"shard-{number:05}.safetensors"
        self._in_flight.append((self._threads.submit(_write_shard, self._open, self.spec, file), entries))
        self._open, self._open_tokens = [], 0
        while len(self._in_flight) > IN_FLIGHT or (self._in_flight and self._in_flight[0][0].done()):
            self._publish_oldest()

    def _publish_oldest(self) -> None:
        """Wait for the oldest shard that is being written, and give it its name and its part of the index."""
        written, entries = self._in_flight[0]
        entry = written.result()
        file = self.directory / entry.file
        publish(file.with_suffix(".new"), file)
        # The part comes after the shard: a shard without its part is written again.
        write_json(file.with_suffix(".json"), index_of(self.spec, [entry], entries))
        self._shards.append(entry)
        self._samples += entries
        self._in_flight.popleft()


def _write_shard(samples: Sequence[OpenSample], spec: ShardSpec, file: Path) -> ShardEntry:
    """Write what is to become `file` under another name, and make sure that it is on disk."""
    import numpy as np
    import torch

    tensors = {
        "token_ids": [torch.tensor(s.states.token_ids) for s in samples],
        "aux": [s.states.aux for s in samples],
        "last": [s.states.last for s in samples],
        "loss_mask": [torch.tensor(s.response.loss_mask) for s in samples],
    }
    norms = [_norms(s.states, spec.hidden_size) for s in samples]
    new = file.with_suffix(".new")
    checksum = write_pieces(new, tensors)
    return ShardEntry(
        file=file.name,
        sha256=checksum,
        bytes=new.stat().st_size,
        tokens=sum(len(s.states.token_ids) for s in samples),
        mean_norms=tuple(np.concatenate(norms).mean(axis=0, dtype=np.float64).tolist()),
    )


@dataclass(frozen=True)
class Subset(Sequence[Sample]):
    """Some of the samples of a directory. Another process may be given it: only the indices travel."""

    shards: Shards
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]  # as `Shards`
        return self.shards[self.indices[index]]


def _norms(states: HiddenStates, hidden_size: int) -> NDArray[Any]:
    """[T, A+1]: of each boundary's state and of the last one; the engine's own, if it has worked them out."""
    import numpy as np

    boundaries = states.aux.unflatten(1, (-1, hidden_size))
    if states.norms is not None:
        norms = states.norms.numpy()
    else:
        norms = np.hstack([row_norms(boundaries), row_norms(states.last[:, None])])
    if np.isfinite(norms).all():
        return norms
    wide = [part.double().norm(dim=-1).numpy() for part in (boundaries, states.last[:, None])]  # squares above float32
    return np.hstack(wide)


class Shards(Sequence[Sample]):
    """The samples of a closed directory, in the order they were written.

    Tensors are views of the mapped file: only what is used is read, and nobody may change them in place (the file would
    stay as it is, but later reads in this process would see the change).

    EagleError wherever the index and the shards disagree.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spec = read_spec(directory)
        self.shards, self.samples = read_index(directory, self.spec)
        self._files: dict[int, Any] = {}

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""
        return [sample.length for sample in self.samples]

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Of all shards, without the index."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def mean_norms(self) -> dict[str, float]:
        """Mean L2 norm of a token's state by column ("boundary 2", ..., "last"), over all tokens."""
        sums = [sum(s.mean_norms[i] * s.tokens for s in self.shards) for i in range(len(self.spec.columns))]
        return {name: total / max(self.tokens, 1) for name, total in zip(self.spec.columns, sums, strict=True)}

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return (self._sample(entry) for entry in self.samples)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]  # no slices: they would read everything
        return self._sample(self.samples[index])

    def verify(self) -> None:
        """Read every byte. EagleError naming the shards whose checksum is not that of the index."""
        wrong = [shard.file for shard in self.shards if sha256(self.directory / shard.file) != shard.sha256]
        if wrong:
            raise EagleError(f"{self.directory}: the content of {', '.join(wrong)} changed since it was written")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # a data loader's worker maps the files itself

    def _sample(self, entry: SampleEntry) -> Sample:
        file = self._file(entry.shard)
        rows = slice(entry.start, entry.start + entry.length)
        token_ids, loss_mask, aux, last = (file.get_slice(n)[rows] for n in ("token_ids", "loss_mask", "aux", "last"))
        counts = (entry.prompt_tokens, entry.response_tokens)
        return Sample(entry.id, entry.category, token_ids, loss_mask, aux, last, *counts)

    def _file(self, number: int) -> Any:
        if number not in self._files:
            from safetensors import safe_open

            shard, spec = self.shards[number], self.spec
            file = safe_open(self.directory / shard.file, framework="pt")
            A, H, N = len(spec.boundaries), spec.hidden_size, shard.tokens
            states = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[spec.dtype]
            wanted = {
                "token_ids": ("I64", [N]),
                "loss_mask": ("BOOL", [N]),
                "aux": (states, [N, A * H]),
                "last": (states, [N, H]),
            }
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            found = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
            if found != wanted:
                raise EagleError(f"{self.directory / shard.file} holds {found}, its index says {wanted}")
            self._files[number] = file
        return self._files[number]
