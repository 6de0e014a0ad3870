"""A model of the store, without SQL, that random operations on a database are compared with."""
