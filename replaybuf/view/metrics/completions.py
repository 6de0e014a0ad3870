"""Tables of completions for wandb and trackio: the prompts, responses and rewards of a batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, get_args

from replaybuf.common.checks import check_step, needed
from replaybuf.errors import InputError
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.outline import reward_parts
from replaybuf.values.rollouts.rewards import SCORE, reward_value
from replaybuf.values.rollouts.rollout_type import RolloutType

#: The names of numbers for each kind of groups; `docs/metrics.md` explains them.
NAMES = (
    *("groups", "rollouts", "reward/mean", "reward/min", "reward/max", "staleness/mean", "staleness/max"),
    "age_seconds/max",
)
#: The kinds of groups in a batch: drawn for the first time, and drawn before.
KINDS = ("new", "replayed")


def batch_metrics(drawn: Drawn, *, now: float, prefix: str = "batch/") -> dict[str, float]:
    """Return numbers of a batch for a logger, flat: `{"batch/new/groups": 60, "batch/replayed/groups": 4, ...}`.

    `drawn` is the result of `sample`, or `lease.items`; `now` is in seconds since the epoch (`time.time()`). Groups
    never drawn before are `new`, the others `replayed`. A kind without groups has only its number, and one without
    rewards no figures of rewards. Raises InputError.
    """
    items = items_of(drawn)
    numbers: dict[str, float] = {}
    for kind in KINDS:
        chosen = [item for item in items if (item.times_sampled > 1) == (kind == "replayed")]
        numbers |= {f"{prefix}{kind}/{name}": value for name, value in _numbers(chosen, now).items()}
    return numbers


def _numbers(items: Sequence[StorageItem[Any]], now: float) -> dict[str, float]:
    found: dict[str, float] = {"groups": len(items), "rollouts": sum(len(item.item) for item in items)}
    rewards = [item.reward for item in items if item.reward is not None]
    staleness = [item.staleness for item in items]
    found |= _of(rewards, "reward", mean=fmean, min=min, max=max)
    found |= _of(staleness, "staleness", mean=fmean, max=max)
    found |= _of([now - item.created_at for item in items], "age_seconds", max=max)
    return found


def _of(values: Sequence[float], name: str, **functions: Callable[[Iterable[float]], float]) -> dict[str, float]:
    return {f"{name}/{what}": function(values) for what, function in functions.items()} if values else {}


Choice = Literal["first", "random", "best", "worst", "extremes"]

#: Drawn groups with their metadata, by task or not: results of `sample` and `find`, or `lease.items`.
Drawn = Mapping[str, Sequence[StorageItem]] | Iterable[StorageItem]

#: The columns of every table; the parts of rewards come after `reward`, in columns of their own (`reward/NAME`).
COLUMNS = (
    *("step", "task", "uid", "rollout", "worker", "replayed", "staleness", "prompt", "response", "tokens"),
    *("finish_reason", "reward", "advantage"),
)
_Get = Callable[[Any, str], Any]
_CHOICES = get_args(Choice)
_MOST_PARTS = 20
_MISSING = "to_{0}() needs {0}, which is not installed: pip install {0}"


@dataclass(frozen=True, slots=True)
class Completions:
    """A table: the names of its columns, and rows of texts, numbers, truth values and None."""

    columns: list[str]
    rows: list[list[Any]]

    def dicts(self) -> list[dict[str, Any]]:
        """Return the rows as dicts."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_wandb(self) -> Any:
        """Return a `wandb.Table`. Raises MissingDriverError without the package wandb."""
        return needed("wandb", _MISSING.format("wandb")).Table(
            columns=self.columns, data=self.rows, allow_mixed_types=True
        )

    def to_trackio(self) -> Any:
        """Return a `trackio.Table`. Raises MissingDriverError without the package trackio.

        trackio renders texts as Markdown, so tags, links and images are escaped as entities.
        """
        trackio = needed("trackio", _MISSING.format("trackio"))
        rows = [[as_markdown(value) if isinstance(value, str) else value for value in row] for row in self.rows]
        return trackio.Table(columns=[as_markdown(name) for name in self.columns], data=rows)


@dataclass(frozen=True, slots=True)
class _Rollout:
    """A rollout on its way into the table."""

    position: int
    item: StorageItem
    rollout: Any
    advantage: float | None
    reward: float | None


def completions_table(
    drawn: Drawn,
    *,
    step: int | None = None,
    advantages: Sequence[float] | None = None,
    rows: int = 32,
    choose: Choice = "extremes",
    seed: int = 0,
    characters: int = 2000,
    rollout_type: RolloutType | None = None,
) -> Completions:
    """Return a table with a row for each of at most `rows` rollouts of a batch.

    `step` is the train step (default: that for which a group was last drawn), and `advantages` has one number for each
    rollout of the batch, in its order. Of more than `rows` rollouts, `choose` selects the first, the best, the worst,
    half of each (`extremes`), or any (`random`): the same ones for the same batch, `step` and `seed`. Prompts and
    responses are cut after `characters` characters. `rollout_type` is that of the buffer, if its fields have other
    names. The column `replayed` is true for groups that were drawn before. Texts are those of the rollouts, except for
    NUL and lone surrogates, and aren't escaped for display.

    Raises InputError.
    """
    if step is not None:
        step = check_step(step, "step")
    if choose not in _CHOICES:
        raise InputError(f"choose must be one of {', '.join(map(repr, _CHOICES))}, not {choose!r:.100}")
    for name, number in (("rows", rows), ("characters", characters)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise InputError(f"{name} must be a whole number that isn't negative, got {number!r:.100}")
    get = rollout_type.get if rollout_type is not None else _get
    key = SCORE if rollout_type is None else rollout_type.reward_key
    there = list(_rollouts(items_of(drawn), advantages, get, key))
    chosen = _chosen(there, rows, choose, random.Random(f"{seed} {step}"))
    parts = [reward_parts(get(one.rollout, "reward")) for one in chosen]
    names = list(dict.fromkeys(name for part in parts for name in part))[:_MOST_PARTS]
    before = COLUMNS[:-1]
    columns = [*before, *(f"reward/{name}" for name in names), COLUMNS[-1]]
    return Completions(
        columns,
        [
            [*_values(one, step, characters, get), *(part.get(name) for name in names), one.advantage]
            for one, part in zip(chosen, parts, strict=True)
        ],
    )


def items_of(drawn: Drawn) -> list[StorageItem]:
    """Return all groups in a list. Raises InputError for anything else."""
    found = [item for items in drawn.values() for item in items] if isinstance(drawn, Mapping) else list(drawn)
    for item in found:
        if not isinstance(item, StorageItem):
            raise InputError(
                f"expected StorageItems, as sample(), lease.items and find() give them, got {type(item).__name__}"
            )
    return found


def _rollouts(
    items: Sequence[StorageItem], advantages: Sequence[float] | None, get: _Get, reward_key: str
) -> Iterator[_Rollout]:
    total = sum(len(item.item) for item in items)
    given = [None] * total if advantages is None else [float(one) for one in advantages]
    if len(given) != total:
        raise InputError(f"there are {total} rollouts, and {len(given)} advantages: give one for each, in their order")
    there = ((item, position, rollout) for item in items for position, rollout in enumerate(item.item))
    for (item, position, rollout), advantage in zip(there, given, strict=True):
        yield _Rollout(position, item, rollout, advantage, reward_value(get(rollout, "reward"), reward_key))


def _chosen(there: Sequence[_Rollout], rows: int, choose: Choice, rng: random.Random) -> list[_Rollout]:
    """Return the rollouts for the table: the best first, the worst last, others in the order of the batch."""
    if choose == "first":
        return list(there[:rows])
    if choose == "random":
        return [there[place] for place in sorted(rng.sample(range(len(there)), min(rows, len(there))))]
    # Rollouts without a reward are neither good nor bad; ties are broken at random, not by position.
    ranked = [(one, rng.random()) for one in there if one.reward is not None]
    ranked.sort(key=lambda pair: (-(pair[0].reward or 0.0), pair[1]))
    best = [one for one, _ in ranked]
    if choose == "best":
        return best[:rows]
    if choose == "worst":
        return best[max(0, len(best) - rows) :]
    return best if len(best) <= rows else [*best[: rows - rows // 2], *best[len(best) - rows // 2 :]]


def _values(one: _Rollout, step: int | None, characters: int, get: _Get) -> list[Any]:
    item, rollout = one.item, one.rollout
    return [
        item.trained_step if step is None else step,
        _text(item.task_name, characters),
        item.uid,
        one.position,
        _text(item.worker, characters),
        item.times_sampled > 1,
        item.staleness,
        _text(_prompt(rollout, get), characters),
        _text(get(rollout, "response"), characters),
        _length(get(rollout, "response_ids")),
        _text(get(rollout, "finish_reason"), characters),
        one.reward,
    ]


def _get(rollout: Any, name: str) -> Any:
    return rollout.get(name) if isinstance(rollout, Mapping) else getattr(rollout, name, None)


def _prompt(rollout: Any, get: _Get) -> str | None:
    """Return the prompt: a text, or the messages of a conversation, each below its role."""
    message = get(rollout, "message")
    if message is None:
        message = get(rollout, "prompt")
    if isinstance(message, str):
        return message
    if not isinstance(message, (list, tuple)):
        return None
    return "\n\n".join(
        f"{one.get('role', '')}: {_content(one.get('content'))}" if isinstance(one, Mapping) else str(one)
        for one in message
    )


def _content(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", f"({part.get('type')})")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _length(values: Any) -> int | None:
    try:
        return len(values)
    except TypeError:
        return None


def _text(value: Any, characters: int) -> str | None:
    """Return a text, or its beginning, without characters that some JSON parsers refuse."""
    if not isinstance(value, str):
        return None
    short = value if len(value) <= characters else value[:characters] + "…"
    return short.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def as_markdown(text: str) -> str:
    """Escape the Markdown of a text that could fetch or link anything."""
    for character in "&<[":
        text = text.replace(character, f"&#{ord(character)};")
    return text
