"""The replay buffer, its leases and its waits, over the store."""
