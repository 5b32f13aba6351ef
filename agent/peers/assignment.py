"""Decides from which rank each rank reads the parts that are not in the memory of its
own node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

MOST_PEERS = 8
"""The most ranks that one rank reads from."""
MOST_READERS = 16
"""The most ranks that read from one rank, which runs a thread for each."""
MOST_PAIRS = 1024
"""The most pairs of ranks in a job that read from one another.

The process that serves the job's store has two more connections for each.
"""


def assign(
    serves: Sequence[Collection[int]], wants: Sequence[Iterable[tuple[int, int]]]
) -> list[dict[int, int]]:
    """Return, for each rank, the rank that it reads each part from, by part.

    Parts are named by the rank that saved them. Every rank gets the same result from
    the same arguments. A part is left out if no rank serves it, or if the limits on
    peers, readers and pairs are reached. The largest reads come first, and each goes to
    the rank from which the fewest bytes are read.

    serves: the parts that each rank can send. wants: the parts that each rank lacks,
    and how many bytes it reads of each.
    """
    servers = defaultdict[int, list[int]](list)  # by part
    for rank, parts in enumerate(serves):
        for part in parts:
            servers[part].append(rank)
    found: list[dict[int, int]] = [{} for _ in wants]
    peers: list[set[int]] = [set() for _ in wants]
    readers, load, pairs = defaultdict[int, int](int), defaultdict[int, int](int), 0
    reads = [
        (-nbytes, reader, part) for reader, wanted in enumerate(wants) for part, nbytes in wanted
    ]
    for less, reader, part in sorted(reads):
        own = peers[reader]
        full = len(own) >= MOST_PEERS or pairs >= MOST_PAIRS
        able = [
            server
            for server in servers[part]
            if server in own or (server != reader and not full and readers[server] < MOST_READERS)
        ]
        if able:
            server = found[reader][part] = min(able, key=lambda rank: (load[rank], rank))
            load[server] -= less
            if server not in own:
                own.add(server)
                readers[server] += 1
                pairs += 1
    return found
