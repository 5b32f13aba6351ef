"""Checks what the caller and the environment give: the job, the process group, and the
options of one `snapshot()`.
"""

from __future__ import annotations

import json
import operator
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

from ckptd.agent.link.rounds import Alone, Exchange, RankGroup
from ckptd.agent.link.script import script_job
from ckptd.shared.errors import InvalidRequest
from ckptd.shared.formats.bounds import MAX_DEPTH, deeper_than
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.snapshot_request import MAX_REQUEST, SnapshotRequest
from ckptd.shared.names import check_name, check_new_tag
from ckptd.shared.retention import Policy
from ckptd.shared.system.machine import host
from ckptd.shared.system.settings import FOREIGN_MEMORY_CHOICES

Hold = Literal["late", "now"]
OnBusy = Literal["wait", "skip"]
OnError = Literal["raise-until-sealed", "raise", "log"]
Unsavable = Literal["refuse", "skip"]


def job_name(job: str | None, *, private: bool) -> str:
    """Return `job`, or else CKPTD_JOB, or else the name of the main script if the
    daemon is a private one.

    Raises InvalidName if the name cannot be a job's, and InvalidRequest if there is no
    name.
    """
    name = job or os.environ.get("CKPTD_JOB")
    if name:
        return check_name("job", name)
    if private:
        return script_job()
    raise InvalidRequest(
        "this daemon serves several jobs: name this job with CKPTD_JOB or Agent(job=...)"
    )


def may_take_over(takeover: bool | None) -> bool:
    """Return `takeover`, or else whether CKPTD_TAKEOVER is 1.

    Raises InvalidRequest if that is neither 0 nor 1.
    """
    if takeover is not None:
        return bool(takeover)
    setting = os.environ.get("CKPTD_TAKEOVER", "")
    if setting not in ("", "0", "1"):
        raise InvalidRequest(f"CKPTD_TAKEOVER is {setting!r}; expected 0 or 1")
    return setting == "1"


def foreign_memory() -> str:
    """Return CKPTD_FOREIGN_MEMORY, or "" if it is not set.

    Raises InvalidRequest if its value is not one of the choices.
    """
    setting = os.environ.get("CKPTD_FOREIGN_MEMORY", "")
    if setting not in ("", *FOREIGN_MEMORY_CHOICES):
        raise InvalidRequest(f"CKPTD_FOREIGN_MEMORY is {setting!r}; expected refuse, adopt or drop")
    return setting


COMPARE_REPLICAS = 1000
"""The default of CKPTD_COMPARE_REPLICAS."""


def comparison_interval(compare_replicas: int | None) -> int:
    """Return the number of snapshots within which all bytes of several ranks are
    compared.

    This is `compare_replicas`, or else CKPTD_COMPARE_REPLICAS, or else the default.
    Raises InvalidRequest if it is not an integer from 0 to 1,000,000.
    """
    setting: Any = (
        os.environ.get("CKPTD_COMPARE_REPLICAS", "")
        if compare_replicas is None
        else compare_replicas
    )
    name = "CKPTD_COMPARE_REPLICAS" if compare_replicas is None else "compare_replicas"
    if setting == "":
        return COMPARE_REPLICAS
    try:
        number = (
            -1
            if isinstance(setting, bool)
            else int(setting)
            if isinstance(setting, str)
            else operator.index(setting)
        )
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= 1_000_000:
        raise InvalidRequest(
            f"{name} is {setting!r}; expected a number of snapshots from 0 to 1,000,000"
        )
    return number


def launch_id() -> str:
    """Return an id that all workers of one torchrun share, even after it has restarted
    them. Return "" if torchrun does not run this.

    torchrun calls a run "none" unless it is given an id. The name of the host and the
    process number of torchrun then tell two runs apart.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{run}/{host()}/{os.getppid()}" if run == "none" else run[:256]


def ranks_of(process_group: dist.ProcessGroup | None) -> RankGroup:
    """Return the `RankGroup` of the process group, through which this rank agrees with the
    other ranks.

    None as `process_group` means the default process group, or a single rank if
    torch.distributed is not initialized. Raises InvalidRequest if this rank is not in
    the group, or if WORLD_SIZE is above 1 and torch.distributed is not initialized.
    """
    if not dist.is_available() or not dist.is_initialized():
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size > 1:
            raise InvalidRequest(
                f"this job has {world_size} ranks: call torch.distributed.init_process_group() "
                f"before ckptd"
            )
        return Alone()
    group = process_group or dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise InvalidRequest("this rank is not in the process group that the agent was given")
    if dist.get_world_size(group) == 1:
        return Alone()
    return Exchange(
        _get_process_group_store(group), dist.get_rank(group), dist.get_world_size(group)
    )


def job_store() -> Store:
    """Return a new client of the store of the default process group.

    A thread that waits on an existing client blocks its other users.
    """
    group = dist.group.WORLD
    assert group is not None
    return PrefixStore("ckptd", _get_process_group_store(group).clone())  # type: ignore[attr-defined]


def as_step(step: Any) -> int:
    """Return a step as an int, given any integer, such as one of NumPy or a tensor with
    one element. Return -1 if it is no valid step.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        return -1
    return number if 0 <= number < 10**18 else -1


def check_state(state: Any, world_size: int) -> None:
    """Raise InvalidRequest if there is nothing to save.

    A rank of several may have an empty state.
    """
    if state is None or (world_size == 1 and isinstance(state, (dict, list, tuple)) and not state):
        raise InvalidRequest(
            f"the state is {state!r}: pass what is to be saved, such as {{'model': model, "
            f"'optim': optimizer}}"
        )


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise InvalidRequest if the value of an option is none of its choices.

    choices: a Literal type.
    """
    if value not in get_args(choices):
        *some, last = map(repr, get_args(choices))
        raise InvalidRequest(f"{name} is {value!r}; expected {', '.join(some)} or {last}")


def make_request(
    step: Any,
    tag: Any,
    persist: bool,
    on_busy: str,
    metrics: Mapping[str, float] | None,
    user_content: Any,
    retention: Sequence[Policy] | None = None,
    node: Membership | None = None,
    replicate: bool = False,
) -> SnapshotRequest:
    """Return the request document of one snapshot, made from the checked options.

    Raises InvalidRequest, or InvalidName for the tag.
    """
    if as_step(step) < 0:
        raise InvalidRequest(f"step is {step!r}; expected an integer from 0 to 10**18 - 1")
    check_choice("on_busy", on_busy, OnBusy)
    if tag is not None:
        check_new_tag(tag)
    if metrics is not None and not isinstance(metrics, Mapping):
        raise InvalidRequest(
            f"metrics is {metrics!r}; expected numbers by name, like {{'loss': 0.5}}"
        )
    numbers: dict[str, float] = {}
    for key, value in (metrics or {}).items():
        try:
            numbers[str(key)] = float(value)
            str(key).encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"metric {key!r} has half of a surrogate pair in its name, which UTF-8 cannot "
                f"encode"
            ) from None
        except OverflowError:
            raise InvalidRequest(
                f"metric {key!r} is an integer too large for a float; expected a number that fits "
                f"into one"
            ) from None
        except (TypeError, ValueError):
            raise InvalidRequest(f"metric {key!r} is {value!r}; expected a number") from None
    content = "null" if user_content is None else _as_json(user_content)
    if len(content) + sum(len(key) + 16 for key in numbers) > MAX_REQUEST // 2:
        raise InvalidRequest(
            f"metrics and user_content together exceed {MAX_REQUEST // 2} bytes; save large "
            f"values in the state"
        )
    return SnapshotRequest(
        tag=tag,
        persist=bool(persist),
        metrics=numbers,
        user_content=content,
        created=time.time(),
        retention=None if retention is None else [repr(policy) for policy in retention],
        node=node,
        replicate=bool(replicate),
    )


def _as_json(user_content: Any) -> str:
    """Return user_content as JSON text that every reader accepts.

    Raises InvalidRequest if that is not possible.
    """
    try:
        text = json.dumps(user_content, allow_nan=False)
        read = msgspec.json.decode(text)
    except msgspec.DecodeError:
        # json.dumps escapes half of a surrogate pair, and no strict reader accepts
        # that.
        raise InvalidRequest(
            "user_content has half of a surrogate pair in a text, which UTF-8 cannot encode; "
            "leave it out"
        ) from None
    except RecursionError:
        read = None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"user_content cannot be written as JSON: {error}") from None
    if read is None or deeper_than(read, MAX_DEPTH):
        raise InvalidRequest(
            f"user_content is nested more than {MAX_DEPTH} levels deep; nest it less, or save it "
            f"in the state"
        )
    return text
