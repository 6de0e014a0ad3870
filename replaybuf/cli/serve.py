"""`replaybuf serve`: the web page."""

from __future__ import annotations

from typing import Annotated

import typer

from replaybuf.cli.options import Buffer, Url, option
from replaybuf.errors import MissingDriverError
from replaybuf.storage.sql.inspection.reader import open_reader

PORT = 8321
_LOCALHOST = "127.0.0.1"


def serve(
    url: Url,
    port: Annotated[
        int, option("--port", metavar="N", min=0, max=65535, help="The port; 0 for one that is free.")
    ] = PORT,
    host: Annotated[
        str, option("--host", metavar="ADDRESS", help="Where to listen; all but 127.0.0.1 and ::1 need a token.")
    ] = _LOCALHOST,
    token: Annotated[
        str | None,
        option(
            "--token",
            metavar="TEXT",
            help="Ask for this token; without it one is made, where one is needed. Rather set REPLAYBUF_TOKEN: what is "
            "typed here other users of the machine can see.",
        ),
    ] = None,
    buffer: Buffer = None,
    prefix: Annotated[
        str,
        option("--prefix", metavar="PATH", help="The path under which a proxy has the page, such as /rl."),
    ] = "",
    beside: Annotated[
        list[str] | None,
        option(
            "--beside", metavar="RUN", help="Another database, or an export, to be plotted over this one. Repeatable."
        ),
    ] = None,
) -> None:
    """Show a database in the browser, on a page of this machine.

    The page only reads, and the run doesn't notice. It is at http://127.0.0.1:8321/ and for this machine only; on a
    server, forward the port: ssh -L 8321:localhost:8321 HOST. With --host 0.0.0.0 others reach it, too, with the token
    that is printed. Ctrl-C ends it. It needs pip install starlette uvicorn jinja2.

    \b
    Examples:
      replaybuf serve run.db
      replaybuf serve run.db --port 8080
      replaybuf serve postgresql://reader@db.cluster/rl --buffer train
      replaybuf serve run.db --beside yesterday.db --beside lr-2e-6.parquet
      replaybuf serve run.db --host 0.0.0.0
      replaybuf serve run.db --host 0.0.0.0 --prefix /rl
    """
    try:
        from replaybuf.web import security, server
        from replaybuf.web.app import create_app
    except ModuleNotFoundError as error:
        packages = "starlette uvicorn jinja2"
        raise MissingDriverError(f"the page needs the package {error.name}: pip install {packages}") from error
    reader = open_reader(url)
    reader.read(lambda tx: None)
    if token is not None:
        security.check_token(token)
    elif not security.is_loopback(host):
        token = security.new_token()
    app = create_app(reader, buffer=buffer, token=token, beside=beside or (), prefix=prefix)
    listening = server.bind(host, port)
    address = server.address_of(listening, host) + security.check_prefix(prefix).lstrip("/")
    if token is not None:
        address += f"?token={token}"
    server.serve(app, listening, lambda: typer.echo(f"{reader.where} is at {address}  (Ctrl-C ends it)"))
