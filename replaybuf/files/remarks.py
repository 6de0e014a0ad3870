"""What is worth a warning about a file that can be imported: it may not be what somebody meant."""

from __future__ import annotations

from collections import Counter
from typing import Final

from xxhash import xxh3_64_intdigest

from replaybuf.files.exporting import TREES
from replaybuf.files.foreign import FIELDS
from replaybuf.files.rows import FileGroup
from replaybuf.rollouts.rollout import Status

#: What the columns of responses are named like, the likeliest first.
_LIKELY: Final = ("answer", "response", "completion", "output", "generat", "solution", "reply", "text")
#: Columns that are remembered: a file may have any number.
_COLUMNS: Final = 20
#: Prompts that are remembered, as hashes of some 100 bytes each. Beyond these a group counts as one of a new prompt.
_PROMPTS: Final = 1 << 18


class Remarks:
    """Looks at the groups of a file as they pass, in bounded memory."""

    def __init__(self) -> None:
        self._groups = 0
        self._unanswered = 0
        #: The columns that became no field, with whether they hold texts.
        self._unused: dict[str, bool] = {}
        self._seen: set[int] = set()
        #: The groups by what their rows were taken together by, and those that an earlier group was of, too.
        self._by: Counter[str] = Counter()
        self._repeated: Counter[str] = Counter()

    def add(self, group: FileGroup) -> None:
        self._groups += 1
        if group.guessed and all(_lacks_response(rollout) for rollout in group.rollouts):
            self._unanswered += 1
            self._note_unused(group)
        if group.by is not None:
            self._by[group.by] += 1
            mark = _mark(group)
            if mark in self._seen:
                self._repeated[group.by] += 1
            elif len(self._seen) < _PROMPTS:
                self._seen.add(mark)

    def warnings(self) -> list[str]:
        """Return the warnings, a line each."""
        found = []
        if self._groups and self._unanswered == self._groups:
            found.append(f"no response was found: nothing of this can be trained on{self._hint()}")
        at_most = "" if len(self._seen) < _PROMPTS else "at most "
        for by, repeated in sorted(self._repeated.items()):
            groups = self._by[by]
            what = f"{at_most}{groups - repeated:,} {by}{'s' if groups - repeated > 1 else ''} make {groups:,} groups"
            mend = "sort the file by prompt, or give group_id" if by == "prompt" else "sort the file by group_id"
            found.append(f"{what}, because rows of one aren't next to each other: {mend}")
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


def _mark(group: FileGroup) -> int:
    """Return a hash of what the rows of a group have in common."""
    first = group.rollouts[0]
    names = ("message", "prompt_ids") if group.by == "prompt" else ("group_id",)
    common = {name: first.get(name) for name in names} | {"task_name": group.task_name}
    return xxh3_64_intdigest(TREES.encode([common]))
