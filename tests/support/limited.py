"""What a reader makes of documents, in a process that may have only so much memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOM = 1 << 30
"""Bytes that a document may cost at most, beside what the process had before; 20 MB of empty lists would cost 1.6 GB."""

_READER = """
import importlib, json, pathlib, resource, sys
module, function, room = sys.argv[1], sys.argv[2], int(sys.argv[3])
decode = importlib.import_module(module)
for name in function.split("."):
    decode = getattr(decode, name)
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
said = {}
for path in sys.argv[4:]:
    try:
        decode(pathlib.Path(path).read_bytes())
        said[path] = ["nothing", ""]
    except BaseException as error:
        said[path] = [type(error).__name__, str(error)]
        del error
print(json.dumps(said))
"""


def outcomes(module: str, function: str, documents: dict[str, bytes], place: Path) -> dict[str, tuple[str, str]]:
    """Decode each document by `module.function`, all in one process of limited memory; return the error's class and sentence for each."""
    paths = {}
    for number, (name, data) in enumerate(documents.items()):
        paths[str(place / str(number))] = name
        (place / str(number)).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", _READER, module, function, str(ROOM), *paths], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {paths[path]: (kind, sentence) for path, (kind, sentence) in json.loads(done.stdout).items()}
