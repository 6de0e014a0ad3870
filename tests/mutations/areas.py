"""Which tests are near which code: arguments of pytest, the quickest first."""

from __future__ import annotations

NEAR = {
    "rules": (
        "tests/test_rules.py",
        "tests/test_transitions.py",
        "tests/contract/test_sqlite.py",
    ),
    "races": (
        "tests/test_rules.py",
        "tests/contract/test_sqlite_memory.py",
        "tests/test_same_draws.py",
        "-k",
        "not postgres",
    ),
    "rollouts": (
        "tests/test_marks.py",
        "tests/test_rollout_type.py",
        "tests/test_statuses.py",
        "tests/contract/test_sqlite.py",
        "tests/test_views.py",
    ),
    "query": ("tests/query", "-k", "not postgres"),
    "codec": ("tests/codec", "tests/values/test_object_refs.py", "-k", "not postgres"),
    "sql": (
        "tests/contract/test_sqlite.py",
        "tests/test_same_draws.py",
        "tests/test_checkpoints.py",
        "tests/test_checkpoints_in_pieces.py",
        "tests/prompts",
        "tests/test_buffers.py",
        "tests/test_snapshots.py",
        "tests/test_undone_draws.py",
        "tests/test_statemachine.py",
        "-k",
        "not postgres",
    ),
    "failover": ("tests/test_hosts.py", "tests/cluster"),
    "prompts": ("tests/prompts", "tests/produce/test_sources.py", "-k", "not postgres"),
    "produce": ("tests/produce", "-k", "not postgres"),
    "observe": ("tests/observe", "-k", "not postgres"),
    "diagnosis": ("tests/test_diagnosis.py", "tests/test_circumstances.py", "-k", "not postgres"),
    "record": ("tests/test_batches.py", "tests/contract/test_sqlite.py"),
    "views": ("tests/test_views.py", "-k", "not postgres"),
    "web": ("tests/web", "tests/test_tokens.py", "-k", "not postgres"),
}
