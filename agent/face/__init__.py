"""The package `ckptd`: the public names, each imported when it is first used.

ckptd saves the state of a PyTorch training job without stopping it. `import ckptd` is
fast, and works without torch. The retention policies and the errors need no torch
either; all other names do.

import ckptd

recovered = ckptd.recover({"model": model, "optim": optimizer})
for step in range(recovered.step + 1 if recovered else 0, steps):
    ...
    pending = ckptd.snapshot({"model": model, "optim": optimizer}, step=step)
ckptd.close()
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
"""True to type checkers, which know the name. To import it from `typing` would take longer
than all else here.
"""

if __name__ != "ckptd":
    raise ImportError(f"import ckptd instead of {__name__}")

if TYPE_CHECKING:
    from typing import Any

    from ckptd.agent import (
        Agent,
        Batches,
        Checkpoint,
        LoadedInto,
        Newest,
        Pending,
        Recovered,
        Schedule,
        StorageReader,
        StorageWriter,
        Training,
        Version,
        VersionFeed,
        close,
        follow,
        newest,
        outlive_sigterm,
        per_rank,
        prepare,
        recover,
        snapshot,
        training,
    )
    from ckptd.shared import __version__
    from ckptd.shared.errors import (
        AlreadyExists,
        Busy,
        CallerError,
        CkptdError,
        DaemonUnreachable,
        Fenced,
        Forbidden,
        ForeignMemory,
        IntegrityError,
        InternalError,
        InvalidConfig,
        InvalidName,
        InvalidRequest,
        JobRunning,
        MachineError,
        NewerFormat,
        NotFound,
        PeerLost,
        ProtocolError,
        QuotaExceeded,
        RecoveryFailed,
        ServiceError,
        SharedMemoryFull,
        SnapshotFailed,
        StorageError,
        StructureChanged,
        StructureMismatch,
        UnsavableValue,
        UnsupportedTorch,
        VersionGone,
        VersionMismatch,
    )
    from ckptd.shared.retention import (
        BestN,
        CustomSteps,
        Daily,
        EveryNSeconds,
        EveryNSteps,
        Finite,
        LatestDuration,
        LatestN,
        MaxAge,
        MaxBytes,
        PreserveAll,
        Weekly,
    )

__all__ = [
    "Agent",
    "AlreadyExists",
    "Batches",
    "BestN",
    "Busy",
    "CallerError",
    "Checkpoint",
    "CkptdError",
    "CustomSteps",
    "DaemonUnreachable",
    "Daily",
    "EveryNSeconds",
    "EveryNSteps",
    "Fenced",
    "Finite",
    "Forbidden",
    "ForeignMemory",
    "IntegrityError",
    "InternalError",
    "InvalidConfig",
    "InvalidName",
    "InvalidRequest",
    "JobRunning",
    "LatestDuration",
    "LatestN",
    "LoadedInto",
    "MachineError",
    "MaxAge",
    "MaxBytes",
    "NewerFormat",
    "Newest",
    "NotFound",
    "PeerLost",
    "Pending",
    "PreserveAll",
    "ProtocolError",
    "QuotaExceeded",
    "Recovered",
    "RecoveryFailed",
    "Schedule",
    "ServiceError",
    "SharedMemoryFull",
    "SnapshotFailed",
    "StorageError",
    "StorageReader",
    "StorageWriter",
    "StructureChanged",
    "StructureMismatch",
    "Training",
    "UnsavableValue",
    "UnsupportedTorch",
    "Version",
    "VersionFeed",
    "VersionGone",
    "VersionMismatch",
    "Weekly",
    "__version__",
    "close",
    "follow",
    "newest",
    "outlive_sigterm",
    "per_rank",
    "prepare",
    "recover",
    "snapshot",
    "training",
]

_MODULES = ("ckptd.shared.errors", "ckptd.shared.retention", "ckptd.shared", "ckptd.agent")
"""The modules that have the public names. The last one imports torch, and is searched
only for names that the others lack.
"""


if not TYPE_CHECKING:  # to a type checker, it would say that the module has every name

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used.

        Raises AttributeError for any other name, and UnsupportedTorch if the name needs
        torch and no usable torch is installed.
        """
        if name in __all__:
            for module in map(import_module, _MODULES):
                if hasattr(module, name):
                    return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
