"""What is worth a warning about a file that can be imported: it may not be what somebody meant."""

from __future__ import annotations

from typing import Final

from replaybuf.files.foreign import FIELDS
from replaybuf.files.rows import FileGroup
from replaybuf.rollouts.rollout import Status

#: What the columns of responses are named like, the likeliest first.
_LIKELY: Final = ("answer", "response", "completion", "output", "generat", "solution", "reply", "text")
#: Columns that are remembered: a file may have any number.
_COLUMNS: Final = 20


class Remarks:
    """Looks at the groups of a file as they pass, in bounded memory."""

    def __init__(self) -> None:
        self._groups = 0
        self._unanswered = 0
        #: The columns that became no field, with whether they hold texts.
        self._unused: dict[str, bool] = {}

    def add(self, group: FileGroup) -> None:
        self._groups += 1
        if group.guessed and all(_lacks_response(rollout) for rollout in group.rollouts):
            self._unanswered += 1
            self._note_unused(group)

    def warnings(self) -> list[str]:
        """Return the warnings, a line each."""
        found = []
        if self._groups and self._unanswered == self._groups:
            found.append(f"no response was found: nothing of this can be trained on{self._hint()}")
        return found

    def _note_unused(self, group: FileGroup) -> None:
        for rollout in group.rollouts:
            extra = rollout.get("extra_fields")
            unused = dict(extra) if isinstance(extra, dict) else {}
            unused |= {name: value for name, value in rollout.items() if name not in FIELDS}
            for name, value in unused.items():
                if name in self._unused or len(self._unused) < _COLUMNS:
                    self._unused[name] = self._unused.get(name, False) or type(value) is str

    def _hint(self) -> str:
        if not self._unused:
            return ""
        texts = [name for name, is_text in self._unused.items() if is_text]
        likely = [name for word in _LIKELY for name in texts if word in str(name).lower()]
        column = next(iter(likely), "COLUMN")
        return f"; --field response={column:.60}? Not used: {', '.join(map(str, self._unused)):.200}"


def _lacks_response(rollout: dict[object, object]) -> bool:
    answered = rollout.get("response") is not None or rollout.get("response_ids") is not None
    return rollout.get("status") is Status.INIT and not answered
