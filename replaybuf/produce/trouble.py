"""Trouble while groups are generated: failures in a row, and wasted work."""

from __future__ import annotations

import logging
import traceback
from collections import Counter

from replaybuf.produce.agent_loop import Generated
from replaybuf.produce.outcome import text_of
from replaybuf.prompts import Prompt
from replaybuf.rollouts.rollout import Status

_logger = logging.getLogger("replaybuf.produce")

_KINDS = {Status.FILTERED: "filtered", Status.EXPIRED: "too old when done"}
_UNASKED = "interrupted, though nobody had paused (does resume() end the pause?)"


class Trouble:
    """Failures since the last success, the last error, and the groups that were wasted."""

    def __init__(self) -> None:
        self.in_row = 0
        self.last_error = ""
        self.last_raised: BaseException | None = None
        self.failed: dict[Status, set[int]] = {}  # prompts that failed in this row, by their status before
        self._vain: Counter[str] = Counter()
        self._shown: set[str] = set()  # places of errors whose traceback was logged

    @property
    def in_vain(self) -> int:
        """How many generated groups were wasted."""
        return self._vain.total()

    def fails(self, error: str | BaseException) -> None:
        """Count a failed call of the agent loop."""
        self.in_row += 1
        if isinstance(error, BaseException):
            self.last_raised = error
        self.last_error = text_of(error) if isinstance(error, BaseException) else error

    def prompt_fails(self, prompt: Prompt, error: str | BaseException, *, last: bool) -> None:
        """Count and log a failed group, the first time with the place where the error was raised."""
        self.fails(error)
        self.failed.setdefault(prompt.status, set()).add(prompt.uid)
        raised = error if isinstance(error, BaseException) else None
        known = raised is None or (place := _place(raised)) in self._shown
        if not known:
            self._shown.add(place)
        outcome = "is set aside" if last else "will be tried again"
        _logger.warning("%r failed, and %s: %s", prompt, outcome, self.last_error, exc_info=None if known else raised)

    def succeeds(self) -> None:
        """Note that a group was generated and stored."""
        self.in_row = 0
        self.failed.clear()

    def note(self, made: Generated, *, pausing: bool) -> None:
        """Count a group if it was wasted."""
        if made.status == Status.ABORTED:
            if not made.tokens and not pausing:  # no progress was made
                self._vain[_UNASKED] += 1
        elif made.status != Status.COMPLETED:
            self._vain[_KINDS.get(made.status, "failed")] += 1

    def why(self) -> str:
        """Return what was wasted, for people."""
        text = f"after {self.in_vain} in vain: " + ", ".join(f"{n} {kind}" for kind, n in self._vain.most_common())
        return text + (f"; the last error was {self.last_error}" if self._vain["failed"] else "")


def _place(error: BaseException) -> str:
    """Return the class of an error, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__
