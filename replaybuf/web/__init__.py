"""A web page to look into a database: `replaybuf serve`, or `create_app` under any ASGI server.

The server only reads. `run_pages` and `group_pages` have the data of each page, as functions of a read transaction;
`templates` and `static` are how they look; `app` has the routes, and `server` the port, access control and health
checks. The packages that the server needs come with the extra `web`.
"""

from replaybuf.common.checks import import_optional

for _package in ("starlette.applications", "uvicorn", "jinja2"):
    import_optional(_package, "the page needs other packages: pip install starlette uvicorn jinja2")
