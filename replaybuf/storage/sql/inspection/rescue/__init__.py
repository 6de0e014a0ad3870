"""What can be read of a damaged SQLite file: `salvage` its rows, mend them (`rows`, `metadata`), write a `snapshot`."""
