"""Decoded rollouts, in full."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replaybuf.cli.escape import escape
from replaybuf.cli.groups import status_style
from replaybuf.cli.output import Row, console
from replaybuf.cli.summary import summary

if TYPE_CHECKING:
    from rich.console import Console

_LINES = "\n\t"
_METADATA = frozenset({"status", "uid", "seq_staleness", "rollout_id"})
#: Longer lists of numbers (tokens) are shown by their length.
_FEW_NUMBERS = 32


def fields_of(rollout: dict[Any, Any]) -> dict[str, Any]:
    """Return the fields of a rollout for programs, without those in the metadata."""
    return {str(name): value for name, value in rollout.items() if name not in _METADATA}


def print_conversation(rollouts: Sequence[Row], decoded: Sequence[dict[Any, Any]]) -> None:
    """Print the messages, once if all rollouts share them, and every response.

    Of rollouts that have other names for these, every field is printed.
    """
    out = console()
    if not all(map(names_are_ours, rollouts, decoded)):
        for row, rollout in zip(rollouts, decoded, strict=True):
            _heading(out, f"rollout {row['position']}", summary(row), status_style(row))
            _print_fields(out, fields_of(rollout))
        return
    prompts = [rollout.get("message") for rollout in decoded]
    shared = len({text_of(prompt) for prompt in prompts}) == 1  # what is compared may be arrays
    if shared:
        print_prompt(prompts[0])
    for row, rollout, prompt in zip(rollouts, decoded, prompts, strict=True):
        _heading(out, f"rollout {row['position']}", summary(row), status_style(row))
        if not shared:
            _print_messages(out, prompt)
            _role(out, "response")
        _print_text(out, rollout.get("response"))
        for name in ("tool_calls", "error_msg", "extra_fields"):
            if is_there(rollout.get(name)):
                _role(out, name)
                _print_text(out, rollout[name])


def print_prompt(prompt: Any, of: str = "") -> None:
    """Print the messages of a prompt."""
    out = console()
    _heading(out, f"prompt{of}", "")
    _print_messages(out, prompt)


def names_are_ours(row: Row, rollout: dict[Any, Any]) -> bool:
    """Return whether a rollout has its prompt and response where ours have them."""
    responseis_there = rollout.get("response") is not None or not row["response"]
    return rollout.get("message") is not None and responseis_there


def _print_fields(out: Console, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if value is None or (isinstance(value, (str, list, dict)) and not value):
            continue
        _role(out, name)
        if isinstance(value, list) and len(value) > _FEW_NUMBERS and isinstance(value[0], int | float):
            _print_text(out, f"{len(value):,} numbers")
        elif isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value):
            _print_messages(out, value)
        else:
            _print_text(out, value)


def _print_messages(out: Console, messages: Any) -> None:
    if not isinstance(messages, list):
        _print_text(out, messages)
        return
    for message in messages:
        if isinstance(message, dict):
            _role(out, str(message.get("role", "message")))
            rest = {name: value for name, value in message.items() if name not in ("role", "content")}
            rest = {name: value for name, value in rest.items() if is_there(value)}
            _print_text(out, message.get("content"))
            if rest:
                _print_text(out, rest)
        else:
            _print_text(out, message)


def _print_text(out: Console, value: Any) -> None:
    """A text as it is; anything else as JSON. Long lines are left to the terminal."""
    from rich.text import Text

    if value is None:
        out.print(Text("(none)", style="dim"))
        return
    if isinstance(value, list) and all(isinstance(part, dict) and "text" in part for part in value):
        value = "\n".join(str(part["text"]) for part in value)
    out.print(Text(escape(text_of(value), keep=_LINES)), soft_wrap=True)


def text_of(value: Any) -> str:
    """Return a text as it is, and anything else as JSON, or as Python writes it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except TypeError:  # keys of a dict that JSON doesn't have
        return repr(value)


def is_there(value: Any) -> bool:
    """Return whether there is something to show: arrays have no truth."""
    return value is not None and not (isinstance(value, (bool, int, str, list, tuple, dict, set)) and not value)


def _heading(out: Console, title: str, summary: str, style: str = "") -> None:
    from rich.text import Text

    line = Text(f"\n{title}", style="bold")
    if summary:
        line.append("  ").append(escape(summary), style=f"not bold {style}")
    out.print(line, soft_wrap=True)


def _role(out: Console, role: str) -> None:
    from rich.text import Text

    out.print(Text(f"[{escape(role)}]", style="dim"))
