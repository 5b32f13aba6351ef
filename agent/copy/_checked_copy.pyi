from typing import Any

def copy(
    targets: list[int],
    sources: list[int],
    lengths: list[int],
    ends: list[int],
    threads: int,
    crc: int,
) -> list[int]: ...
def digest_pieces(addresses: Any, width: int, factors: Any, digests: Any) -> None: ...
def choose_pieces(starts: Any, seeds: Any, room: Any, salt: int) -> None: ...
