"""Frames of the protocol: cuts a byte stream into payloads, and frames a payload to be
sent (PROTOCOL.md, section 1).

This module does no I/O. It does not trust the peer: every length is checked.
"""

from __future__ import annotations

import struct

from ckptd.shared.errors import ProtocolError

MAX_FRAME = 1 << 20
_LENGTH = struct.Struct("<I")


def encode(payload: bytes) -> bytes:
    """Return the frame for a payload.

    Raises ProtocolError if the payload is empty or longer than `MAX_FRAME` bytes.
    """
    if not 0 < len(payload) <= MAX_FRAME:
        raise ProtocolError(
            f"a frame of {len(payload)} bytes cannot be sent: the limit is {MAX_FRAME}"
        )
    return _LENGTH.pack(len(payload)) + payload


class Decoder:
    """A decoder that takes bytes with `feed` and returns whole payloads.

    Between two calls it holds at most one incomplete frame.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes, and return the payloads that are complete now.

        Raises ProtocolError for a length of 0 or more than `MAX_FRAME`, before anything
        is allocated for the frame.
        """
        self._buffer += data
        payloads = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if not 0 < length <= MAX_FRAME:
                raise ProtocolError(
                    f"a frame has a length of {length} bytes, and 1 to {MAX_FRAME} are allowed: "
                    f"the peer does not speak ckptd's protocol"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return payloads
