"""Reverb's client and tables."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import replaybuf.integrations.reverb as reverb
from replaybuf import ConfigError, FullError, NotReadyError
from replaybuf.errors import CheckpointError, InputError, RolloutError
from replaybuf.integrations.reverb import SAMPLE_TIMEOUT, Client, Table
from replaybuf.integrations.reverb.rate_limiters import MinSize, SampleToInsertRatio
from replaybuf.integrations.reverb.selectors import Fifo, Lifo, MaxHeap, MinHeap, Prioritized, Selector
from tests.scripts import Script

SOON = 20


def table(**changes: Any) -> Table:
    arguments: dict[str, Any] = {
        "name": "replay",
        "sampler": Fifo(),
        "remover": Fifo(),
        "max_size": 100,
        "rate_limiter": MinSize(1),
        "extensions": (),
        "signature": None,
        "seed": 7,
    }
    return Table(**arguments | changes)


def opened(url: str = "memory://", **changes: Any) -> Client:
    return Client(url, [table(**changes)])


def insert(client: Client, data: Any, priority: float = 1.0) -> int:
    return client.insert(data, {"replay": priority})["replay"]


def data_of(client: Client, num_samples: int, name: str = "replay", **options: Any) -> list[Any]:
    return [sample.data for sample in client.sample_batch(name, num_samples, **options)]


def sizes(client: Client, *names: str) -> dict[str, int]:
    return {name: len(client.buffer(name)) for name in names}


def test_an_item_comes_back_as_it_was_inserted(url: str) -> None:
    """With what Reverb says of it."""
    step = {"observation": np.arange(6, dtype=np.uint8).reshape(2, 3), "rest": [1.5, ("a", None)]}
    with opened(url) as client:
        key = insert(client, step, priority=2.0)
        insert(client, [np.float32(1.0)])
        first, second = client.sample_batch("replay", 2)
        assert first.info == (key, 1.0, 2, 2.0, 1)
        np.testing.assert_array_equal(first.data["observation"], step["observation"])
        assert first.data["rest"] == step["rest"]
        assert second.data == [np.float32(1.0)]
        assert client.sample_batch("replay", 1)[0].info.times_sampled == 2


def test_tables_in_one_database_are_apart(shared_url: str) -> None:
    """Each has its own limits, also for another process that opens it."""
    tables = [table(), Table.queue("queue", 2)]
    with Client(shared_url, tables) as client, Client(shared_url, tables) as other:
        for number in range(2):
            client.insert(number, {"queue": 1.0})
        insert(client, "a")
        with pytest.raises(FullError, match=r"error_buffer \(0, 2\) allows no more"):
            client.insert(2, {"queue": 1.0}, timeout=0)
        assert data_of(other, 2, "queue") == [0, 1]
        assert sizes(client, "queue", "replay") == {"queue": 0, "replay": 1}


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [(Fifo(), [1, 5, 3]), (Lifo(), [3, 5, 1]), (MinHeap(), [1, 3, 5]), (MaxHeap(), [5, 3, 1])],
)
def test_a_sampler_gives_items_in_its_order(url: str, sampler: Selector, expected: list[int]) -> None:
    with opened(url, sampler=sampler) as client:
        for number in (1, 5, 3):
            insert(client, number, priority=number)
        assert data_of(client, 3) == expected
        assert {sample.info.probability for sample in client.sample_batch("replay", 3)} == {1.0}


@pytest.mark.parametrize(("remover", "left"), [(Fifo(), [5, 3]), (Lifo(), [1, 5])])
def test_a_remover_makes_room(remover: Selector, left: list[int]) -> None:
    """Beyond max_size."""
    with opened(remover=remover, max_size=2) as client:
        for number in (1, 5, 3):
            insert(client, number)
        assert len(data_of(client, 2)) == 2
        assert data_of(client, 2) == left


def test_an_item_leaves_with_its_last_sample() -> None:
    with opened(max_times_sampled=2) as client:
        insert(client, "a")
        assert data_of(client, 1) == data_of(client, 1) == ["a"]
        assert sizes(client, "replay") == {"replay": 0}


def test_priorities_have_an_exponent(url: str) -> None:
    """Probabilities are proportional to priority ** exponent, and priorities come back as they were given."""
    priorities = {0: 1.0, 1: 4.0, 2: 9.1, 3: 0.0}
    with opened(url, sampler=Prioritized(0.5)) as client:
        keys = {number: insert(client, number, priority) for number, priority in priorities.items()}
        client.mutate_priorities("replay", {keys[0]: 16.0, 10**6: 1.0})
        samples = {sample.data: sample.info for sample in client.sample_batch("replay", 4)}
    total = 4.0 + 2.0 + math.sqrt(9.1)
    assert [samples[number].priority for number in range(4)] == [16.0, 4.0, 9.1, 0.0]
    assert samples[0].probability == pytest.approx(4.0 / total)
    assert samples[2].probability == pytest.approx(math.sqrt(9.1) / total)
    assert {info.table_size for info in samples.values()} == {4}
    assert list(samples)[-1] == 3


def test_priorities_may_be_far_apart(url: str) -> None:
    """Farther than a probability can say."""
    with opened(url, sampler=Prioritized(1.0), max_times_sampled=1) as client:
        for priority in (1e-300, 1e300, 0.0):
            insert(client, priority, priority)
        assert [sample.info.table_size for sample in client.sample_batch("replay", 2)] == [3, 3]
        assert data_of(client, 1) == [0.0]


def test_without_an_exponent_all_items_are_alike() -> None:
    with opened(sampler=Prioritized(0)) as client:
        for priority in (0.0, 7.0):
            insert(client, "a", priority)
        samples = client.sample_batch("replay", 2)
        assert {sample.info[1:4] for sample in samples} == {(0.5, 2, 0.0), (0.5, 2, 7.0)}


def test_priorities_beyond_floats_are_refused() -> None:
    with opened(sampler=Prioritized(3)) as client:
        for priority in (1e200, 1e-200, -1.0, math.nan):
            with pytest.raises(InputError, match="priority"):
                insert(client, "a", priority)


def test_a_sample_waits_for_as_many_as_it_needs(url: str) -> None:
    """Or for fewer, and takes up to its number."""
    assert SAMPLE_TIMEOUT == 600
    with opened(url, rate_limiter=MinSize(2)) as client, ThreadPoolExecutor() as pool:
        insert(client, 0)
        with pytest.raises(NotReadyError, match="task replay: 1 completed group there, 2 needed, but min_size is 2"):
            client.sample_batch("replay", 2, timeout=0.01)
        sampling = pool.submit(data_of, client, 5, at_least=3, timeout=SOON)
        for number in (1, 2):
            insert(client, number)
        assert sampling.result() == [0, 1, 2]


def test_items_are_removed_by_key(url: str) -> None:
    limiter = SampleToInsertRatio(samples_per_insert=2, min_size_to_sample=1, error_buffer=(-1, 6))
    with opened(url, rate_limiter=limiter, max_times_sampled=2) as client:
        keys = [insert(client, number) for number in range(3)]
        client.mutate_priorities("replay", deletes=[keys[1], 10**6])
        client.mutate_priorities("replay", deletes=[])
        assert data_of(client, 2) == [0, 2]
        numbers = client.buffer("replay").metrics()["tasks"]["replay"]
        assert (numbers["buffered"]["completed"], numbers["put"], numbers["sampled_new"]) == (2, 3, 2)
        client.reset("replay")
        assert sizes(client, "replay") == {"replay": 0}


#: Arguments of a table, and what is said of them.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_size": 0}, "table replay: .*capacity"),
    ({"sampler": object()}, r"sampler must be one of replaybuf\.integrations\.reverb\.selectors"),
    ({"rate_limiter": Fifo()}, r"rate_limiter must be one of replaybuf\.integrations\.reverb\.rate_limiters"),
    ({"signature": {"a": 1}}, "table replay: .*signature is no field"),
    *(({"max_times_sampled": times}, "table replay: .*max_times_sampled") for times in (1.5, None, "2")),
    ({"capacity": 5, "url": "memory://"}, "table replay: capacity, url is said by the table's own arguments"),
    ({"name": ""}, "name"),
    ({"max_size": 3, "rate_limiter": MinSize(4)}, "capacity 3 is below min_size 4: nothing could ever be drawn"),
    (
        {"sampler": Prioritized(0.6), "remover": Prioritized(1.0)},
        "remover: its priority_exponent has to be that of the sampler",
    ),
    (
        {"rate_limiter": SampleToInsertRatio(4, 1, 8), "max_times_sampled": 1},
        "samples_per_insert 4 can't be reached with max_times_sampled 1",
    ),
    ({"rate_limiter": SampleToInsertRatio(1, 1, 0.5)}, "error_buffer 0.5 is too small"),
    ({"durability": "total"}, "durability: Input should be"),
]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((partial(table, **changes), message) for changes, message in REFUSED),
        (partial(Table.queue, "queue", 0), "table queue: .*capacity"),
        (partial(Table.queue, "queue", "x"), "table queue: .*capacity"),
        (partial(Prioritized, -1), "priority_exponent must be a number of at least 0"),
    ],
)
def test_what_can_never_work_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_item_is_inserted_into_several_tables(url: str) -> None:
    with Client(url, tables=[table(), Table.stack("stack", 2)]) as client:
        keys = client.insert([0, 1], priorities={"replay": 1.0, "stack": 2.0})
        [[sample]] = client.sample("stack")
        assert sample == reverb.ReplaySample((keys["stack"], 1.0, 1, 2.0, 1), [0, 1])
        assert sizes(client, "replay", "stack") == {"replay": 1, "stack": 0}


def test_tables_before_one_without_room_keep_their_item() -> None:
    tables = [table(name="a"), Table.queue("full", 1)]
    with Client("memory://", tables) as client:
        client.insert(0, {"full": 1.0})
        with pytest.raises(FullError, match="nothing was stored"):
            client.insert(1, {"a": 1.0, "full": 1.0}, timeout=0.01)
        assert sizes(client, "a", "full") == {"a": 1, "full": 1}


class Step(NamedTuple):
    observation: Any
    reward: float = 0.0


def test_named_tuples_need_types() -> None:
    tables = [table(name="typed", types=[Step]), table(name="other")]
    with Client("memory://", tables=tables) as client:
        client.insert({"steps": [Step(1)]}, {"typed": 1.0})
        [typed] = client.sample_batch("typed", 1)
        assert typed.data == {"steps": [Step(1)]}
        assert type(typed.data["steps"][0]) is Step
        with pytest.raises(RolloutError, match=r"add types=\[Step\]"):
            client.insert(Step(1), {"other": 1.0})


def test_errors_are_caught_by_reverbs_names(shared_url: str) -> None:
    with Client(shared_url, tables=[table()]) as client:
        with pytest.raises(reverb.errors.DeadlineExceededError):
            client.sample_batch("replay", 1, timeout=0.01)
        with pytest.raises(reverb.errors.ReverbError):
            client.sample("other")


def test_samples_are_independent() -> None:
    """One item may come again, as in Reverb, and each by its priority; a batch has different ones."""
    with Client("memory://", tables=[table(sampler=reverb.selectors.Prioritized(1.0))]) as client:
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
    with Client(shared_url, tables=[Table.queue("queue", 4)]) as client:
        worker = Script(_INSERTS, pickle.dumps(client).hex())
        assert [sample.data for [sample] in client.sample("queue", 20, timeout=30)] == list(range(20))
        assert worker.end() == (0, "", "")
        assert sizes(client, "queue") == {"queue": 0}


def test_all_tables_go_back_to_a_checkpoint(shared_url: str) -> None:
    """In another client too, which was sent to another process."""
    tables = [table(), Table.queue("queue", 9)]
    with Client(shared_url, tables) as client:
        client.insert("a", {"replay": 1.0, "queue": 1.0})
        assert (client.checkpoint(), client.checkpoint(), client.checkpoint(7)) == (1, 2, 7)
        list(client.sample("queue"))
        client.reset("replay")
        with pickle.loads(pickle.dumps(client)) as unpickled:
            assert unpickled.restore() == 7
            assert {*sizes(unpickled, "replay", "queue").values()} == {1}


def test_a_checkpoint_that_not_all_tables_have_restores_none(shared_url: str) -> None:
    """Its process was killed between two of them."""
    tables = [table(), Table.queue("queue", 9)]
    with Client(shared_url, tables) as client:
        client.checkpoint(4)
        client.buffer("replay").checkpoint(5)
        client.insert("a", {"replay": 1.0, "queue": 1.0})
        with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are those of the steps 4"):
            client.restore(5)
        assert {*sizes(client, "replay", "queue").values()} == {1}
        assert client.restore() == 4
        assert {*sizes(client, "replay", "queue").values()} == {0}


def test_tables_that_are_not_there_are_refused() -> None:
    for tables in ([table(), table()], [], ["replay"]):
        with pytest.raises(ConfigError, match="at least one table, each of another name"):
            Client("memory://", tables=tables)
    with Client("memory://", tables=[table()]) as client:
        for call in (lambda: client.sample("other"), lambda: client.insert(1, {"other": 1.0})):
            with pytest.raises(InputError, match="there is no table 'other'; there are replay"):
                call()
        with pytest.raises(InputError, match="priorities"):
            client.insert(1, {})
        with pytest.raises(InputError, match="updates must be a dict of priorities by key, got"):
            client.mutate_priorities("replay", [(1, 2.0)])  # type: ignore[arg-type]


def test_a_client_shows_no_password() -> None:
    client = Client("postgresql://me:secret@host/db", tables=[table()])
    assert "secret" not in repr(client) + repr(client.buffer("replay"))
