"""From figures, which are nested dicts, to samples: a name, labels and a number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from replaybuf import __version__
from replaybuf.observe.catalogue import OF_BUFFER, OF_DATABASE, Metric

#: The most values of a label that users choose: further tasks are added up as one.
MOST_TASKS = 100
_OTHERS = "(others)"
_DONT_ADD_UP = ("reward", "oldest_at")


class Sample(NamedTuple):
    """A number of a time series."""

    series: str
    labels: dict[str, str]
    value: float


def samples_of(figures: Mapping[str, Any], buffer: str) -> list[tuple[Metric, list[Sample]]]:
    """Return the samples of each metric that has any.

    `figures` are those of `buffer.metrics()`, which don't say which buffer they are of, or of `read_figures`.
    """
    database = figures if "buffers" in figures else {"buffers": {buffer: figures}}
    of_database = {"up": 1, "info": {__version__: 1}, **database}
    buffers = {name: _bounded(numbers) for name, numbers in database["buffers"].items()}
    found: dict[Metric, list[Sample]] = {}
    for one in OF_BUFFER:
        found[one] = [s for name, numbers in buffers.items() for s in _read(one, numbers, {"buffer": name})]
    for one in OF_DATABASE:
        found[one] = [*_read(one, of_database, {})]
    return [(one, samples) for one, samples in found.items() if samples]


def _bounded(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a buffer with at most `MOST_TASKS` tasks, and datasets."""
    tasks = numbers.get("tasks", {})
    bounded = {**numbers, "tasks": tasks}
    if len(tasks) > MOST_TASKS:
        names = sorted(tasks)
        bounded["tasks"] = {name: tasks[name] for name in names[:MOST_TASKS]}
        bounded["tasks"][_OTHERS] = _sum([tasks[name] for name in names[MOST_TASKS:]])
    if prompts := numbers.get("prompts"):
        bounded["prompts"] = dict(islice(sorted(prompts.items()), MOST_TASKS))
    return bounded


def _sum(several: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return the sums of numbers, at their places in nested dicts; without those that can't be added up."""
    total: dict[Any, Any] = {}
    for one in several:
        for name, value in one.items():
            if isinstance(value, Mapping):
                if name not in _DONT_ADD_UP:
                    total[name] = _sum([total.get(name, {}), value])
            elif name not in _DONT_ADD_UP and value is not None:
                total[name] = total.get(name, 0) + value
    return total


def _read(metric: Metric, figures: Mapping[str, Any], labels: dict[str, str]) -> Iterator[Sample]:
    for values, found in _follow(metric.path.split("/"), figures):
        named = labels | dict(zip(metric.labels, values, strict=True))
        if metric.bounds:
            yield from _histogram(metric, found, named)
        elif found is not None:
            yield Sample(metric.name, named, found)


def _follow(path: list[str], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what is at a path, with the names that its stars stand for."""
    if not path:
        yield (), value
    elif isinstance(value, Mapping):
        star = path[0] == "*"
        for name in value if star else (path[0],) if path[0] in value else ():
            for names, found in _follow(path[1:], value[name]):
                yield ((str(name), *names) if star else names), found


def _histogram(metric: Metric, counts: Mapping[int, int], labels: dict[str, str]) -> Iterator[Sample]:
    bucket, gcount, gsum = metric.series
    numbers = {int(value): count for value, count in counts.items()}
    for bound in metric.bounds:
        yield Sample(bucket, {**labels, "le": str(bound)}, sum(n for value, n in numbers.items() if value <= bound))
    total = sum(numbers.values())
    yield Sample(bucket, {**labels, "le": "+Inf"}, total)
    yield Sample(gcount, labels, total)
    yield Sample(gsum, labels, sum(value * n for value, n in numbers.items()))
