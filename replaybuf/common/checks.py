"""Validation of arguments (names, tags, steps, sizes), each returned as checked; imports of optional packages.

Errors name the wrong value and the expected one.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from replaybuf.common.redact import redact_path
from replaybuf.errors import ConfigError, InputError, MissingDriverError, ReplayBufError

Tags = dict[str, str | int | float | bool | None]

_MAX_NAME = 200
#: The integers that both databases store.
INT64 = range(-(2**63), 2**63)
_EXACT_BELOW = 2**53
#: Steps and staleness are below this, so that differences don't overflow in a database.
MAX_STEP = 2**53
_HIGHEST_FLOAT = sys.float_info.max
_LONGEST_TIME = 10**9
_MAX_REASON = 2000


def shown(value: Any) -> str:
    """Return the beginning of a value's repr, for an error; its type if there is none, as of lists nested too deep."""
    try:
        return f"{value!r:.100}"
    except Exception:
        return f"a {type(value).__name__} that can't be shown"


def error_text(error: BaseException) -> str:
    """Return an error with its class; the class alone if it has no text, or raises when it is asked for it."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def nearest(name: str, names: Iterable[str], similar: float = 0.6) -> str | None:
    """Return the most similar of some names, None if none has this ratio of similarity."""
    return next(iter(difflib.get_close_matches(name[:_MAX_NAME], list(names), n=1, cutoff=similar)), None)


def import_optional(module: str, message: str) -> Any:
    """Import a module of an optional package. Raises MissingDriverError with this message if it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDriverError(message) from error


def check_task_name(name: Any, what: str = "task_name") -> str:
    """Check the name of a task, a buffer or the like, or a key: a non-empty text that both databases can store."""
    if not isinstance(name, str):
        raise InputError(f"{what} must be a text, got {type(name).__name__}")
    if not name:
        raise InputError(f"{what} is empty")
    if len(name) > _MAX_NAME:
        raise InputError(f"{what} has {len(name)} characters; the limit is {_MAX_NAME}")
    return str(check_storable(name, what))


def check_storable(text: str, what: str) -> str:
    """Check that both databases can store a text, of any length."""
    if not is_storable(text):
        raise InputError(f"{what} {shown(text)} holds a NUL or a lone surrogate, which no database can store")
    return text


def check_staleness(staleness: int, what: str = "staleness") -> int:
    """Check the staleness of a group or a rollout: the difference of two train steps."""
    if abs(staleness) >= MAX_STEP:
        raise InputError(f"{what} is {shown(staleness)}, which is no difference of training steps")
    return staleness


def is_storable(text: str) -> bool:
    """Return whether databases can store a text: without NUL and lone surrogates."""
    if "\x00" in text:
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def is_numpy(value: Any, name: str) -> bool:
    """Return whether a value is an instance of numpy's class of this name, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, name, ()))


def check_tags(tags: Any) -> Tags | None:
    """Return a copy of tags: a flat dict of texts, 64-bit integers, finite floats, booleans and None."""
    if tags is None:
        return None
    if not isinstance(tags, Mapping):
        raise InputError(f"tags must be a dict, got {type(tags).__name__}")
    return {
        check_task_name(name, "a tag's name"): check_plain(f"tags[{name!r}]", tag, "a tag")
        for name, tag in tags.items()
    }


def check_plain(what: str, value: Any, kind: str) -> str | int | float | bool | None:
    """Check a text, 64-bit integer, finite float, boolean or None: the value of a `kind` such as "a tag"."""
    if value is None or isinstance(value, bool):
        return value
    if is_numpy(value, "bool_"):
        return bool(value)
    number = _number(value)
    if isinstance(number, int) and number in INT64:
        return number
    if isinstance(number, float) and math.isfinite(number):
        return exact_in_json(number)
    if isinstance(value, str) and is_storable(value):
        return str(value)
    raise InputError(
        f"{what} is {shown(value)}: {kind} is a str (without NUL), a 64-bit int, a finite float, a bool or None"
    )


def exact_in_json(number: int | float) -> int | float:
    """Return a finite number as databases get it in JSON: large whole floats, which are 64-bit integers, as these.

    PostgreSQL's JSON would compare them by their shortest decimals, which are others.
    """
    whole_number = isinstance(number, int) or (abs(number) >= _EXACT_BELOW and int(number) in INT64)
    return int(number) if whole_number else number


def check_priority(priority: Any, what: str = "priority") -> float:
    """Check a priority: a finite number that isn't negative, also as an array or tensor with one element."""
    number = _number(priority)
    if number is None and math.prod(getattr(priority, "shape", (0,))) == 1:
        number = _number(priority.item())
    if number is not None and 0 <= number <= _HIGHEST_FLOAT:
        return float(number)
    raise InputError(f"{what} must be a finite number of at least 0, got {shown(priority)}")


def check_priorities(priorities: Any) -> dict[int, float]:
    """Check priorities by uid."""
    if not isinstance(priorities, Mapping):
        raise InputError(f"expected a dict of uids and priorities, got {type(priorities).__name__}")
    uids = check_uids(priorities, "uids")
    return {
        uid: check_priority(priority, f"the priority of group {uid}")
        for uid, priority in zip(uids, priorities.values(), strict=True)
    }


def check_uids(uids: Any, what: str) -> tuple[int, ...]:
    """Check several uids."""
    if type(uids) is tuple and not uids:  # fast path, for most puts
        return ()
    numbers = tuple(map(whole, check_list(uids, what)))
    for number in numbers:
        if number is None or not 0 <= number < INT64.stop:
            raise InputError(f"{what} must be uids of groups, which are whole numbers; got {shown(uids)}")
    return tuple(number for number in numbers if number is not None)


def check_exponent(beta: Any) -> float | None:
    """Check the exponent of importance weights, or None."""
    if beta is None:
        return None
    number = _number(beta)
    if number is None or not 0 <= number <= 100:
        raise InputError(f"beta must be a number of at least 0 (usually at most 1), or None, got {shown(beta)}")
    return float(number)


def check_seconds(seconds: Any, what: str) -> float:
    """Check a positive, finite time in seconds."""
    number = _number(seconds)
    if number is None or not 0 < number <= _LONGEST_TIME:
        raise InputError(f"{what} must be a number of seconds above 0 (at most {_LONGEST_TIME}), got {shown(seconds)}")
    return float(number)


def check_sizes(sizes: Any) -> dict[str, int]:
    """Check numbers of groups by task: none is negative."""
    if not isinstance(sizes, Mapping):
        raise InputError(f"expected a dict of task names and sizes, got {type(sizes).__name__}")
    return {check_task_name(name): _count(size, f"the size of task {shown(name)}") for name, size in sizes.items()}


def _count(number: Any, what: str) -> int:
    """Check a number of groups, which may be larger than that of any store, as `sys.maxsize` is."""
    count = whole(number)
    return check_whole(number if count is None else min(count, MAX_STEP - 1), what)


def check_at_least(at_least: Any, sizes: Mapping[str, int]) -> dict[str, int]:
    """Check the minimum numbers of groups of a draw: one for all tasks with a size above 0, or a dict by task."""
    if isinstance(at_least, Mapping):
        checked = check_sizes(at_least)
    elif (number := whole(at_least)) is not None:
        checked = {name: max(0, number) for name, size in sizes.items() if size}
    else:
        raise InputError(f"at_least must be a whole number, or a dict of them by task, got {shown(at_least)}")
    for name, least in checked.items():
        if least > sizes.get(name, 0):
            raise InputError(f"at_least {least} of task {name} is more than the {sizes.get(name, 0)} asked for")
    return checked


def check_mix(mix: Any, sizes: Mapping[str, int]) -> dict[str, int]:
    """Check the `mix` of a draw; return the numbers of groups by task that are drawn again."""
    checked = check_by_task(mix, "mix")
    if checked.keys() != {"replay"}:
        raise InputError(f'mix must be {{"replay": share}}, or {{"replay": {{task: share}}}}, got {shown(mix)}')
    shares = checked["replay"] if isinstance(checked["replay"], Mapping) else dict.fromkeys(sizes, checked["replay"])
    for task, share in check_by_task(shares, "mix['replay']").items():
        if not isinstance(share, (int, float)) or (number := _number(share)) is None or not 0 <= number <= 1:
            raise InputError(f"mix: the share of task {shown(task)} must be a number from 0 to 1, got {shown(share)}")
        if task not in sizes:
            raise InputError(f"mix names the task {shown(task)}, of which no groups are asked for")
    return {task: round(shares[task] * size) for task, size in sizes.items() if task in shares}


def check_limit(limit: Any) -> int | None:
    """Check a limit of `find`: a number of groups, or None."""
    return None if limit is None else _count(limit, "limit")


def check_step(step: Any, what: str) -> int:
    """Check a train step."""
    number = whole(step)
    if number is None or not -MAX_STEP < number < MAX_STEP:
        raise InputError(f"{what} must be a whole number (a training step), got {shown(step)}")
    return number


def check_whole(number: Any, what: str, least: int = 0, error: type[ReplayBufError] = InputError) -> int:
    """Check a whole number of at least `least`, below 2**53. Raises this error for anything else."""
    checked = whole(number)
    if checked is None or not least <= checked < MAX_STEP:
        raise error(f"{what} must be a whole number of at least {least}, below 2**53, got {shown(number)}")
    return checked


def check_most(number: Any, what: str, least: int) -> int | None:
    """Check a setting that says how many are kept: at least `least`, None for all. Raises ConfigError."""
    return None if number is None else check_whole(number, what, least, ConfigError)


def check_threshold(threshold: Any, what: str) -> int | None:
    """Check a threshold: at least 1 train step, or None for no limit."""
    if threshold is None:
        return None
    number = whole(threshold)
    if number is None or number <= 0:
        raise InputError(
            f"{what} must be positive, a whole number of training steps; got {shown(threshold)}; "
            "1 draws only what the present weights have made (on-policy), None switches the limit off"
        )
    return min(number, MAX_STEP)


def whole(number: Any) -> int | None:
    """Return a whole number of Python or numpy as an int; None for anything else."""
    if type(number) is int:
        return _check_printable(number)
    if isinstance(number, bool):
        return None
    try:
        return _check_printable(operator.index(number))
    except TypeError:
        return None


def _check_printable(number: int) -> int:
    """Return a number. Raises InputError if it is too long for Python to show it in an error."""
    if number.bit_length() > 10_000:
        raise InputError("a whole number has more than 3,000 digits, which is too long for anything")
    return number


def _number(value: Any) -> int | float | None:
    """Return a number of Python or numpy as an int or float; None for anything else."""
    if type(value) is float:
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):
        return _check_printable(int(value))
    return float(value) if isinstance(value, Real) else None


def check_by_task(values: Any, what: str) -> dict[str, Any]:
    """Check a dict by task name; None becomes an empty one."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise InputError(f"{what} must be a dict by task name, got {type(values).__name__}")
    return {check_task_name(name): value for name, value in values.items()}


def check_list(values: Any, what: str) -> list[Any]:
    """Check a list of values; a single text isn't one."""
    if not isinstance(values, str) and isinstance(values, Iterable):
        try:
            return list(values)
        except TypeError:  # an array without dimensions
            pass
    raise InputError(f"{what} must be a list, got {shown(values)}")


def check_path(path: Any, what: str) -> Path:
    """Check the path of a `what`, and return it absolute: the working directory may change."""
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if type(text) is not str or not text or not is_storable(text):
        raise InputError(f"expected the path of a {what}, got {shown(path)}")
    return Path(text).absolute()


def check_folder(path: Any) -> Path:
    """Check the path of a folder, which is no URL, and return it absolute."""
    folder = check_path(path, "folder")
    check_no_url(Path(path))
    return folder


def check_no_url(folder: Path) -> None:
    """Raise InputError for a folder that is a URL."""
    if re.match(r"[A-Za-z][\w+.-]+:/", str(folder)):
        raise InputError(f"expected the path of a folder, got the URL {redact_path(str(folder)):.100}")


def check_timeout(timeout: Any) -> float:
    """Check a timeout in seconds; None means no timeout."""
    if timeout is None:
        return math.inf
    number = _number(timeout)
    if number is None or not number >= 0:
        raise InputError(f"timeout must be a number of seconds of at least 0, or None for ever, got {shown(timeout)}")
    return float(number) if number <= _HIGHEST_FLOAT else math.inf


def check_reason(reason: Any) -> str | None:
    """Check the reason for giving groups back: a text that every database can store, or None."""
    if reason is not None and not isinstance(reason, str):
        raise InputError(f"failed must be a text that says why, or None, got {shown(reason)}")
    return None if reason is None else reason.encode("utf-8", "replace").decode().replace("\x00", "?")[:_MAX_REASON]
