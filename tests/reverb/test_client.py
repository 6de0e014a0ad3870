"""Reverb's client, for callers without an event loop."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import Counter
from typing import Any, NamedTuple

import pytest

import replaybuf.integrations.reverb as reverb
from replaybuf import ConfigError, FullError, NotReadyError
from replaybuf.errors import InputError, RolloutError


def table(name: str = "replay", **changes: Any) -> reverb.Table:
    arguments: dict[str, Any] = {
        "sampler": reverb.selectors.Uniform(),
        "remover": reverb.selectors.Fifo(),
        "max_size": 100,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
        "seed": 1,
    }
    return reverb.Table(name=name, **(arguments | changes))


def test_an_item_is_inserted_into_several_tables(url: str) -> None:
    with reverb.Client(url, tables=[table(), reverb.Table.stack("stack", 2)]) as client:
        keys = client.insert([0, 1], priorities={"replay": 1.0, "stack": 2.0})
        [[sample]] = client.sample("stack")
        assert sample == reverb.ReplaySample((keys["stack"], 1.0, 1, 2.0, 1), [0, 1])
        assert {name: info.current_size for name, info in client.server_info().items()} == {"replay": 1, "stack": 0}


def sizes(client: reverb.Client) -> dict[str, int]:
    return {name: info.current_size for name, info in client.server_info().items()}


def test_tables_before_one_without_room_keep_their_item() -> None:
    tables = [table("a"), reverb.Table.queue("full", 1)]
    with reverb.Client("memory://", tables) as client:
        client.insert(0, {"full": 1.0})
        with pytest.raises(FullError, match="nothing was stored"):
            client.insert(1, {"a": 1.0, "full": 1.0}, timeout=0.01)
        assert {name: info.current_size for name, info in client.server_info().items()} == {"a": 1, "full": 1}


def test_samples_come_as_lists_of_timesteps_or_by_themselves(url: str) -> None:
    with reverb.Client(url, tables=[table()]) as client:
        client.insert(7, {"replay": 1.0})
        assert [[one.data for one in sample] for sample in client.sample("replay", 2, emit_timesteps=True)] == [
            [7],
            [7],
        ]
        assert [sample.data for sample in client.sample("replay", 2, emit_timesteps=False)] == [7, 7]


class Step(NamedTuple):
    observation: Any
    reward: float = 0.0


def test_named_tuples_need_types() -> None:
    with reverb.Client("memory://", tables=[table("typed", types=[Step]), table("other")]) as client:
        client.insert({"steps": [Step(1)]}, {"typed": 1.0})
        [typed] = client.sample_batch("typed", 1)
        assert typed.data == {"steps": [Step(1)]}
        assert type(typed.data["steps"][0]) is Step
        with pytest.raises(RolloutError, match=r"add types=\[Step\]"):
            client.insert(Step(1), {"other": 1.0})


def test_errors_are_caught_by_reverbs_names(shared_url: str) -> None:
    with reverb.Client(shared_url, tables=[table()]) as client:
        with pytest.raises(reverb.errors.DeadlineExceededError, match="server_info"):
            client.server_info(timeout=0)
        assert client.server_info(timeout=60)["replay"].current_size == 0
        with pytest.raises(reverb.errors.DeadlineExceededError):
            client.sample_batch("replay", 1, timeout=0.01)
        with pytest.raises(reverb.errors.ReverbError):
            client.sample("other")


def test_samples_are_independent() -> None:
    """One item may come again, as in Reverb, and each by its priority; a batch has different ones."""
    with reverb.Client("memory://", tables=[table(sampler=reverb.selectors.Prioritized(1.0))]) as client:
        keys = {data: client.insert(data, {"replay": data})["replay"] for data in (1, 3)}
        drawn = Counter(sample.data for [sample] in client.sample("replay", 400))
        assert 250 < drawn[3] < 350
        batch = client.sample_batch("replay", 2)
        assert {sample.data for sample in batch} == {1, 3}
        client.mutate_priorities("replay", updates={keys[1]: 9.0}, deletes=[keys[3], 10**9])
        assert [sample.info.priority for sample in client.sample_batch("replay", 9, at_least=1)] == [9.0]
        client.reset("replay")
        with pytest.raises(NotReadyError):
            next(iter(client.sample("replay", timeout=0)))


def insert_some(client: reverb.Client, count: int) -> None:
    """A worker's program."""
    with client:
        for number in range(count):
            client.insert(number, {"queue": 1.0})


def test_a_client_goes_to_other_processes(shared_url: str) -> None:
    """They insert into the same table, and wait for the same room."""
    with reverb.Client(shared_url, tables=[reverb.Table.queue("queue", 4)]) as client:
        worker = multiprocessing.get_context("forkserver").Process(target=insert_some, args=(client, 20))
        worker.start()
        assert [sample.data for [sample] in client.sample("queue", 20, timeout=30)] == list(range(20))
        worker.join(30)
        assert worker.exitcode == 0
        assert client.server_info()["queue"].num_deleted_episodes == 20


def test_all_tables_go_back_to_a_checkpoint(shared_url: str) -> None:
    """In another client too, which was sent to another process."""
    tables = [table(), reverb.Table.queue("queue", 9)]
    with reverb.Client(shared_url, tables) as client:
        client.insert("a", {"replay": 1.0, "queue": 1.0})
        assert (client.checkpoint(), client.checkpoint(), client.checkpoint(7)) == (1, 2, 7)
        list(client.sample("queue"))
        client.reset("replay")
        with pickle.loads(pickle.dumps(client)) as again:
            assert again.restore() == 7
            assert {info.current_size for info in again.server_info().values()} == {1}


def test_tables_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="two of the name replay"):
        reverb.Client("memory://", tables=[table(), table()])
    with pytest.raises(ConfigError, match="at least one"):
        reverb.Client("memory://", tables=[])
    with reverb.Client("memory://", tables=[table()]) as client:
        for call in (lambda: client.sample("other"), lambda: client.insert(1, {"other": 1.0})):
            with pytest.raises(InputError, match="there is no table 'other'; there are replay"):
                call()
        with pytest.raises(InputError, match="priorities"):
            client.insert(1, {})


def test_a_client_shows_no_password() -> None:
    client = reverb.Client("postgresql://me:secret@host/db", tables=[table()])
    assert "secret" not in repr(client) + repr(client.table("replay"))
