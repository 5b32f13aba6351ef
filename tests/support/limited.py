"""Decodes documents in a process whose memory is limited, and returns the errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOM = 1 << 30
"""Number of bytes that a document may cost at most, beyond what the process had before.
20 MB of empty lists would cost 1.6 GB.
"""
SCALE = 16
"""Factor by which limits, documents and memory are made smaller, so that the same
refusals take seconds instead of minutes.
"""

_READER = """
import importlib, json, pathlib, resource, sys
from ckptd.shared.formats import bounds
module, function, room, scale = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
bounds.MAX_OBJECTS //= scale
decode = importlib.import_module(module)
for name in function.split("."):
    decode = getattr(decode, name)
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room // scale, used + room // scale))
said = {}
for path in sys.argv[5:]:
    try:
        decode(pathlib.Path(path).read_bytes())
        said[path] = ["nothing", ""]
    except BaseException as error:
        said[path] = [type(error).__name__, str(error)]
        del error
print(json.dumps(said))
"""


def outcomes(
    module: str, function: str, documents: dict[str, bytes], place: Path, scale: int = SCALE
) -> dict[str, tuple[str, str]]:
    """Decode each document with `module.function`, all in one process of limited
    memory. Return the class and message of each error.

    `scale` divides the memory and the limit of objects.
    """
    paths = {}
    for number, (name, data) in enumerate(documents.items()):
        paths[str(place / str(number))] = name
        (place / str(number)).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", _READER, module, function, str(ROOM), str(scale), *paths],
        capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {
        paths[path]: (kind, sentence) for path, (kind, sentence) in json.loads(done.stdout).items()
    }
