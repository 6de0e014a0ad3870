"""Numbers of a batch for loggers, and tables of its completions: the prompts, responses and rewards."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from replaybuf.common.checks import check_step, check_whole
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
#: Drawn groups with their metadata, by task or not: results of `sample` and `find`, or `lease.items`.
Drawn = Mapping[str, Sequence[StorageItem]] | Iterable[StorageItem]
Choice = Literal["first", "random", "extremes"]
_CHOICES = ("first", "random", "extremes")
_MOST_PARTS = 20


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
    found: dict[str, float] = {"groups": len(items), "rollouts": sum(item.rollouts for item in items)}
    if rewards := [item.reward for item in items if item.reward is not None]:
        found |= {"reward/mean": fmean(rewards), "reward/min": min(rewards), "reward/max": max(rewards)}
    if items:
        staleness = [item.staleness for item in items]
        found |= {"staleness/mean": fmean(staleness), "staleness/max": max(staleness)}
        found["age_seconds/max"] = max(now - item.created_at for item in items)
    return found


def completions_table(
    drawn: Drawn,
    *,
    step: int | None = None,
    advantages: Sequence[float] | None = None,
    rows: int = 32,
    choose: Choice = "extremes",
    characters: int = 2000,
    rollout_type: RolloutType | None = None,
) -> list[dict[str, Any]]:
    """Return a row of texts, numbers, truth values and None for each of at most `rows` rollouts of a batch.

    `step` is the train step (default: that for which a group was last drawn), and `advantages` has one number for each
    rollout of the batch, in its order. Of more than `rows` rollouts, `choose` selects the first, the best and the worst
    (`extremes`, half of each, the best first), or any (`random`): the same ones for the same batch and `step`. Prompts
    and responses are cut after `characters` characters. `rollout_type` is that of the buffer, if its fields have other
    names. All rows have the same keys: `reward/NAME` for the parts of rewards, and `replayed`, which is true for groups
    that were drawn before. Texts are those of the rollouts, except for NUL and lone surrogates, and aren't escaped for
    display (`as_markdown`). Raises InputError.
    """
    if step is not None:
        step = check_step(step, "step")
    if choose not in _CHOICES:
        raise InputError(f"choose must be one of {', '.join(map(repr, _CHOICES))}, not {choose!r:.100}")
    rows, characters = check_whole(rows, "rows"), check_whole(characters, "characters")
    key = SCORE if rollout_type is None else rollout_type.reward_key

    def get(rollout: Any, name: str) -> Any:
        if rollout_type is not None:
            return rollout_type.get(rollout, name)
        return rollout.get(name) if isinstance(rollout, Mapping) else getattr(rollout, name, None)

    there = [(item, position, rollout) for item in items_of(drawn) for position, rollout in enumerate(item.flat)]
    if advantages is not None and len(advantages) != len(there):
        raise InputError(
            f"there are {len(there)} rollouts, and {len(advantages)} advantages: give one for each, in their order"
        )
    rewards = [reward_value(get(rollout, "reward"), key) for _, _, rollout in there]
    found, parts = list[dict[str, Any]](), []
    for place in _chosen(rewards, rows, choose, random.Random(str(step))):
        item, position, rollout = there[place]
        ids, message = get(rollout, "response_ids"), get(rollout, "message")
        prompt = _prompt(get(rollout, "prompt") if message is None else message)
        found.append(
            {
                "step": item.trained_step if step is None else step,
                "task": _text(item.task_name, characters),
                "uid": item.uid,
                "rollout": position,
                "worker": _text(item.worker, characters),
                "replayed": item.times_sampled > 1,
                "staleness": item.staleness,
                "prompt": _text(prompt, characters),
                "response": _text(get(rollout, "response"), characters),
                "tokens": len(ids) if hasattr(ids, "__len__") else None,
                "finish_reason": _text(get(rollout, "finish_reason"), characters),
                "reward": rewards[place],
                "advantage": None if advantages is None else float(advantages[place]),
            }
        )
        parts.append(reward_parts(get(rollout, "reward")))
    names = list(dict.fromkeys(name for one in parts for name in one))[:_MOST_PARTS]
    return [row | {f"reward/{name}": one.get(name) for name in names} for row, one in zip(found, parts, strict=True)]


def items_of(drawn: Drawn) -> list[StorageItem]:
    """Return all groups in a list. Raises InputError for anything else."""
    found = [item for items in drawn.values() for item in items] if isinstance(drawn, Mapping) else list(drawn)
    for item in found:
        if not isinstance(item, StorageItem):
            raise InputError(
                f"expected StorageItems, as sample(), lease.items and find() give them, got {type(item).__name__}"
            )
    return found


def _chosen(rewards: Sequence[float | None], rows: int, choose: str, rng: random.Random) -> list[int]:
    """Return the places of the rollouts for the table."""
    if choose == "first":
        return list(range(len(rewards)))[:rows]
    if choose == "random":
        return sorted(rng.sample(range(len(rewards)), min(rows, len(rewards))))
    # Rollouts without a reward are neither good nor bad; ties are broken at random, not by position.
    ranked = sorted((-reward, rng.random(), place) for place, reward in enumerate(rewards) if reward is not None)
    best = [place for *_, place in ranked]
    return best if len(best) <= rows else [*best[: rows - rows // 2], *best[len(best) - rows // 2 :]]


def _prompt(message: Any) -> str | None:
    """Return the prompt: a text, or the messages of a conversation, each below its role."""
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


def _text(value: Any, characters: int) -> str | None:
    """Return a text, or its beginning, without characters that some JSON parsers refuse."""
    if not isinstance(value, str):
        return None
    short = value if len(value) <= characters else value[:characters] + "…"
    return short.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def as_markdown(text: str) -> str:
    """Escape the Markdown of a text that could fetch or link anything, for trackio, which renders it."""
    for character in "&<[":
        text = text.replace(character, f"&#{ord(character)};")
    return text
