"""The heartbeat of a run, by which the daemon of rank 0 shows the daemons of other
nodes that the job is running (FORMAT.md, section 6).

A heartbeat is only used to refuse a newcomer with advice. It never fences a run, and no
checkpoint is deleted or chosen because of it.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec

from ckptd.shared import names
from ckptd.shared.formats.plan import Size

MAX_HEARTBEAT = 4096
"""The most bytes that are read of a heartbeat. The longest that a daemon writes has
about 2,200.
"""
_LAST_SECOND = 253_402_300_799  # the end of the year 9999, which `time.gmtime` can show

_Nonce = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat of one attempt.

    run: an id that the workers of one launch share, or "". host, boot: the node of rank
    0, and the boot id of its kernel. pid, since: the process of rank 0, and when it
    started, in Unix seconds; both 0 if they are not known. beat: random, and different
    in each heartbeat.
    """

    format: str = "ckptd-run"
    version: int = 1
    job: Annotated[str, msgspec.Meta(max_length=128)]
    attempt: Size
    run: Annotated[str, msgspec.Meta(max_length=256)] = ""
    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
    boot: _Nonce
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    since: Annotated[float, msgspec.Meta(ge=0, le=_LAST_SECOND)] = 0.0
    beat: _Nonce

    @classmethod
    def decode(cls, data: bytes, job: str, attempt: int) -> Heartbeat | None:
        """Return the heartbeat in `data`, or None if it is none of this attempt of this
        job.
        """
        try:
            found = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return (
            found
            if (found.format, found.job, found.attempt) == ("ckptd-run", job, attempt)
            else None
        )

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def again(self) -> Heartbeat:
        """Return the next heartbeat of the same run: only `beat` differs."""
        return msgspec.structs.replace(self, beat=names.new_nonce().hex())

    @property
    def who(self) -> str:
        """The process and its node, for messages: "process 4711 on node1 since
        2026-11-24 22:08:00 UTC".
        """
        process = f"process {self.pid}" if self.pid else "a process"
        since = (
            time.strftime(" since %Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
            if self.since
            else ""
        )
        return f"{process} on {self.host}{since}"


_DECODER = msgspec.json.Decoder(Heartbeat)
