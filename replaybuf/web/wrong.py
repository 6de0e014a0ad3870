"""What a page can't show."""

from __future__ import annotations

from replaybuf.errors import InputError


class NotThereError(InputError):
    """There is nothing of this number: it was taken, deleted or forgotten, or never was."""
