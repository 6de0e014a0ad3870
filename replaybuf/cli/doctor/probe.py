"""A trial of a database: each call of a buffer is made once, in a buffer of its own that is removed afterwards.

It tells before the first run whether a server that speaks PostgreSQL's protocol has all that the store needs: nothing
is inferred from a version. The tables are made if they don't exist, as the first run would.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from replaybuf.cli.doctor import Finding, fine, problem, warning
from replaybuf.config import ReplayBufferConfig
from replaybuf.errors import NotReadyError, ReplayBufError
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.inspection.writer import forget_buffer, open_writer
from replaybuf.values.rollouts.rollout import RolloutState, Status

_TASK = "probe"
#: Seconds in which each call has to be done.
CALL_SECONDS = 30.0
_IN_VAIN_SECONDS = 0.5
_PAGE = "docs/operating.md says which servers have what the store needs"


def _group() -> list[RolloutState]:
    rollout = RolloutState(message=[], response="12", response_ids=[1, 2], reward=1.0, status=Status.COMPLETED)
    return [rollout, rollout.model_copy()]


async def _try_calls(buffer: Any, other: Any) -> AsyncIterator[str]:
    """Yield the name of each call, and make it, on the buffer and on the same one as another process would open it."""
    yield "open"
    for instance in (buffer, other):
        await instance.count(_TASK, Status.COMPLETED)
    yield "put"
    await buffer.put(_group(), _TASK, model_step=1, current_train_step=1)
    await buffer.put(_group(), _TASK, key="key", tags={"level": 3}, priority=2.0)
    await other.put(_group(), _TASK, key="key", tags={"level": 4})  # replaces
    yield "put_many"
    await buffer.put_many([_group() for _ in range(8)], _TASK)
    yield "find"
    await other.count_where({"tags.level": {"$in": [3, 4]}, "staleness": {"$gte": 0}})
    [_ async for _ in buffer.find({"reward": {"$gte": 0.5}}, order_by="-reward")]
    yield "update"
    [uid, *_] = [item.uid async for item in buffer.find({"task_name": _TASK})]
    await other.update_priorities({uid: 3.0})
    await buffer.update({"uid": uid}, tags={"level": 5})
    yield "refresh_staleness"
    await buffer.refresh_staleness(task_stale_thresholds={_TASK: 4}, current_train_step=2)
    yield "take_batch"
    await asyncio.gather(*(instance.take_batch({_TASK: 2}, timeout=CALL_SECONDS) for instance in (buffer, other)))
    yield "wait"
    with suppress(NotReadyError):  # by its end the store has begun to listen
        await buffer.take_batch({"later": 1}, timeout=_IN_VAIN_SECONDS)
    waiting = asyncio.create_task(buffer.get(1, "later", timeout=CALL_SECONDS, at_least=1))
    await other.put(_group(), "later")
    await waiting
    yield "lease_batch"
    lease = await buffer.lease_batch({_TASK: 2}, timeout=CALL_SECONDS)
    await lease.extend(60)
    await lease.give_back([min(lease.open)])
    await lease.acknowledge()
    yield "metrics"
    await other.metrics()
    yield "checkpoint"
    await other.checkpoint(2)
    yield "restore"
    await buffer.restore(2)
    yield "delete"
    await _delete(buffer)


async def _delete(buffer: Any) -> None:
    for checkpoint in await buffer.checkpoints():
        await buffer.drop_checkpoint(checkpoint.step)
    await buffer.delete({})


def probe(reader: Reader) -> Sequence[Finding]:
    """Make all calls, and name the first one that fails; what the store logs meanwhile are warnings."""
    name = f"replaybuf-probe-{secrets.token_hex(6)}"
    calls: list[str] = []
    with _collect_warnings() as messages:
        cause = asyncio.run(_try_all(reader, name, calls)) or _try_locks(reader)
    if not cause.startswith("open "):
        try:
            forget_buffer(reader, name)
        except ReplayBufError as error:
            messages.append(f"the buffer {name} of this trial is left: {error}")
    warnings = [warning(text, _PAGE) for text in dict.fromkeys(messages)]
    summary = f"each call was made once: {', '.join(calls)}"
    findings = [problem(cause, _PAGE)] if cause else [*warnings, fine(summary)]
    return [replace(finding, check="probe") for finding in findings]


def _try_locks(reader: Reader) -> str:
    """Return "", or what is wrong with locks: servers are known that accept their functions, and do nothing."""
    try:
        with open_writer(reader) as writer:
            if writer.excludes_others():
                return ""
    except ReplayBufError as error:
        return f"locks failed: {error}"
    return "locks failed: an exclusive one is accepted, and excludes nobody: restores would be overtaken by writers"


async def _try_all(reader: Reader, name: str, names: list[str]) -> str:
    """Return which call failed, and why; "" if none did. `names` gets their names.

    The buffer is emptied after a failure, where it can be.
    """
    url = reader.url.render_as_string(hide_password=False)
    config = ReplayBufferConfig(url=url, name=name, policy="fifo", reconnect_timeout=CALL_SECONDS)
    buffer, other = config.build(), config.build()
    calls = _try_calls(buffer, other)
    try:
        while True:
            async with asyncio.timeout(CALL_SECONDS):
                names.append(await anext(calls))
    except StopAsyncIteration:
        return ""
    except (ReplayBufError, TimeoutError) as error:
        with suppress(ReplayBufError, TimeoutError):
            async with asyncio.timeout(CALL_SECONDS):
                await _delete(buffer)
        return f"{names[-1]} failed: {str(error) or f'no answer within {CALL_SECONDS:g} s'}"
    finally:
        await asyncio.gather(buffer.close(), other.close())


@contextmanager
def _collect_warnings() -> Iterator[list[str]]:
    """Collect the warnings of the store instead of printing them."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("replaybuf")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
