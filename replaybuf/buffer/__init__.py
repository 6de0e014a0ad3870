"""The replay buffer, its leases and its waits, over a storage backend."""
