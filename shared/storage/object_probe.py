"""Measures what an object store guarantees, with small objects that are deleted
afterwards.
"""

from __future__ import annotations

import errno
import threading
from contextlib import suppress

from ckptd.shared import names
from ckptd.shared.errors import RemoteError
from ckptd.shared.storage.bucket import Bucket

_CALLERS = 16
_PREFIX = f"{names.CONTROL}/probe"


def creates_once(bucket: Bucket) -> bool:
    """Return True if exactly one of many callers succeeds that create an object at the
    same time, and a later caller fails.

    Some stores ignore the condition of such a request, and some let several callers
    win. A wrong answer proves that. Right answers only make it likely that the store
    keeps its word.
    """
    name = f"{_PREFIX}/{names.new_nonce().hex()}"

    winners, errors = list[int](), list[OSError]()

    def create(number: int) -> None:
        try:
            bucket.put(name, f"{number}".encode(), create=True)
            winners.append(number)
        except FileExistsError:
            pass
        except OSError as error:
            errors.append(error)

    try:
        callers = [threading.Thread(target=create, args=(number,)) for number in range(_CALLERS)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        create(_CALLERS)
        if errors:
            raise errors[0]
        return len(winners) == 1 and bucket.get(name, 10) == f"{winners[0]}".encode()
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return False
        raise
    finally:
        with suppress(OSError):
            bucket.delete([name])


def copies(bucket: Bucket) -> bool:
    """Return True if the store copies an object when it is asked to, so that the copy
    has the same bytes.
    """
    nonce = names.new_nonce().hex()
    name, copy, data = f"{_PREFIX}/{nonce}", f"{_PREFIX}/{nonce}-copy", nonce.encode()
    bucket.put(name, data, create=False)
    try:
        bucket.copy(name, copy)
        return bucket.get(copy, len(data)) == data
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return False
        raise
    finally:
        with suppress(OSError):
            bucket.delete([name, copy])


def check(bucket: Bucket) -> None:
    """Check that an object can be written, listed, read in part and deleted.

    Raises OSError, which says what the store does not do.
    """
    nonce = names.new_nonce().hex()
    name, data = f"{_PREFIX}/{nonce}", nonce.encode()
    bucket.put(name, data, create=False)
    try:
        if name not in [found.name for found in bucket.children(_PREFIX)[1]]:
            raise RemoteError(
                errno.EIO,
                "a listing lacks an acknowledged object, and ckptd relies on listings",
                name,
            )
        if bucket.read(name, 8, 8) != data[8:16]:
            raise RemoteError(
                errno.EIO, "the store returns other bytes than those that were written", name
            )
    finally:
        bucket.delete([name])
    if name in [found.name for found in bucket.children(_PREFIX)[1]]:
        raise RemoteError(
            errno.EIO, "a listing has a deleted object, and ckptd relies on listings", name
        )
