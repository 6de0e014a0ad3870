"""What is known of a rollout, in one line."""

from __future__ import annotations

from replaybuf.cli.output import Row


def summary(row: Row) -> str:
    """Return what is known of a rollout in one line: its reward with its parts, staleness, tokens."""
    facts = {
        "id": row["rollout_id"],
        "reward": reward_text(row),
        "staleness": row["staleness"],
        "step": row["oldest_model_step"],
        "tokens": row["response_tokens"],
        "finish": row["finish_reason"],
    }
    return " ".join([row["status"], *(f"{name}={value}" for name, value in facts.items() if value is not None)])


def reward_text(row: Row) -> str | None:
    """Return a reward with the parts of a dict: `0.500 (format 1, score 0)`."""
    parts = row["rewards"] or {}
    texts = {name: f"{value:g}" if isinstance(value, int | float) else str(value) for name, value in parts.items()}
    named = ", ".join(f"{name} {text}" for name, text in texts.items())
    total = None if row["reward"] is None else f"{row['reward']:.3f}"
    return f"{total or '-'} ({named})" if named else total
