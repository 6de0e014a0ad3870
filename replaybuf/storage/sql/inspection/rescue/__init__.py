"""Rescuing a damaged SQLite file: `salvage` reads its rows, `rows` and `metadata` mend them, `snapshot` writes them."""
