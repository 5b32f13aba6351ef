"""Measures sizes and speeds of the codecs on one thread, on the tensors of a trained
transformer block, and ZipNN's if it is installed.

`python -m benchmarks.codecs [--rounds N]`. `pip install zipnn` installs the peer. The
tensors of each kind are joined, and cut into chunks as in a slot. Speeds are in GB/s of
raw bytes. The rounds of all codecs are interleaved, and each figure is the best of its
rounds, because only the machine makes a codec slower.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from benchmarks.rows import Row, keep
from benchmarks.trained import trained
from ckptd.agent.bench.ways import timed
from ckptd.shared.codecs.codec import Codec, decoder, encoder
from ckptd.shared.formats.plan import DEFAULT_CHUNK

CODECS = ("zstd", "planes")
WANTED = {
    "bf16": (0.651, 1.2, 1.8),
    "fp32": (0.825, 1.4, 2.4),
    "exp_avg": (0.833, 0.0, 0.0),
    "exp_avg_sq": (0.773, 0.0, 0.0),
}
"""The limits for each kind of tensor: the greatest share of the raw bytes, and the
least speeds of encoding and decoding, or 0.0.
"""


def block(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat(
        [tensor.flatten() for name, tensor in named.items() if name.startswith("blocks.0.")]
    )


def entropy(tensor: torch.Tensor) -> float:
    """Return the share of its bytes that a coder of single bytes needs at least for a
    floating-point tensor.

    It is the entropy, of order 0, of the planes of bytes that `planes` makes: of each
    word rotated left by one bit. Coders that see runs or repetitions may get below it.
    """
    width = tensor.itemsize
    words = (
        tensor.flatten().view(torch.int16 if width == 2 else torch.int32).numpy().view(f"<u{width}")
    )
    rotated = words << 1 | words >> (8 * width - 1)
    counts = [
        np.bincount((rotated >> (8 * place) & 255).astype(np.uint8), minlength=256)
        for place in range(width)
    ]
    shares = [count[count > 0] / len(words) for count in counts]
    return float(-sum((share * np.log2(share)).sum() for share in shares) / (8 * width))


class Ours:
    """Encodes and decodes chunk by chunk, as a part does: a chunk that does not shrink
    stays as it is.
    """

    def __init__(self, name: str, raw: bytes, element_size: int) -> None:
        found = encoder(name)
        self._encoder, self._decoder, self._width = found, decoder(found.number), element_size
        self._raw, self._chunks = raw, range(0, len(raw), DEFAULT_CHUNK)
        self._stored: list[tuple[Codec, memoryview]] = []
        self._buffers = [bytearray(DEFAULT_CHUNK) for _ in self._chunks]
        self._back = bytearray(len(raw))

    def ready(self) -> None:
        """Prepare for `encode`, outside the measured time."""

    def encode(self) -> None:
        self._stored = []
        for start, buffer in zip(self._chunks, self._buffers, strict=True):
            chunk = memoryview(self._raw)[start : start + DEFAULT_CHUNK]
            length = self._encoder.encode(chunk, self._width, memoryview(buffer)[: len(chunk)])
            self._stored.append(
                (decoder(0), chunk)
                if length is None
                else (self._decoder, memoryview(buffer)[:length])
            )

    def decode(self) -> None:
        for start, (codec, stored) in zip(self._chunks, self._stored, strict=True):
            codec.decode(stored, memoryview(self._back)[start : start + DEFAULT_CHUNK], self._width)

    @property
    def size(self) -> int:
        assert bytes(self._back) == self._raw
        return sum(len(stored) for _, stored in self._stored)


class ZipNN:
    def __init__(self, raw: bytes, dtype: str) -> None:
        from zipnn import ZipNN as Peer

        self._peer: Any = Peer(input_format="byte", bytearray_dtype=dtype, threads=1)
        self._raw, self._stored, self._back = raw, b"", b""
        self._own = bytearray()

    def ready(self) -> None:
        self._own = bytearray(self._raw)  # ZipNN changes the bytes that it compresses

    def encode(self) -> None:
        self._stored = self._peer.compress(self._own)

    def decode(self) -> None:
        self._back = self._peer.decompress(self._stored)

    @property
    def size(self) -> int:
        assert bytes(self._back) == self._raw
        return len(self._stored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds, state, rows = parser.parse_args().rounds, trained(), list[Row]()
    torch.set_num_threads(1)
    weights = block(state.weights)
    kinds = {
        "bf16": weights.bfloat16(),
        "fp32": weights,
        "exp_avg": block(state.exp_avg),
        "exp_avg_sq": block(state.exp_avg_sq),
    }
    for kind, tensor in kinds.items():
        raw = tensor.view(torch.uint8).numpy().tobytes()
        coders: dict[str, Any] = {name: Ours(name, raw, tensor.itemsize) for name in CODECS}
        if find_spec("zipnn"):
            coders["ZipNN"] = ZipNN(
                raw, "bfloat16" if tensor.dtype == torch.bfloat16 else "float32"
            )
        speeds = defaultdict[str, list[float]](list)
        for _ in range(rounds):
            for name, coder in coders.items():
                coder.ready()
                speeds[f"{name} encode"].append(len(raw) / timed(coder.encode) / 1e9)
                speeds[f"{name} decode"].append(len(raw) / timed(coder.decode) / 1e9)
        best, sizes = (
            {name: max(found) for name, found in speeds.items()},
            {name: coder.size / len(raw) for name, coder in coders.items()},
        )
        size, encode, decode = WANTED[kind]
        rows.append(
            Row(
                name=f"size of {kind}, planes",
                value=sizes["planes"],
                unit="",
                limit=size,
                beside={**sizes, "entropy": entropy(tensor)},
            )
        )
        if "ZipNN" in sizes:
            rows.append(
                Row(
                    name=f"size of {kind}, planes / ZipNN",
                    value=sizes["planes"] / sizes["ZipNN"],
                    unit="x",
                    limit=1.005,
                )
            )
        for direction, least in (("encode", encode), ("decode", decode)):
            ours = best[f"planes {direction}"]
            beside = {name: found for name, found in best.items() if name.endswith(direction)}
            rows.append(
                Row(
                    name=f"{direction} {kind}, one thread",
                    value=ours,
                    unit="GB/s",
                    limit=least or None,
                    at_most=False,
                    beside=beside,
                )
            )
            if least and "ZipNN" in sizes:
                ratio = ours / best[f"ZipNN {direction}"]
                rows.append(
                    Row(
                        name=f"{direction} {kind}, planes / ZipNN",
                        value=ratio,
                        unit="x",
                        limit=1.5,
                        at_most=False,
                    )
                )
    keep(rows, "codecs")


if __name__ == "__main__":
    main()
