"""Calls one bucket of an object store through obstore, and turns its errors into
OSError without any secret in them.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import obstore
from obstore import store as stores
from obstore.store import ObjectStore

from ckptd.shared.errors import InvalidConfig, RemoteError, RemoteRefusal
from ckptd.shared.location import Url

if TYPE_CHECKING:
    from obstore.store import ClientConfig

T = TypeVar("T")
# The process that has made the first request: its threads do not live in forked
# children.
_used_by: dict[str, int] = {}

_BACKOFF = {
    "init_backoff": timedelta(milliseconds=200),
    "max_backoff": timedelta(seconds=5),
    "base": 2,
}
RETRIES: dict[str, Any] = {
    "max_retries": 100,
    "retry_timeout": timedelta(seconds=30),
    "backoff": _BACKOFF,
}
"""The rule by which obstore repeats a request after a server error, a lost connection
or a request to slow down. obstore adds jitter.
"""
BULK_RETRIES: dict[str, Any] = RETRIES | {"retry_timeout": timedelta(minutes=10)}
"""The same for requests that move chunks: a save or a recovery is worth waiting for."""
CLIENT: ClientConfig = {"timeout": timedelta(seconds=60), "connect_timeout": timedelta(seconds=5)}
BULK_CLIENT: ClientConfig = {**CLIENT, "timeout": timedelta(minutes=5)}
"""The time for a whole request. All parts that are under way share the line: 128 MiB in
5 minutes take 0.45 MB/s.
"""
_STATUS = re.compile(r"status code: (\d{3}) ([A-Za-z ]+)")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>|\"code\":\s*\"(\w{1,64})\"")
_NO_ROOM = {"QuotaExceeded", "InsufficientStorage", "StorageFull"}
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""The variables that name the credentials for each kind of store, as every SDK knows
them.
"""
_NO_SUCH_BUCKET = {"NoSuchBucket", "ContainerNotFound"}


class ObjectMeta(NamedTuple):
    """An object as a listing shows it.

    `version` changes whenever the object is written.
    """

    name: str
    size: int
    version: str


class Bucket:
    """The objects below one prefix of a bucket.

    Every call blocks, and any thread may make it.

    Calls raise OSError: FileNotFoundError, FileExistsError and PermissionError as
    usual, and others with a text of their own.
    """

    def __init__(self, store: ObjectStore, url: str, bulk: ObjectStore | None = None) -> None:
        """bulk: the same objects, with more patience for large requests.

        Default: `store`.
        """
        self._store = store
        self._url = url
        self._bulk = bulk or store
        # False once the store has answered a request for a range in a way that obstore
        # does not accept
        self.ranges = True

    def where(self, name: str = "") -> str:
        return f"{self._url}/{name}" if name else self._url

    def put(self, name: str, data: bytes, *, create: bool) -> None:
        """Write a small object with one request.

        With `create`, raise FileExistsError if the store has such an object.
        """
        self._call(
            name,
            lambda: obstore.put(
                self._store,
                name,
                data,
                mode="create" if create else "overwrite",
                use_multipart=False,
            ),
        )

    def upload(self, name: str, pieces: Iterable[bytes], part_size: int, at_once: int) -> None:
        """Write an object of any size, `at_once` parts of `part_size` bytes at a time.

        If `pieces` raises, nothing is written.
        """
        self._call(
            name,
            lambda: obstore.put(
                self._bulk, name, iter(pieces), chunk_size=part_size, max_concurrency=at_once
            ),
        )

    def open(self, name: str, most: int) -> tuple[ObjectMeta, bytes]:
        """Return size and version of an object, and its first bytes: at most `most`, or
        none if the store gives no part of an object.
        """

        def whole() -> tuple[ObjectMeta, bytes]:
            result = obstore.get(self._store, name)
            found = _found(result.meta)
            return found, bytes(result.bytes()) if found.size <= most else b""

        def first() -> tuple[ObjectMeta, bytes]:
            result = obstore.get(self._store, name, options={"range": (0, most)})
            return _found(result.meta), bytes(result.bytes())

        if self.ranges:
            try:
                return self._call(name, first)
            except NoRanges:
                self.ranges = False
            except NoSuchRange:
                return self.head(name), b""  # the object is empty
        return self._call(name, whole)

    def get(self, name: str, limit: int) -> bytes:
        """Return the content of an object.

        Raises OSError (EFBIG) if it is larger than `limit` bytes.
        """

        def get() -> bytes:
            result = obstore.get(self._store, name)
            if result.meta["size"] > limit:
                raise OSError(errno.EFBIG, f"larger than {limit} bytes", name)
            return bytes(result.bytes())

        return self._call(name, get)

    def read(self, name: str, offset: int, length: int) -> memoryview:
        """Return a range of an object, which must have it.

        Raises OSError (EIO) if the answer has another length.
        """
        if self.ranges:
            try:
                data = self._call(
                    name,
                    lambda: memoryview(
                        obstore.get_range(self._bulk, name, start=offset, length=length)
                    ),
                )
            except NoRanges:
                self.ranges = False
            else:
                if len(data) != length:
                    raise RemoteError(
                        errno.EIO,
                        f"the store answered with {len(data)} bytes instead of {length}",
                        name,
                    )
                return data
        return self._call(name, lambda: self._skip_and_read(name, offset, length))

    def _skip_and_read(self, name: str, offset: int, length: int) -> memoryview:
        """Read the object from its beginning, for a store without usable ranges."""
        buffer, position, filled = memoryview(bytearray(length)), 0, 0
        for piece in obstore.get(self._bulk, name):
            with memoryview(piece) as data:
                wanted = data[max(0, offset - position) : max(0, offset + len(buffer) - position)]
                buffer[filled : filled + len(wanted)] = wanted
                filled += len(wanted)
                position += len(data)
            if filled == len(buffer):
                return buffer
        raise RemoteError(
            errno.EIO, f"the store answered with {filled} bytes instead of {len(buffer)}", name
        )

    def head(self, name: str) -> ObjectMeta:
        """Return size and version of an object. Raises FileNotFoundError."""
        return _found(self._call(name, lambda: obstore.head(self._store, name)))

    def children(self, prefix: str) -> tuple[list[str], list[ObjectMeta]]:
        """Return the prefixes directly below a prefix, and the objects directly below
        it.
        """
        listed = self._call(
            prefix, lambda: obstore.list_with_delimiter(self._store, prefix or None)
        )
        objects = [_found(entry) for entry in listed["objects"]]
        # SeaweedFS lists an empty prefix itself
        return [*listed["common_prefixes"]], [found for found in objects if found.name != prefix]

    def below(self, prefix: str) -> list[str]:
        """Return the names of all objects below a prefix, at any depth."""
        pages = self._call(prefix, lambda: list(obstore.list(self._store, prefix)))
        return [entry["path"] for page in pages for entry in page if entry["path"] != prefix]

    def delete(self, names: list[str]) -> None:
        """Delete those of the objects that exist."""
        if not names:
            return
        try:
            self._call(names[0], lambda: obstore.delete(self._store, names))
        except (
            FileNotFoundError
        ):  # some stores report a missing object, and then the others may be left
            for name in names:
                try:
                    self._call(name, functools.partial(obstore.delete, self._store, [name]))
                except FileNotFoundError:
                    pass

    def copy(self, name: str, new: str) -> None:
        """Have the store copy an object, without its bytes passing through here."""
        self._call(name, lambda: obstore.copy(self._bulk, name, new))

    def _call(self, name: str, call: Callable[[], T]) -> T:
        if _used_by.setdefault("pid", os.getpid()) != os.getpid():
            raise RemoteError(
                errno.EIO,
                "obstore cannot be used in a forked process: use the start method spawn or "
                "forkserver",
                name,
            )
        try:
            return call()
        except Exception as error:
            # Obstore raises this one of Python's own.
            builtin = isinstance(error, FileNotFoundError) and error.errno is None
            if not builtin and type(error).__module__.partition(".")[0] != "obstore":
                raise
            raise translated(error, self.where(name), self._url) from None
        except BaseException as error:
            if type(error).__module__ != "pyo3_runtime":  # a panic of obstore
                raise
            raise RemoteError(
                errno.EIO, f"obstore has failed: {str(error).splitlines()[0].split('?')[0]}", name
            ) from None


class NoRanges(RemoteError):
    """The store has answered a request for a range with something else."""


class NoSuchRange(RemoteError):
    """The object is too short for the range that was asked for."""


def translated(error: Exception, name: str, bucket: str) -> OSError:
    """Return the OSError for an error of obstore. `bucket` is the URL of the bucket.

    Only the status and the error code of the store's answer enter the text: the rest
    may hold a signed URL or a token.
    """
    text = str(error)
    kind = type(error).__name__
    status = _STATUS.search(text)
    code = _CODE.search(text)
    found = code[1] or code[2] if code else ""
    if found in _NO_SUCH_BUCKET:
        return RemoteError(
            errno.ENXIO,
            f"there is no bucket {bucket.split('/')[2]!r}, or it cannot be seen with these "
            f"credentials",
            name,
        )
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
    if isinstance(error, FileNotFoundError) or kind == "NotFoundError":
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    if "Received non-partial response" in text:
        return NoRanges(
            errno.EIO, "the store does not answer requests for ranges as it should", name
        )
    if "Invalid range" in text or (status and status[1] == "416"):
        return NoSuchRange(
            errno.EINVAL, "the object is shorter than the range that was asked for", name
        )
    variables = _VARIABLES.get(bucket.split(":")[0], "the environment")
    answer = (
        f"the store answered {status[1]} {status[2].strip()}" + (f" ({found})" if found else "")
        if status
        else ""
    )
    if "169.254.169.254" in text or "MissingCredentials" in text:
        return RemoteRefusal(
            errno.EACCES, f"no credentials for the store were found: set {variables}", name
        )
    if found in _NO_ROOM or (status and status[1] == "507"):
        return RemoteError(errno.ENOSPC, answer, name)
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or (
        status and status[1] in ("401", "403")
    ):
        refused = answer or "the store refused the request"
        return RemoteRefusal(
            errno.EACCES, f"{refused}: check the credentials in {variables}, and their rights", name
        )
    if kind == "NotSupportedError" or (status and status[1] == "501"):
        return RemoteError(
            errno.EOPNOTSUPP, answer or "the store does not support the request", name
        )
    if answer:
        return RemoteError(errno.EIO, answer, name)
    if "incorrectly configured region" in text:
        return RemoteError(
            errno.EIO,
            "the bucket is in another region: set AWS_REGION to the region of the bucket",
            name,
        )
    if "error sending request" in text or "timed out" in text:
        number = errno.ETIMEDOUT if "timed out" in text else errno.EHOSTUNREACH
        return RemoteError(
            number, "the store does not answer: check the network and the endpoint", name
        )
    return RemoteError(errno.EIO, f"the store or the connection to it failed ({kind})", name)


def _found(meta: Any) -> ObjectMeta:
    return ObjectMeta(
        meta["path"],
        meta["size"],
        f"{meta['e_tag']} {meta['last_modified'].timestamp()} {meta['version']}",
    )


def open_bucket(url: Url) -> Bucket:
    """Return the objects below a URL.

    Raises InvalidConfig if obstore does not take the settings in the environment.
    """
    place = url.scheme, url.bucket, url.key
    return Bucket(_connect(*place, bulk=False), str(url), _connect(*place, bulk=True))


@functools.lru_cache(maxsize=64)
def _connect(scheme: str, bucket: str, key: str, *, bulk: bool) -> ObjectStore:
    common: dict[str, Any] = {
        "prefix": key or None,
        "retry_config": BULK_RETRIES if bulk else RETRIES,
    }
    client = BULK_CLIENT if bulk else CLIENT
    try:
        if scheme == "s3":
            return _s3(bucket, client, common)
        if scheme == "gs":
            return stores.GCSStore(bucket, client_options=client, **common)
        return stores.AzureStore(bucket, client_options=client, **common)
    except InvalidConfig:
        raise
    except Exception as error:
        first = (
            str(error).splitlines()[0]
            if type(error).__module__.startswith("obstore")
            else type(error).__name__
        )
        raise InvalidConfig(
            f"{scheme}://{bucket} cannot be used with the settings in the environment: "
            f"{first.split('?')[0]}"
        ) from None


def _s3(bucket: str, client: ClientConfig, common: dict[str, Any]) -> ObjectStore:
    """Return a store of the S3 protocol, with the endpoint, the region and the
    credentials that the AWS tools would use.
    """
    environ = os.environ
    options, settings = client.copy(), dict[str, Any]()
    endpoint = (
        environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
        or environ.get("AWS_ENDPOINT")
    )
    if endpoint:
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidConfig(
                f"the endpoint in AWS_ENDPOINT_URL is {endpoint!r}; expected a URL that begins "
                f"with https:// or http://"
            )
        settings["endpoint"] = endpoint
        options["allow_http"] = endpoint.startswith("http://")
    settings["region"] = (
        environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    )
    if not environ.get("AWS_ACCESS_KEY_ID") and (provider := _profile()) is not None:
        settings["credential_provider"] = provider
    return stores.S3Store(bucket, client_options=options, **settings, **common)


def _profile() -> Any:
    """Return a provider of the credentials in ~/.aws, if there are any and boto3, which
    reads them, is installed.
    """
    shared = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser(
        "~/.aws/credentials"
    )
    if not (os.environ.get("AWS_PROFILE") or os.path.exists(shared)):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise InvalidConfig(
            f"the credentials in {shared} or AWS_PROFILE need the package boto3: install it, or "
            f"set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        ) from None
    return Boto3CredentialProvider()
