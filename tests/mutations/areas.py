"""Which tests are near which code: arguments of pytest, the quickest first."""

from __future__ import annotations

NEAR = {
    "rules": (
        "tests/rules/test_rules.py",
        "tests/rules/test_transitions.py",
        "tests/contract/test_contract.py::TestSqlite",
    ),
    "races": (
        "tests/rules/test_rules.py",
        "tests/contract/test_contract.py::TestSqliteMemory",
        "tests/storage/test_same_draws.py",
        "-k",
        "not postgres",
    ),
    "rollouts": (
        "tests/rollouts",
        "tests/contract/test_contract.py::TestSqliteMemory",
        "tests/storage/test_views.py",
    ),
    "query": ("tests/query", "-k", "not postgres"),
    "codec": ("tests/codec", "tests/values/test_object_refs.py", "-k", "not postgres"),
    "sql": (
        "tests/contract/test_contract.py::TestSqlite",
        "tests/storage/test_same_draws.py",
        "tests/storage/test_checkpoints.py",
        "tests/storage/test_history.py",
        "tests/produce/test_coming_back.py",
        "tests/produce/test_datasets.py",
        "tests/buffer/test_buffers.py",
        "tests/storage/test_snapshots.py",
        "tests/storage/test_draws.py",
        "tests/side_by_side/test_statemachine.py",
        "-k",
        "not postgres",
    ),
    "filling": (
        "tests/buffer/test_filling.py",
        "tests/rules/test_transitions.py",
        "tests/produce/test_by_rollout.py",
        "-k",
        "not postgres",
    ),
    "failover": (
        "tests/test_hosts.py",
        "tests/faults/test_postgres_connections.py",
        "tests/storage/test_schema.py",
        "tests/cluster",
    ),
    "owner": (
        "tests/buffer/test_put_many.py",
        "tests/cancellation",
        "tests/contract/test_contract.py::TestSqlite",
        "tests/faults/test_postgres_restarts.py",
    ),
    "prompts": ("tests/produce", "-k", "not postgres"),
    "produce": ("tests/produce", "-k", "not postgres"),
    "observe": ("tests/observe", "-k", "not postgres"),
    "diagnosis": ("tests/rules/test_diagnosis.py", "tests/storage/test_circumstances.py", "-k", "not postgres"),
    "record": ("tests/storage/test_batches.py", "tests/contract/test_contract.py::TestSqlite"),
    "views": ("tests/storage/test_views.py", "-k", "not postgres"),
    "web": ("tests/web", "tests/test_common.py", "-k", "not postgres"),
}
