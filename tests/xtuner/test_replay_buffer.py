"""`replaybuf.integrations.xtuner` does what xtuner's code relies on, with a stand-in for xtuner (`stand_in`)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from replaybuf.errors import (
    ConfigError,
    MissingDriverError,
    SnapshotError,
)
from tests.frameworks import XtunerRollout, XtunerStatus
from tests.pages import DOCS
from tests.stores import because
from tests.xtuner import stand_in

COMPLETED, EXPIRED = XtunerStatus.COMPLETED, XtunerStatus.EXPIRED


@pytest.fixture
async def buffer(build: Callable[..., Any], shared_url: str) -> Any:
    return build(shared_url)


def rollout(number: int, step: int | None = 1, **fields: Any) -> XtunerRollout:
    values: dict[str, Any] = {
        "message": [{"role": "user", "content": "?"}],
        "prompt_ids": [1, 2],
        "response_ids": [3],
        "response_mask": [1],
        "response_model_steps": None if step is None else [step],
        "session_id": 100 + number,
        "status": COMPLETED,
    }
    return XtunerRollout(**{"rollout_id": number, "group_id": number} | values | fields)


def numbers(groups: list[list[XtunerRollout]]) -> list[int]:
    return [member.rollout_id or 0 for group in groups for member in group]


async def refresh(buffer: Any, retryable: bool, step: int = 4, **options: Any) -> dict[str, int]:
    counts: dict[str, int] = await buffer.refresh_staleness(
        task_stale_thresholds={"math": 2},
        expired_groups_retryable_by_task={"math": retryable},
        current_train_step=step,
        **options,
    )
    return counts


async def test_rollouts_and_statuses_are_xtuners(buffer: Any) -> None:
    await buffer.put([rollout(1, None)], "math", model_step=3, current_train_step=5)
    assert await buffer.count_statuses(["math"], [COMPLETED, EXPIRED]) == {"math": {COMPLETED: 1, EXPIRED: 0}}
    (group,) = await buffer.get(1, "math", COMPLETED)
    assert type(group[0]) is XtunerRollout
    assert (group[0].status, group[0].response_model_steps, group[0].seq_staleness) == (COMPLETED, [3], 1)


async def test_segments_of_a_session_are_one_rollout_and_come_back_in_one_list(buffer: Any) -> None:
    """As the trainer counts them: by session, or by rollout without one."""
    rewards = {1: 1.0, 2: 1.0, 3: 0.0, 4: 0.0}
    sessions = {1: 7, 2: 7, 3: 8, 4: None}
    members = [rollout(number, session_id=sessions[number], reward={"score": rewards[number]}) for number in rewards]
    await buffer.put(members, "math")
    [item] = [item async for item in buffer.buffer.find({})]
    assert (item.rollouts, item.reward) == (3, pytest.approx(1 / 3))
    assert numbers(await buffer.get(1, "math", COMPLETED)) == [1, 2, 3, 4]
    await buffer.put([rollout(1, 0, session_id=7), rollout(2, 0, session_id=7)], "math")
    await refresh(buffer, retryable=False)
    assert stand_in.released == [[7, 7]]


async def test_a_response_without_token_ids_stays_without_model_steps(buffer: Any) -> None:
    texts = {"response": "4", "response_ids": None, "response_mask": None}
    await buffer.put([rollout(1, None, **texts)], "math", model_step=3, current_train_step=9, stale_threshold=2)
    ((restored,),) = await buffer.get(1, "math", COMPLETED)
    assert (restored.response, restored.response_model_steps, restored.seq_staleness) == ("4", None, 0)


async def test_groups_that_a_refresh_drops_are_counted_and_released_in_one_call(buffer: Any) -> None:
    for number, step in ((1, 0), (2, 1), (3, 3)):
        await buffer.put([rollout(number, step), rollout(number + 10, step)], "math")
    await refresh(buffer, retryable=True, step=3)  # one is EXPIRED already
    assert await refresh(buffer, retryable=False) == {"math": 2}
    assert sorted(*stand_in.released) == [101, 102, 111, 112]
    assert (len(buffer), await buffer.count("math", EXPIRED)) == (1, 0)


async def test_a_group_that_expires_at_its_put_is_released_and_its_rollouts_discarded(buffer: Any) -> None:
    stale = rollout(1, 0)
    await buffer.put([stale], "math", current_train_step=5, stale_threshold=2, expired_groups_retryable=False)
    assert stand_in.released == [[101]]
    assert (stale.status, stale.prompt_ids, len(buffer)) == (EXPIRED, None, 0)


async def test_a_trace_store_that_does_not_answer_holds_up_no_call_for_ever(
    buffer: Any, xtuner: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def hung(_: Any) -> None:
        await asyncio.Event().wait()

    store = sys.modules["xtuner.v1.rl.rollout.trace_store"]
    monkeypatch.setattr(store, "release_and_discard_rollout_groups", hung)
    monkeypatch.setattr(xtuner, "_RELEASE_SECONDS", 0.05)
    stale = rollout(1, 0)
    options = {"current_train_step": 5, "stale_threshold": 2, "expired_groups_retryable": False}
    await buffer.put([stale], "math", **options)
    assert (stale.status, len(buffer)) == (EXPIRED, 0)
    assert "trace store didn't answer for 0.05 s: the sessions of 1 group" in caplog.text


async def test_what_leaves_is_released_though_its_put_is_cancelled(build: Callable[..., Any]) -> None:
    buffer = build("sqlite:///:memory:", capacity=1)
    for number in range(40):
        putting = asyncio.create_task(buffer.put([rollout(number)], "math"))
        for _ in range(number):
            await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait([putting])
    evicted = (await buffer.buffer.metrics())["tasks"]["math"]["evicted"]
    released = [session for call in stand_in.released for session in call]
    assert len(released) == len(set(released)) == evicted > 0


async def test_a_group_without_a_final_status_counts_as_completed(buffer: Any) -> None:
    await buffer.put([rollout(1, status=XtunerStatus.INIT)], "math")
    assert await buffer.is_ready({"math": 1, "other": 0})


async def test_batches_have_every_task_that_was_asked_for(buffer: Any) -> None:
    await buffer.put([rollout(1)], "math")
    assert await buffer.take_batch({"math": 0, "code": 2}) == ({"math": [], "code": []}, {"math": 0, "code": 0})
    assert await buffer.get(0, "math", COMPLETED) == await buffer.get(1, "math", XtunerStatus.ARCHIVED) == []


# Saving and resuming


async def test_a_run_that_starts_again_resumes_in_place_of_what_the_last_one_left(
    build: Callable[..., Any], shared_url: str, tmp_path: Path
) -> None:
    first = build(shared_url)
    await first.put([rollout(1)], "math")
    await first.save(tmp_path / "checkpoint")
    await first.put([rollout(2)], "math")
    await first.close()
    second = build(shared_url)
    await second.resume(tmp_path / "checkpoint")
    assert numbers(await second.get(9, "math", COMPLETED)) == [1]


async def test_a_run_that_has_begun_resumes_only_into_an_empty_buffer(buffer: Any, tmp_path: Path) -> None:
    await buffer.put([rollout(1)], "math")
    await buffer.save(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        await buffer.resume(tmp_path)
    assert isinstance(caught.value, SnapshotError)
    assert caught.value.reason == "not empty"
    assert len(buffer) == 1


async def test_checkpoints_in_the_database_are_not_replaced(
    build: Callable[..., Any], shared_url: str, tmp_path: Path
) -> None:
    first = build(shared_url)
    await first.put([rollout(1)], "math")
    await first.save(tmp_path / "checkpoint")
    await first.buffer.checkpoint(1)
    second = build(shared_url)
    with pytest.raises(SnapshotError, check=because("not empty")):
        await second.resume(tmp_path / "checkpoint")
    assert len(second) == 1


# Configs, and their page


def test_there_are_two_lines_to_change() -> None:
    lines = (DOCS / "xtuner.md").read_text("utf-8").splitlines()
    changed = [line.partition("  # instead of ")[0].strip() for line in lines if "  # instead of" in line]
    assert changed == [
        "from replaybuf.integrations.xtuner import AsyncReplayBufferConfig",
        'replay_buffer_config=AsyncReplayBufferConfig(url="sqlite:///run.db"),',
    ]


def test_a_trainer_takes_the_config_as_one_of_xtuners(xtuner: ModuleType) -> None:
    config = xtuner.AsyncReplayBufferConfig(url="sqlite:///run.db", capacity=10)
    assert stand_in.TrainerConfig(replay_buffer_config=config).replay_buffer_config is config
    with pytest.raises(ValidationError):
        stand_in.TrainerConfig(replay_buffer_config=object())  # type: ignore[arg-type]


def test_a_config_names_the_option_that_cant_be(xtuner: ModuleType) -> None:
    with pytest.raises(ConfigError, match="capactiy"):
        xtuner.SyncReplayBufferConfig(capactiy=10)


async def test_a_config_has_xtuners_order_and_a_buffer_of_its_own(build: Callable[..., Any]) -> None:
    for kind, policy in (("Sync", "fifo"), ("Async", "staleness")):
        assert build("sqlite:///:memory:", kind).buffer.policy.name == policy


def test_without_xtuner_the_config_says_what_to_install() -> None:
    with stand_in.installed(is_installed=False):
        import replaybuf.integrations.xtuner

        with pytest.raises(MissingDriverError, match="InternLM/xtuner"):
            replaybuf.integrations.xtuner.SyncReplayBufferConfig()
