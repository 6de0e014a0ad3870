"""open-instruct's table over the store; what went wrong with its own (pull request 1583) doesn't here."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from replaybuf import ConfigError, NotReadyError
from replaybuf.errors import ClosedError
from replaybuf.integrations.reverb import open_instruct as replay_buffer_lib
from replaybuf.rules.policies import StalenessPolicy


@dataclass
class Result:
    """As its ProcessedResult is: lists for each sample of a prompt, and the engine's answer inside."""

    result: dict[str, Any]
    queries: list[list[int]] = field(default_factory=list)
    reward_scores: list[float] = field(default_factory=list)
    percent_solved: float = 0.0


def result(number: int) -> Result:
    return Result({"prompt_id": f"0_{number}"}, [[number, 2]], [0.5, 1.0], 0.5)


def table(url: str = "memory://", **changes: Any) -> replay_buffer_lib.Table[Result]:
    """The call of its data loader."""
    arguments: dict[str, Any] = {
        "max_size": 8,
        "sampler": replay_buffer_lib.make_selector("fifo"),
        "remover": replay_buffer_lib.make_selector("fifo"),
        "max_times_sampled": 1,
        "rate_limiter": replay_buffer_lib.MinSize(2),
    }
    return replay_buffer_lib.Table(**(arguments | changes), url=url, rollout_type=Result)


def numbers(results: list[Result] | None) -> list[int]:
    assert results is not None
    return [one.queries[0][0] for one in results]


def test_a_sample_waits_for_min_size_and_takes_up_to_n(url: str) -> None:
    replay = table(url)
    replay.insert("a", result(0))
    with pytest.raises(NotReadyError, match="1 completed group there, at least 2 needed, but min_size is 2"):
        replay.sample(64, timeout=0.01)
    inserting = threading.Thread(target=lambda: [replay.insert(f"b{n}", result(n)) for n in (1, 2)])
    inserting.start()
    inserting.join()
    assert replay.sample(2, timeout=20) == [result(0), result(1)]
    replay.insert("c", result(3))
    assert numbers(replay.sample(64)) == [2, 3]
    assert len(replay) == 0
    replay.close()


def test_shutdown_ends_samples_in_other_threads() -> None:
    """With None, and so do all later ones."""
    replay, ends = table(), []
    waiting = threading.Thread(target=lambda: ends.append(replay.sample(2)))
    waiting.start()
    replay.insert("a", result(0))
    assert not replay.is_shutdown
    replay.shutdown()
    waiting.join(20)
    assert (ends, replay.is_shutdown, replay.sample(2)) == ([None], True, None)


def test_after_a_shutdown_results_are_inserted_and_counted_as_before(url: str) -> None:
    """As theirs does, whose consumer may insert one more while its actor ends."""
    replay = table(url)
    replay.insert("a", result(0))
    replay.shutdown()
    replay.insert("b", result(1))
    assert (len(replay), replay.sample(2), len(replay)) == (2, None, 2)
    replay.close()
    with pytest.raises(ClosedError):
        replay.insert("c", result(2))


def test_the_buffer_is_there_after_a_resume(shared_url: str) -> None:
    """Whatever became of the process before: what was inserted is committed, and counts its samples."""
    first = table(shared_url, max_times_sampled=2)
    for number in range(3):
        first.insert(f"{number}", result(number))
    first.sample(2)
    resumed = table(shared_url, max_times_sampled=2)
    assert len(resumed) == 3
    assert numbers(resumed.sample(3)) == [0, 1, 2]
    assert len(resumed) == 1
    resumed.close()
    first.close()


def test_a_capacity_below_min_size_is_refused() -> None:
    """Instead of waiting for ever."""
    with pytest.raises(ConfigError, match=r"max_size \(capacity\) 8 is below min_size 9: nothing could ever"):
        table(rate_limiter=replay_buffer_lib.MinSize(9))


def test_priorities_reach_the_draws() -> None:
    """Those given to insert, and later ones."""
    replay = table(sampler=replay_buffer_lib.make_selector("prioritized"), seed=1)
    uids = [replay.insert(f"{number}", result(number), priority) for number, priority in enumerate((1e-9, 1e9, 1e-9))]
    assert numbers(replay.sample(1)) == [1]
    assert replay.update_priorities({uids[2]: 1e9, uids[1]: 5.0}) == 1
    assert numbers(replay.sample(1)) == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_size": 0}, "max_size must be a whole number of at least 1, got 0"),
        ({"max_times_sampled": 0}, "max_times_sampled must be a whole number of at least 1"),
        ({"rate_limiter": replay_buffer_lib.MinSize(0)}, "min_size must be"),
        ({"rate_limiter": 4}, "rate_limiter must be a MinSize, got int"),
        ({"sampler": "unifrom"}, "did you mean 'uniform'"),
        ({"samples_per_insert": 2}, "samples_per_insert 2 can't be reached with max_times_sampled 1"),
    ],
)
def test_what_could_never_be_sampled_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table(**changes)


def test_other_policies_will_do_too() -> None:
    assert isinstance(replay_buffer_lib.make_selector("staleness"), StalenessPolicy)
    with pytest.raises(ConfigError, match="unknown policy 'median'"):
        replay_buffer_lib.make_selector("median")
