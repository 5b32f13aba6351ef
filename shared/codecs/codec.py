"""The codecs that encode and decode chunks, each known by its number in the index of a
part (FORMAT.md, section 3).

A codec takes one chunk and its element size and returns the stored form. It may be
called from many threads at once. Decoding trusts no input: sizes are checked before
memory is allocated, the output buffer has exactly the raw length, and the caller
compares checksums.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import zstandard

from ckptd.shared.codecs.auto_codec import Auto
from ckptd.shared.codecs.planes import Planes
from ckptd.shared.errors import IntegrityError, InvalidConfig, NewerFormat

RAW, ZSTD = 0, 1
MAX_WINDOW = 8 << 20


class Encoder(Protocol):
    """An encoder of chunks, as a setting names it.

    `number` is the number of the codec that decodes what `encode` writes.
    """

    number: int
    name: str

    def encode(self, raw: memoryview, element_size: int, stored: memoryview) -> int | None:
        """Write the stored form of the chunk `raw` into `stored`, and return its length
        in bytes, or None if it would not be smaller.

        `stored` has room for as many bytes as `raw` has. Its content is undefined if
        the result is None. `element_size` is in bytes.
        """

    def writing(self, nbytes: int) -> AbstractContextManager[None]:
        """Context manager.

        Held while a chunk of `nbytes` stored bytes is written to storage.
        """


class Codec(Encoder, Protocol):
    def decode(self, stored: memoryview, raw: memoryview, element_size: int) -> None:
        """Decode `stored` into `raw`, which has exactly the raw length.

        Raises IntegrityError if that is not possible.
        """


class Raw:
    """The codec that stores each chunk as it is."""

    number, name, usage = RAW, "raw", "raw"

    @classmethod
    def parse(cls, option: str) -> Raw | None:
        return None if option else cls()

    def encode(self, raw: memoryview, element_size: int, stored: memoryview) -> None:
        return None

    def writing(self, nbytes: int) -> AbstractContextManager[None]:
        return nullcontext()

    def decode(self, stored: memoryview, raw: memoryview, element_size: int) -> None:
        if len(stored) != len(raw):
            raise IntegrityError(
                f"a raw chunk of {len(raw)} bytes is stored as {len(stored)} bytes"
            )
        raw[:] = stored


class Zstd:
    """The codec that stores each chunk as one zstd frame.

    `level` is the compression level; decoding does not need it.
    """

    number, name, usage = ZSTD, "zstd", "zstd or zstd:LEVEL with a level from 1 to 19"

    def __init__(self, level: int = 1) -> None:
        self.level = level
        self._local = threading.local()  # zstandard does not allow threads to share a context

    @classmethod
    def parse(cls, option: str) -> Zstd | None:
        if not option:
            return cls()
        return cls(int(option)) if option.isdecimal() and 1 <= int(option) <= 19 else None

    def encode(self, raw: memoryview, element_size: int, stored: memoryview) -> int | None:
        context = getattr(self._local, "compressor", None)
        if context is None:
            # The frame has no checksum, because the index of the part holds one. Up to
            # level 19, zstd's windows stay within MAX_WINDOW.
            context = self._local.compressor = zstandard.ZstdCompressor(
                level=self.level, write_content_size=True, write_checksum=False
            )
        frame: bytes = context.compress(raw)
        if len(frame) >= len(raw):
            return None
        stored[: len(frame)] = frame
        return len(frame)

    def writing(self, nbytes: int) -> AbstractContextManager[None]:
        return nullcontext()

    def decode(self, stored: memoryview, raw: memoryview, element_size: int) -> None:
        try:
            frame = zstandard.get_frame_parameters(stored)
            if frame.content_size != len(raw) or frame.window_size > max(MAX_WINDOW, len(raw)):
                raise IntegrityError(
                    f"a zstd chunk of {len(raw)} bytes has a frame header that says "
                    f"{frame.content_size}"
                )
            context = getattr(self._local, "decompressor", None)
            if context is None:
                context = self._local.decompressor = zstandard.ZstdDecompressor(
                    max_window_size=MAX_WINDOW
                )
            decoded = context.decompress(stored, max_output_size=len(raw), allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise IntegrityError(f"a zstd chunk cannot be decoded: {error}") from None
        if len(decoded) != len(raw):
            raise IntegrityError(f"a zstd chunk of {len(raw)} bytes decodes to {len(decoded)}")
        raw[:] = decoded


_DECODERS: dict[int, Codec] = {codec.number: codec() for codec in (Raw, Zstd, Planes)}
_SETTINGS: dict[str, type[Raw] | type[Zstd] | type[Planes] | type[Auto]] = {
    kind.name: kind for kind in (Raw, Zstd, Planes, Auto)
}
"""The encoders, by the names of their settings. `parse` makes one from the text after
the colon, or returns None. `usage` is for errors.
"""


def decoder(number: int) -> Codec:
    """Return the codec that decodes chunks with this number.

    Raises NewerFormat if this version does not know the number.
    """
    try:
        return _DECODERS[number]
    except KeyError:
        raise NewerFormat(
            f"chunks are encoded with codec {number}, which this ckptd does not know: upgrade it"
        ) from None


def encoder(setting: str) -> Encoder:
    """Return the encoder for a setting like "auto", "raw" or "zstd:3".

    Raises InvalidConfig if there is no such setting.
    """
    name, _, option = setting.partition(":")
    if name in _SETTINGS and (found := _SETTINGS[name].parse(option)) is not None:
        return found
    raise InvalidConfig(
        f"codec {setting!r} is not known: use "
        f"{', '.join(kind.usage for kind in _SETTINGS.values())}"
    )
