"""The tokens of a response in colours: by log-probability, by the mask, or by the model step that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replaybuf.cli.escape import escape

if TYPE_CHECKING:
    from rich.text import Text

#: What --colour takes, and the names that the data has for it.
BY = {"logprobs": "logprob", "mask": "mask", "steps": "step"}

_LIKELY_TO_UNLIKELY = ("green", "cyan", "blue", "yellow", "magenta", "red", "bold red")
_STEPS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_STYLES = {
    **{f"lp{place}": style for place, style in enumerate(_LIKELY_TO_UNLIKELY)},
    **{f"step{place}": style for place, style in enumerate(_STEPS)},
    "mask1": "green",
    "mask0": "dim",
}
_LINES = "\n\t"
# Without --full. Ids tell less than texts.
_FEW, _FEW_IDS = 500, 50
_MOST = 10**9


@dataclass(frozen=True, slots=True)
class Coloured:
    """Tokens in colours: whether they are the text of the response, and pairs of a style and what it means."""

    text: Text
    is_response: bool
    legend: Sequence[tuple[str, str]] = ()


def coloured(rollout: Mapping[str, Any], response: Any, by: str, *, full: bool) -> Coloured:
    """Return the tokens of a response, or the first of them.

    Where the rollout doesn't say which part of the text is which token, they are shown by their ids. Where there is
    nothing to colour by, the text says what is missing.
    """
    from rich.text import Text

    from replaybuf.tokens import strip

    found = strip(rollout, response, BY[by], _MOST if full else _FEW)
    if found is None:
        return Coloured(Text("(no colours: the rollout has no response_ids)\n", style="dim"), is_response=False)
    if found.by != BY[by]:
        there = ", ".join(name for name, own in BY.items() if own in found.shades) or "nothing else"
        missing = f"(no colours: the rollout has no {by} of its tokens, but {there})\n"
        return Coloured(Text(missing, style="dim"), is_response=False)
    text = Text()
    if not found.texts:
        text.append("(ids of tokens: their texts aren't in the rollout)\n", style="dim")
    tokens = found.tokens if full or found.texts else found.tokens[:_FEW_IDS]
    for token in tokens:
        text.append(escape(token.text, keep=_LINES), style=_STYLES.get(token.shade, ""))
        if not found.texts:
            text.append(" ")
    if found.count > len(tokens):
        text.append(f"… {found.count - len(tokens):,} more tokens (--full)", style="dim")
    legend = tuple((_STYLES.get(shade, ""), meaning) for shade, meaning in found.legend)
    return Coloured(text.append("\n"), found.texts, legend)
