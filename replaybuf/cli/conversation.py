"""Decoded rollouts: as conversations, and responses side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replaybuf import units
from replaybuf.cli.output import STYLES, Row, console
from replaybuf.redact import escape, escape_line

if TYPE_CHECKING:
    from rich.text import Text


_LINES = "\n\t"
#: The fields of a rollout that are shown below its response.
_BELOW = ("tool_calls", "error_msg", "extra_fields")
_METADATA = frozenset({"status", "uid", "seq_staleness", "rollout_id"})
#: Longer lists of numbers (tokens) are shown by their length.
_FEW_NUMBERS = 32


def fields_of(rollout: dict[Any, Any]) -> dict[str, Any]:
    """Return the fields of a rollout for JSON, without those in the metadata."""
    return {str(name): value for name, value in rollout.items() if name not in _METADATA}


def print_rollouts(rollouts: Sequence[Row], decoded: Sequence[dict[Any, Any]], layout: Layout | None) -> None:
    """Print the messages, once if all rollouts share them, and every response: side by side if there is a layout.

    Rollouts with other names for these fields are printed field by field.
    """
    if not all(map(names_are_ours, rollouts, decoded)):
        for row, rollout in zip(rollouts, decoded, strict=True):
            _heading_of(row)
            _print_fields(fields_of(rollout))
        return
    prompts = [rollout.get("message") for rollout in decoded]
    shared = len({json.dumps(units.plain(prompt)) for prompt in prompts}) == 1  # as texts: prompts may be arrays
    if shared:
        print_prompt(prompts[0])
    if layout is not None:
        for row, prompt in zip(rollouts, prompts, strict=True) if not shared else ():
            print_prompt(prompt, f" of rollout {row['position']}")
        print_beside(answers_of(rollouts, decoded, ""), layout)
        return
    for row, rollout, prompt in zip(rollouts, decoded, prompts, strict=True):
        _heading_of(row)
        if not shared:
            _print_messages(prompt)
            _role("response")
        _print_text(rollout.get("response"))
        for name in _BELOW:
            if _is_there(rollout.get(name)):
                _role(name)
                _print_text(rollout[name])


def print_prompt(prompt: Any, of: str = "") -> None:
    """Print the messages of a prompt."""
    _say(f"\nprompt{of}", "bold")
    _print_messages(prompt)


def names_are_ours(row: Row, rollout: dict[Any, Any]) -> bool:
    """Return whether a rollout has its prompt and response in the fields of RolloutState."""
    response_is_there = rollout.get("response") is not None or not row["response"]
    return rollout.get("message") is not None and response_is_there


def _print_fields(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if value is None or (isinstance(value, (str, list, dict)) and not value):
            continue
        _role(name)
        if isinstance(value, list) and len(value) > _FEW_NUMBERS and isinstance(value[0], int | float):
            _print_text(f"{len(value):,} numbers")
        elif isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value):
            _print_messages(value)
        else:
            _print_text(value)


def _print_messages(messages: Any) -> None:
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, dict) or message is messages:
            _print_text(message)
            continue
        _role(str(message.get("role", "message")))
        _print_text(message.get("content"))
        rest = {name: one for name, one in message.items() if name not in ("role", "content") and _is_there(one)}
        if rest:
            _print_text(rest)


def _print_text(value: Any) -> None:
    """Print a text as it is, anything else as JSON. Long lines are wrapped by the terminal."""
    _say("(none)", "dim") if value is None else _say(units.as_text(units.joined_parts(value)))


def _role(role: str) -> None:
    _say(f"[{escape(role)}]", "dim")


def _say(text: str, style: str = "") -> None:
    from rich.text import Text

    console().print(Text(escape(text, keep=_LINES), style=style), soft_wrap=True)


def _is_there(value: Any) -> bool:
    return units.is_there(value) and not (isinstance(value, int) and not value)


def _heading_of(row: Row) -> None:
    from rich.text import Text

    line = Text(f"\nrollout {row['position']}", style="bold").append("  ")
    console().print(
        line.append(escape(summary(row)), style=f"not bold {STYLES.get(row['status'], '')}"), soft_wrap=True
    )


def summary(row: Row) -> str:
    """Return a summary of a rollout in one line: its reward with its parts, staleness, tokens."""
    facts = {
        "id": row["rollout_id"],
        "reward": units.reward(row["reward"], row["rewards"]),
        "staleness": row["staleness"],
        "step": row["oldest_model_step"],
        "tokens": row["response_tokens"],
        "finish": row["finish_reason"],
    }
    return " ".join([row["status"], *(f"{name}={value}" for name, value in facts.items() if value is not None)])


_NARROWEST = 38
_GAP = 2
_CUT = 2000


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """A rollout for display: its title, its metadata, and its fields."""

    title: str
    row: Row
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of answers: their number per row (None: as many as fit), token colours, full or cut texts."""

    columns: int | None
    colour: str | None
    full: bool


def answers_of(rollouts: Sequence[Row], decoded: Sequence[dict[Any, Any]], of: str) -> list[ShownRollout]:
    """Return the rollouts of a group as answers, with `of` before their titles."""
    pairs = zip(rollouts, decoded, strict=True)
    return [ShownRollout(f"{of}rollout {row['position']}", row, rollout) for row, rollout in pairs]


def print_beside(answers: Sequence[ShownRollout], layout: Layout) -> None:
    """Print answers side by side."""
    from rich.table import Table
    from rich.text import Text

    out = console()
    width = out.width if out.is_terminal else min(out.width, 120)
    many = min(len(answers), layout.columns or max(1, (width + _GAP) // (_NARROWEST + _GAP)))
    legend: dict[str, str] = {}
    for start in range(0, len(answers), many):
        row = answers[start : start + many]
        grid = Table.grid(expand=True, padding=(0, _GAP, 0, 0))
        for _ in range(many):
            grid.add_column(ratio=1, overflow="fold", vertical="top")
        grid.add_row(*(_cell(one, layout, legend) for one in row))
        _print(grid, width)
    if legend:
        line = Text("colours: ", style="dim")
        for meaning, style in legend.items():
            line.append(f" {meaning} ", style=f"not dim {style}")
        out.print(line)


def _print(grid: Any, width: int) -> None:
    out = console(width)
    with out.capture() as captured:
        out.print()
        out.print(grid)
    lines = captured.get().split("\n")
    out.file.write("\n".join(line if out.is_terminal else line.rstrip() for line in lines))


def _cell(one: ShownRollout, layout: Layout, legend: dict[str, str]) -> Text:
    """Return an answer as a cell; add its colours to the `legend`, which maps their meanings to styles."""
    from rich.text import Text

    cell = Text()
    cell.append(escape_line(one.title), style="bold")
    cell.append(f"\n{escape_line(summary(one.row))}\n", style=STYLES.get(one.row["status"], ""))
    response = one.fields.get("response")
    if response is None:  # for classes with other field names, the metadata has its beginning
        response = one.row["response"]
    if layout.colour is None or not _append_tokens(cell, one.fields, response, layout.colour, legend, full=layout.full):
        cell.append(shown(response, full=layout.full)).append("\n")
    for name in _BELOW:
        if _is_there(one.fields.get(name)):
            cell.append(f"[{name}]\n", style="dim").append(shown(one.fields[name], full=layout.full)).append("\n")
    return cell


def shown(value: Any, *, full: bool) -> str:
    """Return a value as a text that can't drive the terminal, cut unless `full`."""
    if value is None:
        return "(none)"
    text = units.as_text(value)
    more = "" if full or len(text) <= _CUT else f"… {len(text) - _CUT:,} more characters (--full)"
    return escape(text if full else text[:_CUT], keep=_LINES) + more


#: The values of --colour, and their names in `replaybuf.tokens`.
BY = {"logprobs": "logprob", "mask": "mask", "steps": "step"}

_LIKELY_TO_UNLIKELY = ("green", "cyan", "blue", "yellow", "magenta", "red", "bold red")
_STEPS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_STYLES = {
    **{f"lp{place}": style for place, style in enumerate(_LIKELY_TO_UNLIKELY)},
    **{f"step{place}": style for place, style in enumerate(_STEPS)},
    "mask1": "green",
    "mask0": "dim",
}
# Limits without --full; fewer ids, which are less readable than texts.
_FEW, _FEW_IDS = 500, 50
_MOST = 10**9


def _append_tokens(
    cell: Text, rollout: Mapping[str, Any], response: Any, by: str, legend: dict[str, str], *, full: bool
) -> bool:
    """Append the tokens of a response, or the first of them, in colours; return whether these show its text.

    If the rollout doesn't have the texts of its tokens, their ids are shown. Without data for the colours, a note names
    the missing field.
    """
    from replaybuf.tokens import strip

    found = strip(rollout, response, BY[by], _MOST if full else _FEW)
    if found is None:
        cell.append("(no colours: the rollout has no response_ids)\n", style="dim")
        return False
    if found.by != BY[by]:
        there = ", ".join(name for name, own in BY.items() if own in found.shades) or "nothing else"
        cell.append(f"(no colours: the rollout has no {by} of its tokens, but {there})\n", style="dim")
        return False
    if not found.texts:
        cell.append("(ids of tokens: their texts aren't in the rollout)\n", style="dim")
    tokens = found.tokens if full or found.texts else found.tokens[:_FEW_IDS]
    for token in tokens:
        cell.append(escape(token.text, keep=_LINES), style=_STYLES.get(token.shade, ""))
        if not found.texts:
            cell.append(" ")
    if found.count > len(tokens):
        cell.append(f"… {found.count - len(tokens):,} more tokens (--full)", style="dim")
    legend.update({meaning: _STYLES.get(shade, "") for shade, meaning in found.legend})
    cell.append("\n")
    return found.texts
