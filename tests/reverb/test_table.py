"""Reverb's client and tables."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import replaybuf.integrations.reverb as reverb
from replaybuf import ConfigError, FullError, NotReadyError
from replaybuf.buffer.sync import run
from replaybuf.errors import CheckpointError, InputError, RolloutError
from replaybuf.integrations.reverb import Table
from replaybuf.integrations.reverb.rate_limiters import MinSize, Queue, SampleToInsertRatio
from replaybuf.integrations.reverb.selectors import (
    Fifo,
    Lifo,
    MaxHeap,
    MinHeap,
    Prioritized,
    Selector,
)
from replaybuf.integrations.reverb.table import SAMPLE_TIMEOUT
from tests.scripts import Script

SOON = 20


def table(url: str | None = "memory://", **changes: Any) -> Table:
    arguments: dict[str, Any] = {
        "name": "replay",
        "sampler": Fifo(),
        "remover": Fifo(),
        "max_size": 100,
        "rate_limiter": MinSize(1),
        "seed": 7,
    }
    return Table(**{**arguments, **changes, "url": url})


async def data_of(replay: Table, num_samples: int, **options: Any) -> list[Any]:
    return [sample.data for sample in await replay.sample(num_samples, **options)]


async def test_an_item_comes_back_as_it_was_inserted(url: str) -> None:
    """With what Reverb says of it."""
    step = {"observation": np.arange(6, dtype=np.uint8).reshape(2, 3), "rest": [1.5, ("a", None)]}
    async with table(url) as replay:
        key = await replay.insert(step, priority=2.0)
        await replay.insert([np.float32(1.0)])
        first, second = await replay.sample(2)
        assert first.info == (key, 1.0, 2, 2.0, 1)
        np.testing.assert_array_equal(first.data["observation"], step["observation"])
        assert first.data["rest"] == step["rest"]
        assert second.data == [np.float32(1.0)]
        assert (await replay.sample(1))[0].info.times_sampled == 2


async def test_tables_in_one_database_are_apart(shared_url: str) -> None:
    """Each has its own limits, also for another process that opens it."""
    async with table(shared_url) as replay, Table.queue("queue", 2, url=shared_url) as queue:
        for number in range(2):
            await queue.insert(number)
        await replay.insert("a")
        with pytest.raises(FullError, match=r"error_buffer \(0, 2\) allows no more"):
            await queue.insert(2, timeout=0)
        async with queue.replace() as reopened:
            assert await data_of(reopened, 2) == [0, 1]
        assert not await queue.can_sample(1)
        assert await data_of(replay, 1) == ["a"]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [(Fifo(), [1, 5, 3]), (Lifo(), [3, 5, 1]), (MinHeap(), [1, 3, 5]), (MaxHeap(), [5, 3, 1])],
)
async def test_a_sampler_gives_items_in_its_order(url: str, sampler: Selector, expected: list[int]) -> None:
    async with table(url, sampler=sampler) as replay:
        for number in (1, 5, 3):
            await replay.insert(number, priority=number)
        assert await data_of(replay, 3) == expected
        assert {sample.info.probability for sample in await replay.sample(3)} == {1.0}


@pytest.mark.parametrize(("remover", "left"), [(Fifo(), [5, 3]), (MinHeap(), [5, 3]), (MaxHeap(), [1, 3])])
async def test_a_remover_makes_room(remover: Selector, left: list[int]) -> None:
    """Beyond max_size."""
    async with table(remover=remover, max_size=2) as replay:
        for number in (1, 5, 3):
            await replay.insert(number, priority=number)
        assert await data_of(replay, 2) == left


async def test_an_item_leaves_with_its_last_sample() -> None:
    async with table(max_times_sampled=2) as replay:
        await replay.insert("a")
        assert await data_of(replay, 1) == await data_of(replay, 1) == ["a"]
        assert not await replay.can_sample(1)


async def test_priorities_have_an_exponent(url: str) -> None:
    """Probabilities are proportional to priority ** exponent, and priorities come back as they were given."""
    priorities = {0: 1.0, 1: 4.0, 2: 9.1, 3: 0.0}
    async with table(url, sampler=Prioritized(0.5)) as replay:
        keys = {number: await replay.insert(number, priority) for number, priority in priorities.items()}
        await replay.update_priorities({keys[0]: 16.0, 10**6: 1.0})
        samples = {sample.data: sample.info for sample in await replay.sample(4)}
    total = 4.0 + 2.0 + math.sqrt(9.1)
    assert [samples[number].priority for number in range(4)] == [16.0, 4.0, 9.1, 0.0]
    assert samples[0].probability == pytest.approx(4.0 / total)
    assert samples[2].probability == pytest.approx(math.sqrt(9.1) / total)
    assert {info.table_size for info in samples.values()} == {4}
    assert list(samples)[-1] == 3


async def test_priorities_may_be_far_apart(url: str) -> None:
    """Farther than a probability can say."""
    async with table(url, sampler=Prioritized(1.0), max_times_sampled=1) as replay:
        for priority in (1e-300, 1e300, 0.0):
            await replay.insert(priority, priority)
        assert [sample.info.table_size for sample in await replay.sample(2)] == [3, 3]
        assert await data_of(replay, 1) == [0.0]


async def test_without_an_exponent_all_items_are_alike() -> None:
    async with table(sampler=Prioritized(0)) as replay:
        for priority in (0.0, 7.0):
            await replay.insert("a", priority)
        assert {sample.info[1:4] for sample in await replay.sample(2)} == {(0.5, 2, 0.0), (0.5, 2, 7.0)}


async def test_priorities_beyond_floats_are_refused() -> None:
    async with table(sampler=Prioritized(3)) as replay:
        for priority in (1e200, 1e-200, -1.0, math.nan):
            with pytest.raises(InputError, match="priority"):
                await replay.insert("a", priority)


async def test_a_sample_waits_for_as_many_as_it_needs(url: str) -> None:
    """Or for fewer, and takes up to its number."""
    assert SAMPLE_TIMEOUT == 600
    async with table(url, rate_limiter=MinSize(2)) as replay:
        await replay.insert(0)
        with pytest.raises(NotReadyError, match="task replay: 1 completed group there, 2 needed, but min_size is 2"):
            await replay.sample(2, timeout=0.01)
        sampling = asyncio.create_task(data_of(replay, 5, at_least=3, timeout=SOON))
        for number in (1, 2):
            await replay.insert(number)
        assert await sampling == [0, 1, 2]


async def test_items_are_removed_by_key(url: str) -> None:
    async with table(url) as replay:
        keys = [await replay.insert(number) for number in range(4)]
        assert await replay.delete([keys[1], 10**6]) == 1
        assert await replay.delete([]) == 0
        assert await data_of(replay, 3) == [0, 2, 3]
        assert await replay.reset() == 3
        assert not await replay.can_sample(1)


async def test_an_item_with_a_key_replaces_the_one_before(url: str) -> None:
    async with table(url) as replay:
        await replay.insert("old", key="a")
        await replay.insert("new", key="a")
        assert await data_of(replay, 9, timeout=0) == ["new"]


async def test_what_is_known_of_a_table(url: str) -> None:
    limiter = SampleToInsertRatio(samples_per_insert=2, min_size_to_sample=1, error_buffer=(-1, 6))
    async with table(url, rate_limiter=limiter, max_times_sampled=2) as replay:
        keys = [await replay.insert(number) for number in range(3)]
        assert not await replay.can_insert(1)
        for _ in range(3):
            await replay.sample(1)
        await replay.delete([keys[1]])
        numbers = (await replay.buffer.metrics())["tasks"]["replay"]
        totals = [numbers[name] for name in ("put", "sampled_new", "sampled_again")]
        assert (numbers["buffered"]["completed"], totals) == (1, [3, 2, 1])


#: Arguments of a table, and what is said of them.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name is empty"),
    ({"max_size": 0}, "table replay: max_size must be a whole number of at least 1"),
    ({"sampler": object()}, r"sampler must be one of replaybuf\.integrations\.reverb\.selectors"),
    ({"remover": "fifo"}, r"remover must be one of replaybuf\.integrations\.reverb\.selectors"),
    (
        {"rate_limiter": Fifo()},
        r"rate_limiter must be one of replaybuf\.integrations\.reverb\.rate_limiters",
    ),
    ({"extensions": [object()]}, "extensions"),
    ({"signature": {"a": 1}}, "signature"),
    ({"max_times_sampled": 1.5}, "max_times_sampled must be a whole number"),
    (
        {"max_size": 3, "rate_limiter": MinSize(4)},
        "max_size 3 is below min_size_to_sample 4: nothing could ever be drawn; raise max_size or lower",
    ),
    (
        {"sampler": Prioritized(0.6), "remover": Prioritized(1.0)},
        "remover: its priority_exponent has to be that of the sampler",
    ),
    (
        {"rate_limiter": SampleToInsertRatio(4, 1, 8), "max_times_sampled": 1},
        "samples_per_insert 4 can't be reached with max_times_sampled 1",
    ),
    (
        {"rate_limiter": SampleToInsertRatio(1, 1, (5, 10))},
        "above samples_per_insert \\* min_size_to_sample",
    ),
    ({"rate_limiter": SampleToInsertRatio(1, 1, 0.5)}, "error_buffer 0.5 is too small"),
    ({"capacity": 4}, "capacity is what the arguments of the table say"),
    ({"durabilty": "full"}, r"^table \w+: durabilty is no field; did you mean durability\?$"),
    ({"flavour": 3}, r"^table \w+: flavour is no field \(fields: url, "),
    ({"durability": "total"}, r"^table \w+: durability: Input should be"),
]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((partial(table, None, **changes), message) for changes, message in REFUSED),
        (partial(MinSize, 0), "min_size_to_sample must be a whole number of at least 1"),
        (partial(SampleToInsertRatio, 1, 0, 2), "min_size_to_sample"),
        (partial(Queue, 0), "size must be a whole number"),
        (partial(Prioritized, -1), "priority_exponent must be a number of at least 0"),
    ],
)
def test_what_can_never_work_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


async def test_a_definition_has_no_items() -> None:
    """Until it is given a url; it can be sent to other processes."""
    definition = pickle.loads(pickle.dumps(table(None, sampler=Prioritized(0.6), remover=Fifo())))
    assert repr(definition).startswith("Table('replay', Prioritized(priority_exponent=0.6), Fifo()")
    with pytest.raises(InputError, match="table replay has no url"):
        await definition.insert(1)
    async with definition.replace(url="memory://") as replay:
        assert isinstance(await replay.insert(1), int)


def sizes(client: reverb.Client, *names: str) -> dict[str, int]:
    return {name: len(client.table(name).buffer) for name in names}


def test_an_item_is_inserted_into_several_tables(url: str) -> None:
    with reverb.Client(url, tables=[table(None), reverb.Table.stack("stack", 2)]) as client:
        keys = client.insert([0, 1], priorities={"replay": 1.0, "stack": 2.0})
        [[sample]] = client.sample("stack")
        assert sample == reverb.ReplaySample((keys["stack"], 1.0, 1, 2.0, 1), [0, 1])
        assert sizes(client, "replay", "stack") == {"replay": 1, "stack": 0}


def test_tables_before_one_without_room_keep_their_item() -> None:
    tables = [table(None, name="a"), reverb.Table.queue("full", 1)]
    with reverb.Client("memory://", tables) as client:
        client.insert(0, {"full": 1.0})
        with pytest.raises(FullError, match="Nothing was stored"):
            client.insert(1, {"a": 1.0, "full": 1.0}, timeout=0.01)
        assert sizes(client, "a", "full") == {"a": 1, "full": 1}


def test_samples_come_as_lists_of_timesteps_or_by_themselves(url: str) -> None:
    with reverb.Client(url, tables=[table(None)]) as client:
        client.insert(7, {"replay": 1.0})
        assert [[step.data for step in sample] for sample in client.sample("replay", 2, emit_timesteps=True)] == [
            [7],
            [7],
        ]
        assert [sample.data for sample in client.sample("replay", 2, emit_timesteps=False)] == [7, 7]


class Step(NamedTuple):
    observation: Any
    reward: float = 0.0


def test_named_tuples_need_types() -> None:
    tables = [table(None, name="typed", types=[Step]), table(None, name="other")]
    with reverb.Client("memory://", tables=tables) as client:
        client.insert({"steps": [Step(1)]}, {"typed": 1.0})
        [typed] = client.sample_batch("typed", 1)
        assert typed.data == {"steps": [Step(1)]}
        assert type(typed.data["steps"][0]) is Step
        with pytest.raises(RolloutError, match=r"add types=\[Step\]"):
            client.insert(Step(1), {"other": 1.0})


def test_errors_are_caught_by_reverbs_names(shared_url: str) -> None:
    with reverb.Client(shared_url, tables=[table(None)]) as client:
        with pytest.raises(reverb.errors.DeadlineExceededError):
            client.sample_batch("replay", 1, timeout=0.01)
        with pytest.raises(reverb.errors.ReverbError):
            client.sample("other")


def test_samples_are_independent() -> None:
    """One item may come again, as in Reverb, and each by its priority; a batch has different ones."""
    with reverb.Client("memory://", tables=[table(None, sampler=reverb.selectors.Prioritized(1.0))]) as client:
        keys = {data: client.insert(data, {"replay": data})["replay"] for data in (1, 3)}
        draws = Counter(sample.data for [sample] in client.sample("replay", 400))
        assert 250 < draws[3] < 350
        batch = client.sample_batch("replay", 2)
        assert {sample.data for sample in batch} == {1, 3}
        client.mutate_priorities("replay", updates={keys[1]: 9.0}, deletes=[keys[3], 10**9])
        assert [sample.info.priority for sample in client.sample_batch("replay", 9, at_least=1)] == [9.0]
        client.reset("replay")
        with pytest.raises(NotReadyError):
            next(iter(client.sample("replay", timeout=0)))


_INSERTS = """
with pickle.loads(bytes.fromhex(sys.argv[1])) as client:
    for number in range(20):
        client.insert(number, {"queue": 1.0})
"""


def test_a_client_goes_to_other_processes(shared_url: str) -> None:
    """They insert into the same table, and wait for the same room."""
    with reverb.Client(shared_url, tables=[reverb.Table.queue("queue", 4)]) as client:
        worker = Script(_INSERTS, pickle.dumps(client).hex())
        assert [sample.data for [sample] in client.sample("queue", 20, timeout=30)] == list(range(20))
        assert worker.end() == (0, "", "")
        assert sizes(client, "queue") == {"queue": 0}


def test_all_tables_go_back_to_a_checkpoint(shared_url: str) -> None:
    """In another client too, which was sent to another process."""
    tables = [table(None), reverb.Table.queue("queue", 9)]
    with reverb.Client(shared_url, tables) as client:
        client.insert("a", {"replay": 1.0, "queue": 1.0})
        assert (client.checkpoint(), client.checkpoint(), client.checkpoint(7)) == (1, 2, 7)
        list(client.sample("queue"))
        client.reset("replay")
        with pickle.loads(pickle.dumps(client)) as unpickled:
            assert unpickled.restore() == 7
            assert {*sizes(unpickled, "replay", "queue").values()} == {1}


def test_a_checkpoint_that_not_all_tables_have_restores_none(shared_url: str) -> None:
    """Its process was killed between two of them."""
    tables = [table(None), reverb.Table.queue("queue", 9)]
    with reverb.Client(shared_url, tables) as client:
        client.checkpoint(4)
        run(client.table("replay").buffer.checkpoint(5))
        client.insert("a", {"replay": 1.0, "queue": 1.0})
        with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are those of the steps 4"):
            client.restore(5)
        assert {*sizes(client, "replay", "queue").values()} == {1}
        assert client.restore() == 4
        assert {*sizes(client, "replay", "queue").values()} == {0}


def test_tables_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="two of the name replay"):
        reverb.Client("memory://", tables=[table(None), table(None)])
    with pytest.raises(ConfigError, match="at least one"):
        reverb.Client("memory://", tables=[])
    with reverb.Client("memory://", tables=[table(None)]) as client:
        for call in (lambda: client.sample("other"), lambda: client.insert(1, {"other": 1.0})):
            with pytest.raises(InputError, match="there is no table 'other'; there are replay"):
                call()
        with pytest.raises(InputError, match="priorities"):
            client.insert(1, {})


def test_a_client_shows_no_password() -> None:
    client = reverb.Client("postgresql://me:secret@host/db", tables=[table(None)])
    assert "secret" not in repr(client) + repr(client.table("replay"))
