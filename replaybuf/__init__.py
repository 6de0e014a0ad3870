"""A durable, shared, queryable replay buffer for LLM reinforcement learning."""
