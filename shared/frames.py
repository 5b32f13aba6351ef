"""Cut a byte stream into frames, and put frames together (PROTOCOL.md, section 1). No I/O, no trust."""

from __future__ import annotations

import struct

from ckptd.shared.errors import ProtocolError

MAX_FRAME = 1 << 20
_LENGTH = struct.Struct("<I")


def encode(payload: bytes) -> bytes:
    if not 0 < len(payload) <= MAX_FRAME:
        raise ProtocolError(f"a frame of {len(payload)} bytes cannot be sent: the limit is {MAX_FRAME}")
    return _LENGTH.pack(len(payload)) + payload


class Decoder:
    """Feed bytes in, get whole payloads out. Holds at most one frame beyond what was fed."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Raises ProtocolError for a length that cannot be, before anything is allocated for it."""
        self._buffer += data
        payloads = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if not 0 < length <= MAX_FRAME:
                raise ProtocolError(f"a frame claims {length} bytes; 1 to {MAX_FRAME} are allowed: this is not ckptd's protocol")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return payloads
