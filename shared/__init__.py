"""Code that the agent and the daemon share: file formats, protocol, names and one
interface to the operating system.

This package imports none of torch, asyncio, `ckptd.agent` and `ckptd.daemon`. FORMAT.md
and PROTOCOL.md beside this file define everything that is written to memory, to storage
or to the socket. The code follows them.
"""

__version__ = "0.1.0"
