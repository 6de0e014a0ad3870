"""A web page to look into a database: `replaybuf serve`, or `create_app` under any ASGI server.

It only reads. `pages` has the data of each page, as functions of a read transaction; `templates` and `static` are how
they look; `app` is the routes, `security` what stands before them, and `server` binds the port. The packages that it
needs come with the extra `web`.
"""
