"""Measures sizes and speeds of deltas on one thread, beside the deltas that others have
published, on the states that `benchmarks/delta_states.py` trains.

`python -m benchmarks.deltas [--rounds N]`. `pip install zipnn` installs one of the peers.
The tensors of each kind are joined, and cut into chunks as in a slot. Speeds are in GB/s
of the new bytes and count processor time, because other processes may run meanwhile. The
rounds of all ways are interleaved, and each speed is the median of its rounds.

The peers, each written here from its source unless it is a package:

* `xor zstd N`: zstd of the XOR of each chunk, at level N. SkyRL sends such deltas.
* `TRL gaps`: the distances of the changed words in 16 bits, or 32 where one is too long,
  and the new words (trl/experimental/async_grpo/delta_codec.py). `TRL indices`: indices
  of 32 bits instead of distances.
* `slime`: `TRL gaps` in a frame of zstd at level 1, the encoding `deltas_zstd` of slime,
  verl and NeMo RL.
* `PULSE`: row and column of each changed word as differences in the smallest integers,
  and the new words, in a frame of zstd at level 1 (arXiv 2602.03839, version 3.1 of
  grail/infrastructure/sparse_codec.py in one-covenant/grail).
* `ZipNN`: the package's delta: the XOR in planes of bytes, each compressed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from benchmarks.delta_states import fine_tuning, pretraining
from benchmarks.rows import Row, keep
from ckptd.shared.codecs.delta import Delta
from ckptd.shared.codecs.planes import Planes
from ckptd.shared.formats.plan import DEFAULT_CHUNK

Words = npt.NDArray[Any]
LEVELS = (1, 3, 9)
"""The levels of zstd for the XOR. Above 9, it compresses less than 10 MB/s."""
LIMITS: dict[str, tuple[float | None, float | None]] = {
    "bf16 at RL rates": (0.02, 2.0),
    "bf16 at RL rates, 5 steps": (None, None),
    "bf16 5 steps apart": (0.30, 1.0),
    "bf16 50 steps apart": (None, None),
    "fp32 5 steps apart": (0.63, 1.0),
    "fp32 50 steps apart": (None, None),
    "exp_avg 5 steps apart": (None, 1.0),
    "exp_avg_sq 5 steps apart": (None, 1.0),
}
"""The limits of each kind: the greatest share of the raw bytes that a delta takes, and the
least speed of encoding in GB/s. None if the row is only printed.
"""


@dataclass(frozen=True, slots=True)
class Pair:
    """The words of all tensors of one kind, new and base, joined in the order of their
    names.

    shapes: the shapes of the tensors. parts: the slices that the tensors take.
    """

    new: Words
    base: Words
    shapes: list[tuple[int, ...]]
    parts: list[slice]

    @classmethod
    def of(cls, new: dict[str, Tensor], base: dict[str, Tensor]) -> Pair:
        ends = np.cumsum([tensor.numel() for tensor in new.values()]).tolist()
        return cls(
            _words(new),
            _words({name: base[name] for name in new}),
            [tuple(tensor.shape) for tensor in new.values()],
            [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)],
        )

    @property
    def chunks(self) -> Iterator[slice]:
        words = DEFAULT_CHUNK // self.new.itemsize
        return (slice(start, start + words) for start in range(0, len(self.new), words))

    @property
    def changed(self) -> float:
        return float(np.mean(self.new != self.base))


def _words(tensors: dict[str, Tensor]) -> Words:
    joined = torch.cat([tensor.flatten() for tensor in tensors.values()])
    width = joined.itemsize
    return joined.view(torch.int16 if width == 2 else torch.int32).numpy().view(f"<u{width}")


def whole_sizes(pair: Pair) -> list[int]:
    """Return the bytes that each chunk takes without its base: as planes, or raw."""
    buffer, sizes = bytearray(DEFAULT_CHUNK), list[int]()
    for chunk in pair.chunks:
        raw = _bytes(pair.new[chunk])
        length = Planes().encode(raw, pair.new.itemsize, memoryview(buffer)[: raw.nbytes])
        sizes.append(raw.nbytes if length is None else length)
    return sizes


class Way(Protocol):
    """A way to store `pair.new` by its difference from `pair.base`.

    back: holds the base after `ready`, and the new words after `apply`.
    """

    back: Words

    def ready(self) -> None:
        """Restore the bases that the other methods overwrite, outside of the measured
        time.
        """

    def encode(self) -> int:
        """Encode all words, and return the number of stored bytes."""

    def apply(self) -> None: ...


class Ours:
    """The codec `delta` for each chunk, or `planes` where that is smaller."""

    def __init__(self, pair: Pair) -> None:
        self._pair, self.back, self._delta = pair, pair.base.copy(), Delta()
        self._base, self._width = pair.base.copy(), pair.new.itemsize
        self._buffers = [bytearray(DEFAULT_CHUNK) for _ in pair.chunks]
        self._lengths: list[int | None] = []

    def ready(self) -> None:
        np.copyto(self.back, self._pair.base)
        np.copyto(self._base, self._pair.base)

    def encode(self) -> int:
        self._lengths = [
            self._delta.encode(
                _bytes(self._pair.new[chunk]),
                _bytes(self._base[chunk]),
                self._width,
                memoryview(buffer)[: self._pair.new[chunk].nbytes],
            )
            for chunk, buffer in zip(self._pair.chunks, self._buffers, strict=True)
        ]
        return sum(
            self._pair.new[chunk].nbytes if length is None else length
            for chunk, length in zip(self._pair.chunks, self._lengths, strict=True)
        )

    def apply(self) -> None:
        for chunk, buffer, length in zip(
            self._pair.chunks, self._buffers, self._lengths, strict=True
        ):
            if length is None:
                self.back[chunk] = self._pair.new[chunk]
            else:
                stored, back = memoryview(buffer)[:length], _bytes(self.back[chunk])
                for differences in self._delta.decoded([stored], back.nbytes, self._width):
                    differences.add_to(back)
                    differences.check()

    def smallest(self) -> int:
        """Return the bytes that a checkpoint stores: of each chunk, the smallest of
        delta, planes and raw.
        """
        whole = whole_sizes(self._pair)
        return sum(
            size if length is None else min(length, size)
            for length, size in zip(self._lengths, whole, strict=True)
        )


class XorZstd:
    def __init__(self, pair: Pair, level: int) -> None:
        self._pair, self.back = pair, pair.base.copy()
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._decompressor = zstandard.ZstdDecompressor()
        self._frames: list[bytes] = []

    def ready(self) -> None:
        np.copyto(self.back, self._pair.base)

    def encode(self) -> int:
        self._frames = [
            self._compressor.compress(_bytes(self._pair.new[chunk] ^ self._pair.base[chunk]))
            for chunk in self._pair.chunks
        ]
        return sum(map(len, self._frames))

    def apply(self) -> None:
        for chunk, frame in zip(self._pair.chunks, self._frames, strict=True):
            self.back[chunk] ^= np.frombuffer(self._decompressor.decompress(frame), self.back.dtype)


class Sparse:
    """Positions and new words of what has changed in each tensor.

    located: encodes the sorted positions in a tensor of that shape. found: decodes them.
    framed: True if all arrays are joined in one frame of zstd at level 1.
    """

    def __init__(
        self,
        pair: Pair,
        located: Callable[[Words, tuple[int, ...]], list[Words]],
        found: Callable[[list[Words], tuple[int, ...]], Words],
        *,
        framed: bool,
    ) -> None:
        self._pair, self.back, self._framed = pair, pair.base.copy(), framed
        self._located, self._found = located, found
        self._arrays: list[list[Words]] = []
        self._frame = b""

    def ready(self) -> None:
        np.copyto(self.back, self._pair.base)

    def encode(self) -> int:
        self._arrays = []
        for part, shape in zip(self._pair.parts, self._pair.shapes, strict=True):
            new = self._pair.new[part]
            positions = np.flatnonzero(new != self._pair.base[part])
            self._arrays.append([*self._located(positions, shape), new[positions]])
        arrays = [array for arrays in self._arrays for array in arrays]
        if not self._framed:
            return sum(array.nbytes for array in arrays)
        joined = b"".join(_bytes(array) for array in arrays)
        self._frame = zstandard.ZstdCompressor(level=1).compress(joined)
        return len(self._frame)

    def apply(self) -> None:
        if self._framed:
            joined, start = zstandard.ZstdDecompressor().decompress(self._frame), 0
            for arrays in self._arrays:
                for number, array in enumerate(arrays):
                    arrays[number] = np.frombuffer(joined, array.dtype, len(array), start)
                    start += array.nbytes
        for part, shape, (*places, values) in zip(
            self._pair.parts, self._pair.shapes, self._arrays, strict=True
        ):
            self.back[part][self._found(places, shape)] = values


def _indices(positions: Words, shape: tuple[int, ...]) -> list[Words]:
    return [positions.astype(np.int32)]


def _from_indices(places: list[Words], shape: tuple[int, ...]) -> Words:
    return places[0]


def _gaps(positions: Words, shape: tuple[int, ...]) -> list[Words]:
    gaps = np.diff(positions, prepend=-1) - 1
    return [gaps.astype(np.uint16 if gaps.max(initial=0) < 1 << 16 else np.uint32)]


def _from_gaps(places: list[Words], shape: tuple[int, ...]) -> Words:
    return np.cumsum(places[0].astype(np.int64) + 1) - 1


def _rows_and_columns(positions: Words, shape: tuple[int, ...]) -> list[Words]:
    rows, columns = np.divmod(positions, math.prod(shape[1:]))
    downs, rights = np.diff(rows, prepend=0), np.diff(columns, prepend=0)
    rights = np.where(downs != 0, columns, rights)
    return [_smallest(downs), _smallest(rights)]


def _from_rows_and_columns(places: list[Words], shape: tuple[int, ...]) -> Words:
    downs, rights = (place.astype(np.int64) for place in places)
    begins = downs != 0
    begins[:1] = True
    sums = np.cumsum(rights)
    before = (sums - rights)[begins]
    columns = sums - before[np.cumsum(begins) - 1]
    positions: Words = np.cumsum(downs) * math.prod(shape[1:]) + columns
    return positions


def _smallest(values: Words) -> Words:
    most = values.max(initial=0)
    return values.astype(np.uint8 if most < 1 << 8 else np.uint16 if most < 1 << 16 else np.int32)


class ZipNN:
    def __init__(self, pair: Pair) -> None:
        from zipnn import ZipNN as Peer

        self._peer: Any = Peer(
            input_format="byte",
            bytearray_dtype="bfloat16" if pair.new.itemsize == 2 else "float32",
            delta_compressed_type="byte",
            threads=1,
        )
        self._new, self._base = pair.new.tobytes(), pair.base.tobytes()
        self.back, self._stored = pair.base, b""

    def ready(self) -> None:
        """Do nothing: the package changes neither."""

    def encode(self) -> int:
        self._stored = self._peer.compress(self._new, delta_second_data=self._base)
        return len(self._stored)

    def apply(self) -> None:
        restored = self._peer.decompress(self._stored, delta_second_data=self._base)
        self.back = np.frombuffer(restored, self.back.dtype)


def _bytes(words: Words) -> memoryview:
    return words.view(np.uint8).data


def ways(pair: Pair) -> dict[str, Way]:
    found: dict[str, Way] = {"ckptd": Ours(pair)}
    found |= {f"xor zstd {level}": XorZstd(pair, level) for level in LEVELS}
    found |= {
        "TRL indices": Sparse(pair, _indices, _from_indices, framed=False),
        "TRL gaps": Sparse(pair, _gaps, _from_gaps, framed=False),
        "slime": Sparse(pair, _gaps, _from_gaps, framed=True),
        "PULSE": Sparse(pair, _rows_and_columns, _from_rows_and_columns, framed=True),
    }
    if find_spec("zipnn"):
        found["ZipNN"] = ZipNN(pair)
    return found


def measured(kind: str, pair: Pair, rounds: int) -> list[Row]:
    """Return the rows of one kind of state."""
    raw, found, sizes = pair.new.nbytes, ways(pair), dict[str, float]()
    encoding, applying = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    target = np.empty_like(pair.new)
    for _ in range(rounds):
        for name, way in found.items():
            way.ready()
            begun = time.process_time()
            stored = way.encode()
            encoded = time.process_time()
            way.apply()
            encoding[name].append(raw / (encoded - begun) / 1e9)
            applying[name].append(raw / (time.process_time() - encoded) / 1e9)
            assert np.array_equal(way.back, pair.new), name
            sizes[name] = stored / raw
        begun = time.process_time()
        np.copyto(target, pair.new)
        copied = raw / (time.process_time() - begun) / 1e9
        encoding["memcpy"].append(copied)
        applying["memcpy"].append(copied)
    ours = found["ckptd"]
    assert isinstance(ours, Ours)
    size, speed = LIMITS[kind]
    stored_size = ours.smallest() / raw
    best = min(share for name, share in sizes.items() if name != "ckptd")
    return [
        Row(name=f"words that change, {kind}", value=pair.changed, unit=""),
        Row(name=f"size of {kind}", value=stored_size, unit="", limit=size, beside=sizes),
        Row(
            name=f"size of {kind}, ours / best peer", value=stored_size / best, unit="x", limit=1.0
        ),
        *(
            Row(
                name=f"{direction} {kind}, one thread",
                value=median(speeds["ckptd"]),
                unit="GB/s",
                limit=limit,
                at_most=False,
                beside={name: median(found) for name, found in speeds.items()},
            )
            for direction, speeds, limit in (
                ("encode", encoding, speed),
                ("apply", applying, None),
            )
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    tuned, states, rows = fine_tuning(), pretraining(), list[Row]()
    pairs = {
        "bf16 at RL rates": (tuned[-1].weights, tuned[-2].weights),
        "bf16 at RL rates, 5 steps": (tuned[-1].weights, tuned[-6].weights),
        "bf16 5 steps apart": (states[5].weights, states[0].weights),
        "bf16 50 steps apart": (states[50].weights, states[0].weights),
        "fp32 5 steps apart": (states[5].master, states[0].master),
        "fp32 50 steps apart": (states[50].master, states[0].master),
        "exp_avg 5 steps apart": (states[5].exp_avg, states[0].exp_avg),
        "exp_avg_sq 5 steps apart": (states[5].exp_avg_sq, states[0].exp_avg_sq),
    }
    for kind, (new, base) in pairs.items():
        rows += measured(kind, Pair.of(new, base), rounds)
    keep(rows, "deltas")


if __name__ == "__main__":
    main()
