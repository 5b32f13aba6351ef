"""Joins a stage to its root: checks that the two belong together, and locks the root,
which may not answer when the daemon starts.

The document `.ckptd/stage.json` in the stage names its root (FORMAT.md, section 1). A
stage belongs to one root for ever, because its checkpoints would otherwise be uploaded
to another place than the one for which their attempts were claimed.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import msgspec

from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, InvalidConfig, StorageError
from ckptd.shared.location import Location
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.system.descriptor import Descriptor

log = logging.getLogger("ckptd.uploader")


class StageDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The object `.ckptd/stage.json`.

    `root`: the path or the URL of the root. `identity`: the identity of the root.
    """

    root: str
    identity: str


_decoder = msgspec.json.Decoder(StageDocument)


def stage_document(stage: Repository) -> StageDocument | None:
    """Return the document that says whose stage this is, or None if it is no stage.

    Raises IntegrityError if the document is damaged, StorageError.
    """
    try:
        data = stage.stage_document()
        if data is None:
            return None
        document = _decoder.decode(data)
        if names.is_identity(document.identity):
            return document
    except msgspec.DecodeError:
        pass
    except OSError as error:
        raise StorageError.of(f"read {stage.where(names.CONTROL, names.STAGE)}", error) from None
    raise IntegrityError(
        f"{stage.where(names.CONTROL, names.STAGE)} does not say whose stage this is; move the "
        f"directory away"
    )


def check_is_no_stage(repository: Repository) -> None:
    """Raise InvalidConfig if the root that a daemon is to serve is the stage of another
    root.
    """
    document = stage_document(repository)
    if document is not None:
        raise InvalidConfig(
            f"{repository.where()} is the stage of {document.root}: start the daemon with --root "
            f"{document.root}, and with this directory "
            "as --stage"
        )


def check_apart(stage: Path, root: Location) -> None:
    """Raise InvalidConfig if the stage lies in the root, or the root in the stage, also
    through links.
    """
    if isinstance(root, Path):
        one, other = Path(os.path.realpath(stage)), Path(os.path.realpath(root))
        if one in (other, *other.parents) or other in one.parents:
            raise InvalidConfig(
                f"the stage {stage} and the root {root} lie in each other: name two directories "
                f"that are apart"
            )


class StageRoot:
    """The root behind a stage.

    Making it joins the two, or checks that they belong together.

    The stage must be locked by this process. A root that does not answer is accepted if
    the stage has belonged to this place before: then `open` must succeed before the
    root is used.
    """

    def __init__(
        self, repository: Repository, place: Location, stage: Repository, calls: StorageCalls
    ) -> None:
        """Raises InvalidConfig if the stage belongs to another root or holds
        checkpoints of its own; Busy, IntegrityError, StorageError.
        """
        self.repository, self.place = repository, place
        self._opening = threading.Lock()
        self._lock: Descriptor | None = None
        document, called = stage_document(stage), str(place.resolve())
        self.identity = "" if document is None else document.identity
        joined = document is not None and document.root == called
        if document is None and any(stage.tags(job) for job in stage.jobs()):
            raise InvalidConfig(
                f"{stage.where()} is a root with checkpoints of its own: name an empty directory "
                f"as the stage"
            )
        try:
            calls.pool.submit(self.open).result(calls.seconds if joined else None)
        except (StorageError, OSError) as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # raised by `result`
                failure = StorageError(f"it has not answered for {calls.seconds:g} s")
            else:
                failure = (
                    error
                    if isinstance(error, StorageError)
                    else StorageError.of(f"use the root {place}", error)
                )
            if not joined:
                raise failure from None
            log.warning(
                "the root %s cannot be used now: %s; checkpoints are kept on the stage until it "
                "can be",
                place,
                failure,
            )
            return
        if not joined:
            try:
                stage.publish_stage(
                    msgspec.json.encode(StageDocument(root=called, identity=self.identity))
                )
            except OSError as error:
                self.close()
                raise StorageError.of(f"use {stage.where()} as the stage", error) from None

    def open(self) -> None:
        """Lock the root, unless that is done, and check its identity.

        Raises Busy, InvalidConfig, StorageError, OSError.
        """
        with self._opening:
            if self.identity:
                self.check()
            if self._lock is None:
                self._lock = self.repository.storage.serve(machine.host())
            self.identity = self.identity or self.repository.identity()

    def check(self) -> None:
        """Raise InvalidConfig if another root is at the place now, and StorageError if
        there is none, as under an empty mount point.
        """
        if not self.repository.storage.exists(f"{names.CONTROL}/{names.IDENTITY}"):
            raise StorageError(
                f"there is no root at {self.place}, where the root of the stage was: is it mounted?"
            )
        if (found := self.repository.identity()) != self.identity:
            raise InvalidConfig(
                f"the root at {self.place} has the identity {found}, and the stage belongs to "
                f"{self.identity}: name the root of the stage, "
                "or an empty directory as the stage"
            )

    @property
    def lock(self) -> Descriptor | None:
        """The lock of the root, or None until it is locked."""
        return self._lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
