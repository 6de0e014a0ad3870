"""What type checkers know of a buffer's rollouts: checked by `mypy` and `basedpyright`, and never run."""
