"""The test vectors of frames of the protocol, sound ones and ones that end the
connection (PROTOCOL.md, sections 1 and 6).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import msgspec

CLAIM = "000102030405060708090a0b0c0d0e0f"
SEGMENT = f"{CLAIM}.seg"


@dataclass(frozen=True)
class FrameVector:
    """The bytes of a frame, and its entry in `vectors.json`."""

    data: bytes
    entry: dict[str, Any]


def frame(payload: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(payload) if length is None else length) + payload


def shown(value: Any) -> Any:
    """Return a message as JSON, as section 5 of PROTOCOL.md has it."""
    match value:
        case bytes():
            return f"hex:{value.hex()}"
        case dict():
            return {str(key): shown(item) for key, item in value.items()}
        case list():
            return list(map(shown, value))
    return value


def frames() -> dict[str, FrameVector]:
    def read(about: str, message: dict[str, Any]) -> FrameVector:
        return FrameVector(
            frame(msgspec.msgpack.encode(message)),
            {"about": about, "expect": "read", "message": shown(message)},
        )

    def refused(about: str, check: str, data: bytes) -> FrameVector:
        return FrameVector(
            data,
            {"about": about, "expect": "refused", "why": "damaged", "at": "open", "check": check},
        )

    def payload(about: str, data: bytes) -> FrameVector:
        return refused(about, "frame-payload", frame(data))

    def fields(about: str, message: Any) -> FrameVector:
        return refused(about, "frame-fields", frame(msgspec.msgpack.encode(message)))

    node = {"claim": CLAIM, "ranks": [0, 1]}
    begin: dict[str, Any] = {"type": "begin", "id": 3, "job": "gpt", "rank": 0, "world_size": 4}
    seal: dict[str, Any] = {"type": "seal", "id": 6, "segment": SEGMENT, "attempt": 2, "step": 1000}
    heard: dict[str, Any] = {"type": "heard", "id": 14, "attempt": 2}
    holding = {
        "held": [900],
        "done": 900,
        "durable": 800,
        "failed": {850: ["storage", "disk full"]},
        "ranks": [0, 1],
        "begun": {1000: [1]},
        "overdue": [1000],
        "replicas": {
            900: [
                [bytes(range(8)), bytes(range(8, 16)), "0, 2", "model.weight"],
                [bytes(8), b"", "1, 3"],
            ]
        },
    }
    status = msgspec.msgpack.encode({"type": "status", "id": 2})
    return {
        "welcome": read(
            "a Welcome with every field",
            {
                "type": "welcome",
                "re": 1,
                "version": 1,
                "features": ["nodes", "stage"],
                "daemon": "0.2.0",
                "root": "/ckpts",
                "private": True,
                "slots": 3,
                "chunk_size": 65536,
                "stall_budget": 2.5,
                "instance": CLAIM,
                "settings": {"CKPTD_SLOTS": "3"},
                "identity": CLAIM,
                "stage": "/nvme/stage",
            },
        ),
        "begin-of-a-node": read(
            "a Begin with every field",
            begin
            | {"attempt": 0, "run": "gpt-7", "wait": 30.0, "node": node, "foreign_memory": "adopt"},
        ),
        "begin-with-a-root": read(
            "a Begin with the identity of the root for which its attempt was begun",
            begin | {"identity": CLAIM},
        ),
        "cost": read(
            "a Seal with `held` and `cost`",
            seal | {"held": 0.25, "cost": {"step": 900, "seconds": -0.001, "usual": 0.5}},
        ),
        "seal-from-an-accelerator": read(
            "a Seal whose device was full, and whose slot was not page-locked",
            seal | {"uncompared": True, "unlocked": 4096},
        ),
        "cost-in-integers": read(
            "fields of numbers that are integers of msgpack",
            seal | {"held": 0, "cost": {"step": 900, "seconds": 1, "usual": 2}},
        ),
        "holds": read(
            "a Holds with every field of a holding: the last brief has no key",
            {"type": "holds", "re": 0, "attempt": 2, "holding": holding},
        ),
        "missing": read(
            "an answer with every field",
            heard
            | {
                "answer": {
                    "common": [900],
                    "dead": {950: ["storage", "disk full"]},
                    "missing": {1000: [1, 3]},
                }
            },
        ),
        "welcome-of-peers": read(
            "a Welcome of a daemon that holds copies of slots of other nodes",
            {
                "type": "welcome",
                "re": 1,
                "version": 1,
                "features": ["nodes", "peers"],
                "copies": {"domain": "rack7", "bandwidth": 500_000_000},
            },
        ),
        "holds-copies": read(
            "a Holds with the fields of peer replicas",
            {
                "type": "holds",
                "re": 0,
                "attempt": 2,
                "holding": {"held": [900], "wanted": [900], "hosted": {800: [2]}, "alone": "slow"},
            },
        ),
        "replicating": read(
            "an answer with the fields of peer replicas",
            heard | {"answer": {"replicating": 900, "replicated": [700, 800], "alone": "slow"}},
        ),
        "peer-replicas-copying": read(
            "a PeerReplicas while a step is copied",
            {
                "type": "peer-replicas",
                "re": 0,
                "attempt": 2,
                "replicating": 1000,
                "replicated": [900],
            },
        ),
        "deliver-copies": read(
            "a Deliver for copies",
            {"type": "deliver", "id": 15, "copies": True},
        ),
        "segments-remark": read(
            "Segments on the disk",
            {
                "type": "segments",
                "re": 4,
                "segments": [{"segment": SEGMENT, "slot": 0, "capacity": 4096, "generation": 1}],
                "remark": "the slots are on the disk",
            },
        ),
        "found": read(
            "Found with every field, and a candidate without a step",
            {
                "type": "found",
                "re": 9,
                "candidates": [
                    {"attempt": 1, "step": None, "tag": "best.a0001", "source": "stage"}
                ],
                "damaged": ["step-00000900.a0002"],
                "incomplete": ["step 1000: disk full"],
            },
        ),
        "recovered-past-damage": read(
            "ReportRecovery with every field",
            {
                "type": "recovered",
                "id": 11,
                "step": None,
                "attempt": 2,
                "tag": "best.a0002",
                "source": "storage",
                "seconds": 1.5,
                "bytes": 4096,
                "passed_over": ["gpt/step-00001000.a0002 in storage: chunk 0 is damaged"],
            },
        ),
        "holds-drained": read(
            "a Holds whose node is drained",
            {"type": "holds", "re": 0, "attempt": 2, "holding": {"held": [900], "drained": [900]}},
        ),
        "heard-drained": read(
            "an answer that has another node drained",
            heard | {"answer": {"common": [900], "drained": [900]}},
        ),
        "drained": read(
            "Drained with every field of what is owed",
            {
                "type": "drained",
                "re": 21,
                "saved": ["gpt/step-00001000.a0002"],
                "owed": [
                    {
                        "job": "bert",
                        "attempt": 1,
                        "step": None,
                        "tag": "best.a0001",
                        "state": "uploading",
                        "reason": "the network is down",
                        "done": 1048576,
                        "total": 2097152,
                    }
                ],
                "more": 3,
            },
        ),
        "find-delivered": read(
            "Find with every field", {"type": "find", "id": 9, "step": 1000, "delivered": 1}
        ),
        "fetch-unchecked": read(
            "Fetch with every field",
            {"type": "fetch", "id": 10, "attempt": 2, "step": 1000, "check": False},
        ),
        "defaults": read(
            "fields that have their default, and are there nevertheless",
            begin | {"attempt": 0, "run": "", "wait": None, "node": None, "foreign_memory": ""},
        ),
        "another-order": read("`type` comes last", {"step": 1000, "id": 9, "type": "find"}),
        "later-keys": read(
            "keys that no version knows, in a message and in a map inside it; a brief with a "
            "member more",
            {
                "type": "holds",
                "re": 0,
                "attempt": 2,
                "later": [1],
                "holding": {
                    "later": {},
                    "replicas": {900: [[bytes(8), bytes(4), "0", "w", "later"]]},
                },
            },
        ),
        "length-zero": refused("the length is 0", "frame-length", frame(b"")),
        "length-beyond": refused(
            "the length is 1,048,577", "frame-length", frame(status, (1 << 20) + 1)
        ),
        "garbage": payload("the payload is no msgpack", b"\xc1"),
        "payload-cut": payload("the map of the payload is cut short", status[:-1]),
        "behind": payload("a byte follows the map", status + b"\0"),
        "list": payload("the payload is a list", msgspec.msgpack.encode(["status", 2])),
        "without-type": fields("there is no `type`", {"id": 2}),
        "unknown-type": fields("a `type` that there is not", {"type": "restart", "id": 2}),
        "number-as-type": fields("`type` is a number", {"type": 2, "id": 2}),
        "without-id": fields("a request without `id`", {"type": "status"}),
        "negative-id": fields("`id` is negative", {"type": "status", "id": -1}),
        "id-beyond": fields("`id` is 2^62", {"type": "status", "id": 1 << 62}),
        "without-field": fields(
            "a Begin without `job`", {name: begin[name] for name in begin if name != "job"}
        ),
        "bool": fields("`rank` is true", begin | {"rank": True}),
        "float": fields("`rank` is 0.5", begin | {"rank": 0.5}),
        "null": fields("`run` is null", begin | {"run": None}),
        "rank-beyond": fields("`rank` is 2^24", begin | {"rank": 1 << 24}),
        "long-text": fields("`run` has 257 characters", begin | {"run": "r" * 257}),
        "node-without-ranks": fields("`node` has no rank", begin | {"node": node | {"ranks": []}}),
        "claim": fields("`claim` has 31 digits", begin | {"node": node | {"claim": CLAIM[1:]}}),
        "missing-twice": fields(
            "`missing` has two steps", heard | {"answer": {"missing": {1000: [1], 1001: [1]}}}
        ),
        "key-as-text": fields(
            "a step that is a key is a text", heard | {"answer": {"missing": {"step": [1]}}}
        ),
        "brief-short": fields(
            "a brief has two members",
            {
                "type": "holds",
                "re": 0,
                "attempt": 2,
                "holding": {"replicas": {900: [[bytes(8), bytes(4)]]}},
            },
        ),
    }
