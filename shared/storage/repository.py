"""Keeps the checkpoints of all jobs below one root, on any storage (FORMAT.md, section
1).

The layout of jobs, tags, parts, manifests, pins and claims is known here, and nowhere
else. Names of jobs and tags are checked by `names.py` before they come here. Calls
raise OSError; the callers translate it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, NotFound, StorageError, damage_in
from ckptd.shared.formats.manifest import MAX_MANIFEST, Manifest, unknown_deleter_features
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.receipt import (
    DELETED,
    HEAD,
    MAX_RECEIPT,
    Abandonment,
    Receipt,
    encode,
    is_abandonment,
)
from ckptd.shared.formats.reuse import Linker, StoredFile
from ckptd.shared.system import machine
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.storage_seam import Creator, Source, Storage, read_whole

_MOST_OF_A_HINT = 300
"""The most bytes that are read of the object `newest`, and of the identity."""
_MOST_OF_A_STAGE = 8192
_IDENTITY = f"{names.CONTROL}/{names.IDENTITY}"


class Repository:
    """The checkpoints of one root."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        # Claims that are made, and whose surroundings are not looked at yet.
        self._claimed: set[tuple[str, int]] = set()

    def where(self, *parts: str) -> str:
        """Return the location of a job, a tag or a file, given by its parts, as text
        for messages.
        """
        return self.storage.where(self._name(*parts))

    def _name(self, *parts: str) -> str:
        return "/".join(parts)

    def identity(self) -> str:
        """Return the identity of the root, 32 hexadecimal digits.

        A root that has none gets one.

        Raises IntegrityError if the identity is damaged.
        """
        if not self.storage.exists(_IDENTITY):
            self._publish_identity(names.new_nonce().hex())
        return self._read_identity(_IDENTITY)

    def restore_identity(self, identity: str) -> str | None:
        """Write the identity of the root again if its file has vanished, and the lock of
        this process shows that the root is still the one that it serves.

        Return the identity that the root then has, or None if it has none. Raises
        IntegrityError, OSError.
        """
        if self.known_identity() is None and self.storage.is_lost() is False:
            self._publish_identity(identity)
        return self.known_identity()

    def _publish_identity(self, identity: str) -> None:
        with suppress(FileExistsError):  # the daemon of another host was faster
            self.storage.publish(
                _IDENTITY, f"{identity}\n".encode(), replace=False, by=machine.host()
            )

    def known_identity(self) -> str | None:
        """Return the identity of the root, or None if there is none. Changes nothing.

        Raises IntegrityError, OSError.
        """
        try:
            return self._read_identity(_IDENTITY)
        except FileNotFoundError:
            return None

    def _read_identity(self, name: str) -> str:
        text = (
            read_whole(self.storage.open(name), _MOST_OF_A_HINT, name)
            .decode("ascii", "replace")
            .removesuffix("\n")
        )
        if not names.is_identity(text):
            raise IntegrityError(
                f"{self.where(name)} does not hold the identity of the root: 32 hexadecimal "
                f"digits; delete it"
            )
        return text

    def stage_document(self) -> bytes | None:
        """Return the document that says whose stage this root is, or None if it is not
        a stage. Raises OSError (EFBIG).
        """
        name = f"{names.CONTROL}/{names.STAGE}"
        try:
            return read_whole(self.storage.open(name), _MOST_OF_A_STAGE, name)
        except FileNotFoundError:
            return None

    def publish_stage(self, document: bytes) -> None:
        """Make this root the stage of another root."""
        self.storage.publish(f"{names.CONTROL}/{names.STAGE}", document, replace=True)

    # -- listing

    def jobs(self) -> list[str]:
        """Return the names of all jobs that have a directory."""
        return [
            name for name, nested in self.storage.children("") if nested and names.is_name(name)
        ]

    def tags(self, job: str) -> list[str]:
        """Return the tag directories of a job, committed or not.

        Raises OSError if the root cannot be listed.
        """
        return [
            entry.name
            for entry in self.storage.children(self._name(job))
            if names.parse_tag_directory(entry.name)
        ]

    def files(self, job: str, tag: str) -> list[str]:
        """Return the names of all files in a tag's directory; none if there is no such
        directory.
        """
        try:
            return [entry.name for entry in self.storage.children(self._name(job, tag))]
        except NotADirectoryError:
            return []

    # -- manifests

    def read_manifest(self, job: str, tag: str) -> Manifest:
        """Return the manifest.

        Raises NotFound if nothing is committed, IntegrityError if it is damaged or of
        another checkpoint.
        """
        return self.read_manifest_document(job, tag)[0]

    def read_manifest_document(self, job: str, tag: str) -> tuple[Manifest, bytes]:
        """Return the manifest and the bytes that it was decoded from.

        Raises as `read_manifest`.
        """
        manifest, document = self._read_manifest(
            job, tag, f"no checkpoint {job}/{tag} in {self.where()}", f"{job}/{tag}"
        )
        check_manifest_place(manifest, job, tag)
        return manifest, document

    def _read_manifest(
        self, job: str, tag: str, missing: str, called: str
    ) -> tuple[Manifest, bytes]:
        name = self._name(job, tag, names.MANIFEST)
        try:
            document = read_whole(self.storage.open(name), MAX_MANIFEST, name)
            if is_abandonment(document):
                raise FileNotFoundError
            return Manifest.decode(document), document
        except FileNotFoundError:
            raise NotFound(missing) from None
        except IntegrityError as error:
            raise type(error)(f"{called}: {error}") from None

    def unknown_deleter_features(self, job: str, tag: str) -> list[str]:
        """Return the features of a manifest, of whatever version, without which this
        version must delete nothing in the job.
        """
        name = self._name(job, tag, names.MANIFEST)
        return unknown_deleter_features(read_whole(self.storage.open(name), MAX_MANIFEST, name))

    def has_manifest(self, job: str, tag: str) -> bool:
        """Return True if there is a manifest, intact or damaged."""
        return self.storage.exists(self._name(job, tag, names.MANIFEST))

    def is_committed(self, job: str, tag: str) -> bool:
        """Return True if there is a checkpoint, intact or damaged.

        An abandonment under the name of the manifest is none.
        """
        try:
            source = self.storage.open(self._name(job, tag, names.MANIFEST))
        except FileNotFoundError:
            return False
        except IntegrityError:
            return True
        try:
            return not is_abandonment(bytes(source.view(0, HEAD)))
        finally:
            source.close()

    def publish_manifest(
        self,
        job: str,
        tag: str,
        data: bytes,
        *,
        objects: Mapping[str, bytes] = MappingProxyType({}),
        by: str = "",
    ) -> None:
        """Commit: publish the manifest.

        Raises FileExistsError if the tag has one already.

        objects: what `Manifest.split` returns beside the manifest. They are published
        first. by: 32 hexadecimal digits of the caller, needed if other daemons may
        publish a manifest or an abandonment of this tag.
        """
        # The name is the digest, so that one which is there is the same, or damaged.
        for file, stored in objects.items():
            self.storage.publish(
                self._name(job, tag, file), stored, replace=True, by=names.new_nonce().hex()
            )
        self.storage.publish(
            self._name(job, tag, names.MANIFEST), data, replace=False, by=by, points="commit"
        )

    # -- tries of several nodes

    def outcome(self, job: str, tag: str) -> Manifest | Abandonment | None:
        """Return the manifest or the abandonment of a try, or None if it is undecided.

        Raises IntegrityError if it is damaged.
        """
        name = self._name(job, tag, names.MANIFEST)
        try:
            document = read_whole(self.storage.open(name), MAX_MANIFEST, name)
        except FileNotFoundError:
            return None
        with damage_in(f"{job}/{tag}"):
            if is_abandonment(document):
                return Abandonment.decode(document)
            manifest = Manifest.decode(document)
        check_manifest_place(manifest, job, tag)
        return manifest

    def receipts(self, job: str, tag: str, known: Iterable[Receipt] = ()) -> list[Receipt]:
        """Return the receipts of a try, by the lowest rank of each node.

        Those that are `known` are not read again.

        Raises IntegrityError if one of them is damaged or belongs to another try.
        """
        found = sorted(
            file for file in self.files(job, tag) if names.parse_receipt_file(file) is not None
        )
        have = {names.receipt_file(receipt.node.ranks[0]): receipt for receipt in known}
        return [
            receipt
            for file in found
            if (receipt := have.get(file) or self.receipt(job, tag, file)) is not None
        ]

    def receipt(self, job: str, tag: str, file: str) -> Receipt | None:
        """Return one receipt, or None if it does not exist.

        Raises IntegrityError as `receipts` does.
        """
        name = self._name(job, tag, file)
        try:
            receipt = Receipt.decode(read_whole(self.storage.open(name), MAX_RECEIPT, name))
        except FileNotFoundError:
            return None
        except IntegrityError as error:
            raise type(error)(f"{name}: {error}") from None
        if (receipt.job, receipt.tag, names.receipt_file(receipt.node.ranks[0])) != (
            job,
            tag,
            file,
        ):
            raise IntegrityError(
                f"{name}: the receipt there is that of {receipt.who} for "
                f"{receipt.job}/{receipt.tag}"
            )
        return receipt

    def refresh_listing(self, job: str, tag: str | None = None) -> None:
        """Make sure that the next listing of a checkpoint's files, or of a job's
        checkpoints, is up to date. The directory then exists.
        """
        if tag is None:
            self.storage.refresh_listing(self._name(job), names.NEWEST)
        else:
            self.storage.refresh_listing(self._name(job, tag), names.MANIFEST)

    def publish_receipt(self, receipt: Receipt) -> None:
        """Publish a receipt.

        Raises FileExistsError if the node has one in this try already.
        """
        name, data = (
            self._name(receipt.job, receipt.tag, names.receipt_file(receipt.node.ranks[0])),
            encode(receipt),
        )
        publish = partial(self.storage.publish, name, data, replace=False, by=receipt.node.run_id)
        try:
            publish(points="receipt")
        except FileNotFoundError:  # no node has written a part yet
            self.refresh_listing(receipt.job, receipt.tag)
            publish()

    def delete_receipts(self, job: str, tag: str) -> bool:
        """Delete the receipts of a checkpoint.

        Return True if there were any. Without them no daemon can commit it again.
        """
        found = [
            file for file in self.files(job, tag) if names.parse_receipt_file(file) is not None
        ]
        if found:
            self.storage.delete(self._name(job, tag), found)
        return bool(found)

    def bury(self, job: str, tag: str, attempt: int, step: int) -> None:
        """Replace a manifest by an abandonment, so that no daemon can publish the
        manifest again.

        The abandonment is deleted like that of any other try.
        """
        found = Abandonment(
            job=job,
            attempt=attempt,
            step=step,
            tag=tag,
            code=DELETED,
            reason="the checkpoint was deleted",
        )
        self.storage.publish(
            self._name(job, tag, names.MANIFEST),
            encode(found),
            replace=True,
            by=names.new_nonce().hex(),
        )

    def sweep_tag(self, job: str, tag: str, keep: Collection[str] = ()) -> None:
        """Delete all files that ckptd has made in the directory of a checkpoint, except
        those in `keep`, and then the directory.
        """
        files = [
            file
            for file in self.files(job, tag)
            if names.is_checkpoint_file(file) and file not in keep
        ]
        self.storage.delete(self._name(job, tag), files)
        self.storage.remove(self._name(job, tag))

    # -- parts

    def open_part(
        self, job: str, tag: str, file: str, index_sha256: str | None = None
    ) -> PartReader:
        """Open a part.

        The caller closes the reader. Raises IntegrityError if the part is missing or
        damaged.
        """
        called = self._called(job, tag, file)
        try:
            source = self._open_part_file(job, tag, file)
        except FileNotFoundError:
            raise IntegrityError(f"{called} is missing") from None
        try:
            return PartReader(
                source,
                called,
                index_sha256,
                lambda beside: self.storage.open(self._name(job, tag, beside)),
            )
        except BaseException:
            source.close()
            raise

    def _called(self, job: str, tag: str, file: str) -> str:
        """Return the name of a file of a checkpoint in messages."""
        return f"{job}/{tag}/{file}"

    def _open_part_file(self, job: str, tag: str, file: str) -> Source:
        return self.open_file(job, tag, file)

    def open_file(self, job: str, tag: str, file: str) -> Source:
        """Open a file of a checkpoint. Raises FileNotFoundError, IntegrityError."""
        return self.storage.open(self._name(job, tag, file))

    def part_files(self, job: str, tag: str) -> Creator:
        """Return the way in which `PartWriter` creates the files of a part."""
        return Creator(
            lambda file, size, head: self.storage.create(self._name(job, tag, file), size, head),
            self.storage.head_last,
        )

    def linker(self, job: str, tag: str) -> Linker:
        """Return the place in which `PartWriter` links files of older checkpoints of
        the job.
        """
        return _Linker(self.storage, job, tag)

    # -- the hint

    def read_newest(self, job: str) -> str | None:
        """Return the tag directory that the hint `newest` names, unverified, or None if
        there is no such hint.
        """
        name = self._name(job, names.NEWEST)
        try:
            text = (
                read_whole(self.storage.open(name), _MOST_OF_A_HINT, name)
                .decode("ascii", "replace")
                .removesuffix("\n")
            )
        except (OSError, IntegrityError):
            return None
        return text if names.parse_tag_directory(text) else None

    def publish_newest(self, job: str, tag: str) -> None:
        self.storage.publish(self._name(job, names.NEWEST), f"{tag}\n".encode(), replace=True)

    def remove_newest(self, job: str) -> None:
        """Remove the hint `newest` of a job that has no checkpoint any more."""
        self.storage.delete(self._name(job), [names.NEWEST])

    # -- leases and pins

    def lease(self, job: str, tag: str) -> Source:
        """Keep a checkpoint from being deleted until the result, which is its manifest,
        is closed.

        Raises NotFound if there is no checkpoint, IntegrityError if the manifest is not
        a regular file, Busy if a deleter holds it.
        """
        try:
            return self.storage.lease(
                self._name(job, tag, names.MANIFEST), f"checkpoint {job}/{tag} in {self.where()}"
            )
        except FileNotFoundError:
            raise NotFound(f"no checkpoint {job}/{tag} in {self.where()}") from None

    def exclude(self, job: str, tag: str) -> AbstractContextManager[None]:
        """Context manager for a deletion.

        While it is held, no reader can open the checkpoint.

        Raises Busy if another process reads or deletes the checkpoint, or if this user
        may not delete it.
        """
        return self.storage.exclude(self._name(job, tag, names.MANIFEST), f"checkpoint {job}/{tag}")

    def readers(self, job: str, tag: str) -> str:
        """Return the processes that keep the checkpoint from being deleted, as text, or
        "" if none does. Raises Busy as `exclude` does.
        """
        return self.storage.holders(self._name(job, tag, names.MANIFEST), f"checkpoint {job}/{tag}")

    def pins(self, job: str) -> set[str]:
        """Return the tag directories that are pinned."""
        return {
            name
            for entry in self.storage.children(names.pins(job))
            if names.parse_tag_directory(name := names.claimed(entry.name))
        }

    def pin(self, job: str, tag: str) -> None:
        """Pin a checkpoint. The caller holds a lease on it."""
        self.storage.claim(f"{names.pins(job)}/{tag}")  # False: it is pinned already

    def unpin(self, job: str, tag: str) -> bool:
        """Remove the pin of a checkpoint. Return False if it had none."""
        prefix = names.pins(job)
        found = [
            entry.name
            for entry in self.storage.children(prefix)
            if names.claimed(entry.name) == tag
        ]
        # The name itself as well, which a listing of a store may still leave out.
        self.storage.delete(prefix, [tag, *found])
        return bool(found)

    # -- attempts

    def newest_attempt(self, job: str) -> int:
        """Return the highest attempt among the job's claims and tag directories, or 0
        if there is none.
        """
        claimed = [
            n
            for entry in self.storage.children(names.attempts(job))
            if (n := names.parse_attempt_file(entry.name)) is not None
        ]
        tagged = [p.attempt for tag in self.tags(job) if (p := names.parse_tag_directory(tag))]
        return max([0, *claimed, *tagged])

    def claim(self, job: str, attempt: int) -> bool:
        """Claim an attempt, and delete older claims.

        Return False if another daemon has claimed it.

        After an OSError the caller may repeat the call. Raises StorageError if the job
        cannot be used.
        """
        if reason := self.refusal(job):
            raise StorageError(reason)
        prefix = names.attempts(job)
        failpoint("attempt.claiming")
        if (job, attempt) not in self._claimed and not self.storage.claim(
            f"{prefix}/{names.attempt_file(attempt)}"
        ):
            return False
        self._claimed.add((job, attempt))
        failpoint("attempt.claimed")
        numbers = {
            entry.name: names.parse_attempt_file(entry.name)
            for entry in self.storage.children(prefix)
        }
        if any(number is not None and number > attempt + 1 for number in numbers.values()):
            self._claimed.discard((job, attempt))
            # Its owner may have deleted a claim that would have been in the way of this
            # one.
            return False
        if older := [
            name for name, number in numbers.items() if number is not None and number < attempt - 1
        ]:
            self.storage.delete(prefix, older)
        self._claimed.discard((job, attempt))
        return True

    def claim_again(self, job: str, attempt: int) -> bool:
        """Try to make a claim that another node has made.

        Return False if that fails, as it should, or if newer attempts have begun.

        Claims of old attempts are deleted.
        """
        return self.newest_attempt(job) <= attempt and self.storage.claim(
            f"{names.attempts(job)}/{names.attempt_file(attempt)}"
        )

    def refusal(self, job: str) -> str:
        """Return the reason why a job cannot be used, because another user could
        replace its checkpoints, or "" if it can.
        """
        return self.storage.refusal(self._name(job))

    # -- deletion

    def delete_files(self, job: str, tag: str, files: list[str]) -> None:
        """Delete those of the files that exist, and the data files of parts among them.

        Other files stay.
        """
        self.storage.delete(self._name(job, tag), self._with_data_files(job, tag, files))

    def delete_unfinished(self, job: str, tag: str, files: list[str]) -> None:
        """Delete these files of a save, as `delete_files` does, and a manifest that was
        not published completely.

        Afterwards a manifest that is visible is also durable: the daemon that published
        it may have died before it was.
        """
        self.storage.delete(
            self._name(job, tag), self._with_data_files(job, tag, files), unpublished=names.MANIFEST
        )

    def _with_data_files(self, job: str, tag: str, files: list[str]) -> list[str]:
        parts = {file for file in files if names.parse_part_file(file)}
        return [
            *files,
            *(
                file
                for file in (self.files(job, tag) if parts else [])
                if names.part_of(file) in parts
            ),
        ]

    def delete_tag(self, job: str, tag: str) -> bool:
        """Remove the directory of a tag, which has no manifest and no parts any more.

        Return False if a file in it is not ckptd's.

        A metadata object that a commit left there before it could publish the manifest
        is deleted.
        """
        if left := [
            file
            for file in self.files(job, tag)
            if names.is_metadata_file(names.claimed(file.removesuffix(names.TMP_SUFFIX)))
        ]:
            self.storage.delete(self._name(job, tag), left)
        return self.storage.remove(self._name(job, tag))


@dataclass(frozen=True, slots=True)
class _Linker:
    storage: Storage
    job: str
    tag: str

    def link(self, older: StoredFile, name: str) -> bool:
        return self.storage.link(
            f"{self.job}/{older.tag}/{older.name}", f"{self.job}/{self.tag}/{name}", older.size
        )

    def remove(self, name: str) -> None:
        with suppress(OSError):
            self.storage.delete(f"{self.job}/{self.tag}", [name])


def check_manifest_place(manifest: Manifest, job: str, tag: str) -> None:
    """Raise IntegrityError if the manifest lies in the directory of another checkpoint."""
    parsed = names.parse_tag_directory(tag)
    if (
        parsed is None
        or (manifest.tag, manifest.attempt) != (tag, parsed.attempt)
        or (not parsed.by_user and manifest.step != parsed.step)
    ):
        raise IntegrityError(
            f"{job}/{tag}: the manifest there is that of {manifest.job}/{manifest.tag}"
        )
