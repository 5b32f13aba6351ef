"""The request document, which holds options of one `snapshot()` call, such as its tag
and metrics (FORMAT.md, section 3).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.bounds import MAX_DEPTH_READ, deeper_than
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.replicas import Replicas
from ckptd.shared.retention import MAX_TEXT, MOST_POLICIES

MAX_REQUEST = 1 << 20
END_OF_TIME = 253_402_300_800
"""The end of the year 9999 in Unix seconds. No later time fits into a `datetime`."""


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a request document.

    tag: the user's own tag, or None. persist: True if the snapshot is to become
    durable, False if memory is enough. metrics: the user's metrics, by name.
    user_content: the user's content, as JSON text. created: the time of the snapshot in
    Unix seconds, by the trainer's clock. Nothing is ordered by it. retention: the
    retention policies of the job as text, or None if it has none of its own. node: the
    membership of the node in an attempt of several nodes, or None if all ranks are on one
    node. replicas: digests of the tensors that other ranks hold too, by which these
    ranks are compared. replicate: True if the slot is to be copied to a peer.
    """

    tag: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    persist: bool = True
    metrics: dict[str, float] = {}
    user_content: str = "null"
    created: float = 0.0
    retention: (
        Annotated[
            list[Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]],
            msgspec.Meta(max_length=MOST_POLICIES),
        ]
        | None
    ) = None
    node: Membership | None = None
    replicas: Replicas = []
    replicate: bool = False

    def encode(self) -> bytes:
        members = msgspec.to_builtins(self, builtin_types=(bytes,))
        for optional in ("retention", "node", "replicas", "replicate"):
            if members[optional] in (None, [], False):
                del members[optional]
        return msgspec.msgpack.encode(members)

    @classmethod
    def decode(cls, data: bytes) -> SnapshotRequest:
        """Return the request in `data`.

        Raises IntegrityError if `data` is not a valid request document, its JSON text
        included.
        """
        if len(data) > MAX_REQUEST:
            raise IntegrityError(
                f"request document has {len(data):,d} bytes; expected at most {MAX_REQUEST:,d}"
            )
        try:
            request = _DECODER.decode(data)
            content = msgspec.json.decode(request.user_content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise IntegrityError(f"request document cannot be read: {error}") from None
        if deeper_than(content, MAX_DEPTH_READ):
            raise IntegrityError(
                f"request document has user_content that is nested more than {MAX_DEPTH_READ} "
                f"levels deep"
            )
        if not 0 <= request.created < END_OF_TIME:
            raise IntegrityError(
                f"request document was created at {request.created}; expected a time from 1970 to "
                f"9999"
            )
        return request


_DECODER = msgspec.msgpack.Decoder(SnapshotRequest)
"""Made at the import, as every decoder is: msgspec may crash if two threads decode a
type for the first time at once.
"""
