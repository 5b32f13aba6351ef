"""Says where a root, a job or a checkpoint is: an absolute path, or the URL of a prefix
in an object store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ckptd.shared.errors import InvalidConfig

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "az"}
"""The schemes of URLs that name object stores, and the usual scheme for each."""
NO_PLACE = "an empty text names no place: is a variable unset? The working directory is `.`"

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?P<rest>.*)", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z0-9._=+-]{1,255}")


@dataclass(frozen=True, slots=True)
class Url:
    """The URL of a prefix in an object store, with the methods of a path that places of
    checkpoints need.

    scheme: `s3`, `gs` or `az`. bucket: the bucket, or the container of Azure. parts:
    the components of the prefix.
    """

    scheme: str
    bucket: str
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "/".join([f"{self.scheme}://{self.bucket}", *self.parts])

    @property
    def key(self) -> str:
        """The prefix itself, without a slash at its ends."""
        return "/".join(self.parts)

    @property
    def name(self) -> str:
        return self.parts[-1] if self.parts else ""

    @property
    def parent(self) -> Url:
        """The prefix that this one lies in.

        A whole bucket is its own parent, as the root directory is.
        """
        return Url(self.scheme, self.bucket, self.parts[:-1])

    @property
    def parents(self) -> Sequence[Url]:
        return [
            Url(self.scheme, self.bucket, self.parts[:count])
            for count in reversed(range(len(self.parts)))
        ]

    def __truediv__(self, name: str) -> Url:
        return Url(self.scheme, self.bucket, (*self.parts, *_checked(str(name), f"{self}/{name}")))

    def resolve(self) -> Url:
        """Return the URL itself, because an object store has no links."""
        return self


Location: TypeAlias = Path | Url
"""A place of checkpoints."""


def located(place: str | os.PathLike[str] | Url) -> Location:
    """Return the place that a user has named: a URL as it is, and any other text as an
    absolute path.

    Raises InvalidConfig if it is a URL that names no place in an object store, or one
    with credentials in it, or if it is empty.
    """
    if isinstance(place, Url):
        return place
    text = os.fspath(place)
    if not text:  # the working directory would be a surprise
        raise InvalidConfig(NO_PLACE)
    scheme = url_scheme(text)
    return _parse(text, scheme) if scheme else Path(os.path.abspath(text))


def is_same(one: Location, other: Location) -> bool:
    """Return True if two places are the same, for paths also through links and mounts."""
    if one == other or not (isinstance(one, Path) and isinstance(other, Path)):
        return one == other
    try:
        return os.path.samefile(one, other)
    except OSError:  # a root that is still to be made
        return one.resolve() == other.resolve()


def is_place(place: str | os.PathLike[str]) -> bool:
    """Return True if `located` takes this text."""
    try:
        located(place)
    except InvalidConfig:
        return False
    return True


def local(place: str | os.PathLike[str], called: str) -> Path:
    """Return the absolute path that a user has named, where only a path will do.

    Raises InvalidConfig for a URL.

    called: the name of the place in the text of the error.
    """
    if url_scheme(place):
        raise InvalidConfig(
            f"{called} is the URL {_without_secrets(os.fspath(place))!r}; expected a path on this "
            f"machine"
        )
    return Path(os.path.abspath(place))


def url_scheme(place: str | os.PathLike[str]) -> str:
    """Return the scheme of a place that is a URL, such as "s3", or "" for a path.

    One slash after the colon is enough, because a `Path` made from a URL has lost the
    other.
    """
    match = _URL.fullmatch(os.fspath(place))
    return match["scheme"] if match else ""


def _parse(text: str, scheme: str) -> Url:
    shown = _without_secrets(text)
    usual = SCHEMES.get(scheme.lower())
    if usual is None:
        raise InvalidConfig(
            f"{shown!r} is a URL that ckptd cannot save to; expected a directory, or s3://, gs:// "
            f"or az:// with a bucket"
        )
    rest = text.partition(":/")[2].removeprefix("/")
    bucket, _, key = rest.partition("/")
    if set("@?#") & set(rest):
        raise InvalidConfig(
            f"{shown!r} has a user, a query or a fragment; expected {usual}://BUCKET/PREFIX: give "
            f"credentials in the environment instead"
        )
    if _PLAIN.fullmatch(bucket) is None:
        raise InvalidConfig(f"{shown!r} names no bucket; expected {usual}://BUCKET/PREFIX")
    return Url(usual, bucket, _checked(key, shown))


def _checked(key: str, shown: str) -> tuple[str, ...]:
    """Return the components of a prefix.

    Raises InvalidConfig for one that an object store or a file system would not take
    literally.
    """
    parts = tuple(part for part in key.split("/") if part)
    for part in parts:
        if part in (".", "..") or _PLAIN.fullmatch(part) is None:
            raise InvalidConfig(
                f"{part!r} in {shown!r} cannot be part of a prefix; expected letters, digits, "
                f"'.', '_', '-', '=' and '+'"
            )
    return parts


def _without_secrets(text: str) -> str:
    """Return a URL, or only its scheme if it has a user, a query or a fragment, in
    which people put credentials.
    """
    scheme = text.partition(":/")[0]
    return f"{scheme}://..." if set("@?#") & set(text) else text
