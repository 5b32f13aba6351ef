"""What agent and daemon share: formats, protocol, names and the one seam to the operating system.

Imports neither torch, asyncio, `ckptd.agent` nor `ckptd.daemon`. FORMAT.md and PROTOCOL.md beside this file
are the law for everything that is written to memory, to storage or to the socket.
"""

__version__ = "0.1.0"
