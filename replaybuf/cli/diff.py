"""`replaybuf diff`: what is different in two groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf.cli.answers import Rollouts, read_full
from replaybuf.cli.conversation import fields_of, text_of
from replaybuf.cli.escape import escape
from replaybuf.cli.options import Url, listing, url_and_uids
from replaybuf.cli.output import Column, Output, console, print_table, write
from replaybuf.cli.words import Piece, compare
from replaybuf.storage.sql.inspection.metadata import Described
from replaybuf.storage.sql.inspection.reader import open_reader

if TYPE_CHECKING:
    from rich.text import Text

_LINES = "\n\t"
_AROUND = 200
_LONG = 200
_FEW_NUMBERS = 8
# What differs of any two groups, or follows from what is shown anyway.
_UNTOLD = {"uid", "prompt", "response", "position", "rewards"}
_TEXTS = ("message", "response")


@dataclass(frozen=True, slots=True)
class Difference:
    """A field that differs: of the group (None), or of the rollouts in one place."""

    rollout: int | None
    field: str
    first: Any
    second: Any


@listing
def diff(
    url: Url,
    output: Output,
    uids: Annotated[
        list[str] | None, typer.Argument(metavar="UID UID", help="The uids of two groups.", show_default=False)
    ] = None,
) -> None:
    """Show what is different in two groups: fields, prompts and responses, word by word.

    What only the first group has is shown as [-...-], what only the second has as {+...+}, in red and green on a
    terminal; long parts that both have are left out. Rollouts are compared by their places in the group. Very long
    texts are compared by lines, or as wholes.

    --json has the pieces of texts, too; --nl and --csv print a row for each field that differs.

    \b
    Examples:
      replaybuf diff run.db 17 18
      replaybuf diff run.db 17 18 --json | jq '.fields[].field'
    """
    url, numbers = url_and_uids(url, uids)
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        raise typer.BadParameter("give the uids of two groups", param_hint="UID UID")
    reader = open_reader(url)
    (one, rollouts), (other, others) = (read_full(reader, int(number)) for number in numbers)
    found = [*_of_groups(one, other), *_of_rollouts(one, rollouts, other, others)]
    texts = list(_texts(rollouts, others))
    if output.format == "json":
        fields = [_as_row(difference) for difference in found]
        pieces = [{"rollout": place, "field": field, "pieces": parts} for place, field, parts in texts]
        output.value({"uids": [int(number) for number in numbers], "fields": fields, "texts": pieces})
    elif not output.for_people:
        output.rows([_as_row(difference) for difference in found], [])
    else:
        _print(numbers, found, texts)


# What differs


def _of_groups(one: Described, other: Described) -> Iterator[Difference]:
    first, second = _flat(one.group), _flat(other.group)
    for name in dict.fromkeys((*first, *second)):
        if name not in _UNTOLD and first.get(name) != second.get(name):
            yield Difference(None, name, first.get(name), second.get(name))


def _of_rollouts(one: Described, rollouts: Rollouts, other: Described, others: Rollouts) -> Iterator[Difference]:
    for place, pair in enumerate(zip_longest(_whole(one, rollouts), _whole(other, others), fillvalue=None)):
        first, second = pair
        if first is None or second is None:
            yield Difference(place, "rollout", first and "is there", second and "is there")
            continue
        for name in dict.fromkeys((*first, *second)):
            a, b = first.get(name), second.get(name)
            if name not in _UNTOLD and name not in _TEXTS and not same(a, b):
                yield Difference(place, name, a, b)


def same(first: Any, second: Any) -> bool:
    """Return whether two values are the same, which may be arrays or hold some."""
    if _is_array(first) or _is_array(second):
        return _is_array(first) and _is_array(second) and same(first.tolist(), second.tolist())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and bool(first == second or (first != first and second != second))


def _is_array(value: Any) -> bool:
    return hasattr(value, "tolist")


def _whole(found: Described, rollouts: Rollouts) -> list[dict[str, Any]]:
    return [{**row, **fields_of(rollout)} for row, rollout in zip(found.rollouts, rollouts, strict=True)]


def _flat(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a group, a field for each tag."""
    rest = {name: value for name, value in group.items() if name != "tags"}
    return rest | {f"tags.{name}": value for name, value in (group["tags"] or {}).items()}


def _texts(rollouts: Rollouts, others: Rollouts) -> Iterator[tuple[int | None, str, list[Piece]]]:
    """Yield the prompts and responses piece by piece; the prompts once where those of a group are all the same."""
    pairs = list(zip(rollouts, others, strict=False))
    prompts = [(_text(one.get("message")), _text(other.get("message"))) for one, other in pairs]
    if len(set(prompts)) == 1:
        yield None, "prompt", compare(*prompts[0])
    for place, (one, other) in enumerate(pairs):
        if len(set(prompts)) > 1:
            yield place, "prompt", compare(*prompts[place])
        yield place, "response", compare(_text(one.get("response")), _text(other.get("response")))


def _text(value: Any) -> str:
    """Return a prompt or response as it is read."""
    if isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value):
        return "\n".join(f"[{one['role']}]\n{text_of(one.get('content'))}" for one in value)
    return "" if value is None else text_of(value)


def _as_row(one: Difference) -> dict[str, Any]:
    return {"rollout": one.rollout, "field": one.field, "first": one.first, "second": one.second}


# For people


def _print(
    numbers: Sequence[str], found: Sequence[Difference], texts: Sequence[tuple[int | None, str, list[Piece]]]
) -> None:
    from rich.text import Text

    out = console()
    if found:
        columns = [
            Column("of", lambda r: "group" if r["rollout"] is None else f"rollout {r['rollout']}", right=False),
            Column("field", lambda r: r["field"], right=False, text=True),
            Column(numbers[0], lambda r: _short(r["first"], r["second"]), right=False, text=True),
            Column(numbers[1], lambda r: _short(r["second"], r["first"]), right=False, text=True),
        ]
        print_table([_as_row(one) for one in found], columns)
    else:
        write(["the same metadata\n"])
    for place, field, pieces in texts:
        title = field if place is None else f"{field} of rollout {place}"
        if all(kind == "same" for kind, _ in pieces):
            out.print(Text(f"\n{title}: the same", style="bold"))
            continue
        out.print(Text(f"\n{title}", style="bold"))
        out.print(marked(pieces), soft_wrap=True)


def marked(pieces: Sequence[Piece]) -> Text:
    """Return the pieces of two texts as one: what only the first has in [-...-], only the second in {+...+}."""
    from rich.text import Text

    text = Text()
    for place, (kind, piece) in enumerate(pieces):
        if kind == "first":
            text.append(f"[-{escape(piece, keep=_LINES)}-]", style="red")
        elif kind == "second":
            text.append(f"{{+{escape(piece, keep=_LINES)}+}}", style="green")
        else:
            shown = _shortened(piece, begins=place == 0, ends=place == len(pieces) - 1)
            text.append(escape(shown, keep=_LINES))
    return text


def _shortened(piece: str, *, begins: bool, ends: bool) -> str:
    """Return what both texts have, without what is far from a difference."""
    head, tail = 0 if begins else _AROUND, 0 if ends else _AROUND
    left_out = len(piece) - head - tail
    if left_out <= _AROUND:
        return piece
    return f"{piece[:head]}…({left_out:,} characters)…{piece[len(piece) - tail :]}"


def _short(value: Any, other: Any) -> str:
    """Return a value for a table; of many numbers their count, and where the first is that the other hasn't there."""
    if value is None:
        return "-"
    if hasattr(value, "isoformat"):
        return str(value.isoformat(timespec="milliseconds"))
    if (numbers := _numbers(value)) is not None and len(numbers) > _FEW_NUMBERS:
        pairs = enumerate(zip(numbers, _numbers(other) or (), strict=False))
        place = next((place for place, (one, two) in pairs if not same(one, two)), None)
        return f"{len(numbers):,} numbers{'' if place is None else f', at {place}: {numbers[place]:.6g}'}"
    text = text_of(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}…"


def _numbers(value: Any) -> list[Any] | None:
    listed = value.tolist() if _is_array(value) else value
    return listed if isinstance(listed, list) and all(isinstance(one, int | float) for one in listed) else None
