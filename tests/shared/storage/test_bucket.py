"""Tests the calls to a bucket: how the errors of a store are worded, and which settings
of the environment are used.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from obstore import exceptions
from obstore.store import MemoryStore, S3Store

from ckptd.shared.errors import InvalidConfig, RemoteError, RemoteRefusal, StorageError
from ckptd.shared.location import Url
from ckptd.shared.storage import bucket as buckets
from ckptd.shared.storage.bucket import Bucket, NoRanges, NoSuchRange, open_bucket, translated
from tests.support.cases import each_case

NAME, WHERE = "s3://data/ckpts/x", "s3://data/ckpts"
KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
ANSWER = (
    "Generic S3 error: Error performing PUT https://data.host/x?X-Amz-Signature=SECRET in 1s - "
    "Server returned non-2xx status code: {}"
)
BODY = "<Error><Code>{}</Code><Message>key SECRET</Message></Error>"


def made(kind: str, text: str) -> Exception:
    found: type[Exception] = getattr(exceptions, kind)
    return found(text)


@each_case(
    ("error", "cls", "number", "words"),
    [
        (made("AlreadyExistsError", "x"), FileExistsError, errno.EEXIST, "File exists"),
        (made("PreconditionError", "x"), FileExistsError, errno.EEXIST, "File exists"),
        (made("NotFoundError", "x"), FileNotFoundError, errno.ENOENT, "No such file or directory"),
        (FileNotFoundError("x"), FileNotFoundError, errno.ENOENT, "No such file or directory"),
        (made("NotFoundError", ANSWER.format("404 Not "
            "Found: ") + BODY.format("NoSuchBucket")), RemoteError, errno.ENXIO,
         "there is no bucket 'data', or it cannot be seen with these credentials"),
        (made("GenericError", ANSWER.format("403 "
            "Forbidden: ") + BODY.format("SignatureDoesNotMatch")), RemoteRefusal, errno.EACCES,
         f"the store answered 403 Forbidden (SignatureDoesNotMatch): check the credentials in "
         f"{KEYS}, and their rights"),
        (made("PermissionDeniedError", "SECRET"), RemoteRefusal, errno.EACCES,
         f"the store refused the request: check the credentials in {KEYS}, and their rights"),
        (made("GenericError", "Error performing PUT "
            "http://169.254.169.254/latest/api/token"), RemoteRefusal, errno.EACCES,
         f"no credentials for the store were found: set {KEYS}"),
        (made("GenericError", ANSWER.format("507 Insufficient "
            "Storage: ")), RemoteError, errno.ENOSPC,
         "the store answered 507 Insufficient Storage"),
        (made("GenericError", ANSWER.format("500 Internal Server "
            "Error: ") + BODY.format("InternalError")), RemoteError, errno.EIO,
         "the store answered 500 Internal Server Error (InternalError)"),
        (made("PermissionDeniedError", ANSWER.format("403 "
            "Forbidden: ") + BODY.format("QuotaExceeded")), RemoteError, errno.ENOSPC,
         "the store answered 403 Forbidden (QuotaExceeded)"),
        (made("NotSupportedError", "SECRET"), RemoteError, errno.EOPNOTSUPP, "the store does not "
            "support the request"),
        (made("GenericError", "Received non-partial response when range "
            "requested"), NoRanges, errno.EIO,
         "the store does not answer requests for ranges as it should"),
        (made("GenericError", ANSWER.format("416 Range Not "
            "Satisfiable: ") + BODY.format("InvalidRange")), NoSuchRange, errno.EINVAL,
         "the object is shorter than the range that was asked for"),
        (made("GenericError", "HTTP error: error sending request for url "
            "(http://h/?sig=SECRET)"), RemoteError, errno.EHOSTUNREACH,
         "the store does not answer: check the network and the endpoint"),
        (made("GenericError", "HTTP error: operation timed out "
            "SECRET"), RemoteError, errno.ETIMEDOUT,
         "the store does not answer: check the network and the endpoint"),
        (made("GenericError", "Received redirect without LOCATION, this normally indicates an "
            "incorrectly "
            "configured region"), RemoteError,
         errno.EIO, "the bucket is in another region: set AWS_REGION to the region of the bucket"),
        (made("GenericError", "something else with SECRET"), RemoteError, errno.EIO,
         "the store or the connection to it failed (GenericError)"),
    ],
)  # fmt: skip
def test_an_error_of_the_store_becomes_one_sentence_without_secrets(
    error: Exception, cls: type, number: int, words: str
) -> None:
    found = translated(error, NAME, WHERE)
    assert (type(found), found.errno, found.strerror, found.filename) == (cls, number, words, NAME)
    shown = str(StorageError.of("save it", found))
    assert shown.startswith(f"cannot save it: {words}")
    assert "SECRET" not in shown.replace("AWS_SECRET_ACCESS_KEY", "")


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [("gs", "GOOGLE_APPLICATION_CREDENTIALS"), ("az", "AZURE_STORAGE_ACCOUNT_KEY")],
)
def test_a_refusal_names_the_variables_of_its_store(scheme: str, variable: str) -> None:
    found = translated(made("PermissionDeniedError", "x"), NAME, f"{scheme}://data/runs")
    assert variable in str(found.strerror)


def test_errors_of_the_caller_stay_what_they_are() -> None:
    bucket = Bucket(MemoryStore(), "memory://x")

    def pieces() -> Any:
        yield b"one"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        bucket.upload("object", pieces(), 8 << 20, 2)
    with pytest.raises(FileNotFoundError):
        bucket.head("object")


def test_an_object_of_another_size_than_expected_is_refused() -> None:
    bucket = Bucket(MemoryStore(), "memory://x")
    bucket.put("object", b"12345", create=True)
    assert bucket.get("object", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes") as caught:
        bucket.get("object", 4)
    assert caught.value.errno == errno.EFBIG


@pytest.mark.parametrize("offset", [0, 1, 70_000, 199_990])
def test_a_store_without_ranges_is_read_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    bucket, data = Bucket(MemoryStore(), "memory://x"), os.urandom(200_000)
    bucket.put("object", data, create=True)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise made("GenericError", "Received non-partial response when range requested")

    monkeypatch.setattr("obstore.get_range", refuse)
    assert (bytes(bucket.read("object", offset, 10)), bucket.ranges) == (
        data[offset : offset + 10],
        False,
    )
    assert bucket.open("object", 10) == (bucket.head("object"), b"")
    assert bucket.open("object", 200_000)[1] == data
    with pytest.raises(RemoteError, match="the store answered with 4 bytes instead of 10"):
        bucket.read("object", 199_996, 10)


def test_an_answer_that_is_too_short_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(MemoryStore(), "memory://x")
    bucket.put("object", b"0123456789", create=True)
    monkeypatch.setattr("obstore.get_range", lambda *args, **kwargs: b"012")
    with pytest.raises(RemoteError, match="the store answered with 3 bytes instead of 5"):
        bucket.read("object", 0, 5)


# -- settings


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    buckets._connect.cache_clear()


def s3(**environ: str) -> S3Store:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        found = open_bucket(Url("s3", "data", ("ckpts", "x")))._store
    assert isinstance(found, S3Store)
    return found


def test_the_usual_variables_are_used() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "K", "AWS_SECRET_ACCESS_KEY": "S"}
    store = s3(**keys, AWS_ENDPOINT_URL="http://store:9000", AWS_DEFAULT_REGION="eu-1")
    assert (store.prefix, store.config["endpoint"], store.config["region"]) == (
        "ckpts/x",
        "http://store:9000",
        "eu-1",
    )
    assert store.client_options is not None
    assert store.client_options["allow_http"] == "true"  # type: ignore[comparison-overlap]  # obstore returns the texts that it has kept
    buckets._connect.cache_clear()
    special = s3(**keys, AWS_ENDPOINT_URL="http://general", AWS_ENDPOINT_URL_S3="https://special")
    assert (special.config["endpoint"], special.config["region"]) == (
        "https://special",
        "us-east-1",
    )
    assert special.client_options is not None
    assert special.client_options["allow_http"] == "false"  # type: ignore[comparison-overlap]


def test_a_profile_needs_boto3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.auth.boto3", None)
    with pytest.raises(
        InvalidConfig,
        match="or AWS_PROFILE need the package boto3: install it, or set AWS_ACCESS_KEY_ID",
    ):
        s3(AWS_PROFILE="mine")


def test_settings_that_obstore_refuses_are_named() -> None:
    with pytest.raises(
        InvalidConfig, match="az://box cannot be used with the settings in the environment: "
    ):
        open_bucket(Url("az", "box"))


@pytest.mark.parametrize("endpoint", ["store:9000", "localhost", "ftp://store"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(
        InvalidConfig,
        match=f"the endpoint in AWS_ENDPOINT_URL is '{endpoint}'; expected a URL that begins with "
        f"https",
    ):
        s3(AWS_ACCESS_KEY_ID="K", AWS_SECRET_ACCESS_KEY="S", AWS_ENDPOINT_URL=endpoint)


def test_a_forked_child_is_told_that_it_cannot_use_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test that the call fails at once: the threads of obstore are in the parent, so
    that it would wait for ever.
    """
    bucket = Bucket(MemoryStore(), "memory://x")
    bucket.put("object", b"data", create=True)
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    with pytest.raises(
        RemoteError,
        match="obstore cannot be used in a forked process: use the start method spawn or "
        "forkserver",
    ):
        bucket.get("object", 10)


def test_an_outage_is_no_damage() -> None:
    """A recovery that took it for damage would go back to an older checkpoint."""
    outage = translated(
        made("GenericError", ANSWER.format("503 Service Unavailable: ")), NAME, WHERE
    )
    assert StorageError.of("read it", outage).is_no_damage
    gone = translated(made("NotFoundError", "x"), NAME, WHERE)
    assert not StorageError.of("read it", gone).is_no_damage
    assert not StorageError.of("read it", OSError(errno.EIO, "x")).is_no_damage
