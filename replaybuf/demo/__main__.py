"""`python -m replaybuf.demo`: the same as `replaybuf demo`."""

from __future__ import annotations

import sys

import typer

from replaybuf.demo.command import demo
from replaybuf.errors import ReplayBufError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(demo)

if __name__ == "__main__":
    try:
        app(prog_name="replaybuf demo")
    except ReplayBufError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(1)
