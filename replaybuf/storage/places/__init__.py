"""Places for payloads outside the database: folders and object stores with files that are written once."""
