"""Asking before something is done that can't be undone."""

from __future__ import annotations

import typer

from replaybuf.cli.escape import escape_line
from replaybuf.cli.options import option
from replaybuf.errors import InputError

#: The option --yes of commands that ask.
YES = option("--yes", help="Don't ask.")


def ask(question: str, *, yes: bool) -> None:
    """Ask a question on stderr, unless `yes`. Raises InputError when the answer is no, or nobody answers."""
    if yes:
        return
    try:
        if typer.confirm(escape_line(question), err=True):
            return
    except typer.Abort:
        typer.echo(err=True)
        raise InputError("nothing was done: nobody answered; give --yes to do it without asking") from None
    raise InputError("nothing was done")
