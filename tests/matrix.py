"""Which stores a test runs on by default: those that can break its law. On the others it runs in the long form."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

import pytest

#: Fixtures whose parameter is a kind of store.
_FIXTURES = {
    "url",
    "new_url",
    "kind",
    "flowing_url",
    "shared_url",
    "kept_url",
    "sound",
    "original",
    "store",
    "buffers",
    "trained",
    "filled",
    "busy",
    "hostile",
    "empty",
    "started",
    "where",
    "places",
    "copies",
    "empty_url",
}
_NAMES = {
    "memory://": "memory",
    "postgres": "postgresql",
    # Databases whose payloads are in a folder, or in an object store
    "sqlite-folder": "sqlite",
    "postgresql-folder": "postgresql",
    "sqlite-objects": "objects",
}
_KINDS = {"memory", "sqlite", "postgresql", "objects"}

_STRATEGY = ("memory",)  # what a strategy, or another layer above the stores decides, whatever the database
_DATABASES = ("sqlite", "postgresql")
_SHARED = ("memory", "postgresql")  # several users at once
_PLACES = (*_DATABASES, "objects")

# Operations of which a kill, or a cancellation, on PostgreSQL is tested by default: its rollback is the same for all.
_KILLED = ("put", "take", "lease_batch as a block")

#: Patterns of node ids, of which the first that fits holds.
_BY_DEFAULT: list[tuple[str, tuple[str, ...]]] = [
    ("bad_input/test_arguments.py::*", _STRATEGY),
    ("bench/test_bench.py::test_a_load_accounts*", _DATABASES),
    ("bench/test_bench.py::test_a_put_counts*", ("postgresql",)),
    ("bench/test_bench.py::*", ("sqlite",)),
    ("chunks/test_races.py::*chunk_is_made_once*", ("postgresql",)),
    ("chunks/*restart*", ("sqlite",)),
    ("chunks/*test_death__*", ("sqlite",)),
    ("chunks/*", _STRATEGY),
    ("schedules/test_schedules.py::*is_caught*", ("sqlite",)),
    ("reverb/*checkpoint*", ("sqlite",)),
    ("reverb/*other_processes*", ("sqlite",)),
    ("reverb/*apart*", ("postgresql",)),
    ("reverb/*in_its_order*", ("memory", "postgresql")),
    ("reverb/*errors_are*", ("sqlite",)),
    ("reverb/*", _STRATEGY),
    ("produce/test_odd_loops.py::*", _STRATEGY),
    ("produce/test_strategies.py::*", _STRATEGY),
    ("produce/test_staleness_in_production.py::*", _STRATEGY),
    ("produce/test_production_ends.py::*", ("sqlite",)),
    ("produce/test_workers.py::test_workers_together*", ("postgresql",)),
    ("produce/test_workers.py::*", _STRATEGY),
    ("produce/test_hooks.py::*", _STRATEGY),
    ("produce/test_produce_processes.py::*sqlite-work-partial*", ("sqlite",)),
    ("produce/test_produce_processes.py::*", ()),  # on PostgreSQL an example is killed
    ("produce/test_sampler.py::*restore*", ("postgresql",)),
    ("produce/test_sampler.py::*", _STRATEGY),
    ("xtuner/test_their_rules.py::*", _DATABASES),
    ("xtuner/test_replay_buffer.py::*refresh*", _DATABASES),
    ("xtuner/test_replay_buffer.py::*resumes_in_place*", _DATABASES),
    ("xtuner/test_replay_buffer.py::*", ("sqlite",)),
    ("faults/test_cancelled.py::*loop*put*", _DATABASES),
    ("faults/test_cancelled.py::*loop*", ("sqlite",)),
    ("faults/test_cancelled.py::*handed_out_again*", _DATABASES),
    *((f"faults/test_{law}.py::*postgresql-{name}*", _DATABASES) for law in ("kills", "cancelled") for name in _KILLED),
    ("faults/test_kills.py::*", ("sqlite",)),
    ("faults/test_cancelled.py::*", ("sqlite",)),
    ("cancellation/*::test_a_process_that_ends*", ("sqlite",)),
    ("cancellation/*", _DATABASES),
    ("buffer/test_forks.py::*parent_that_was_killed*", ("postgresql",)),
    ("buffer/test_forks.py::*closed_all_files*", _DATABASES),
    ("buffer/test_forks.py::*", ("sqlite",)),
    ("sync/test_sync_calls.py::*thread*", _SHARED),
    ("sync/test_sync_calls.py::*", _STRATEGY),
    ("sync/test_sync_processes.py::*ctrl_c_ends*", ("postgresql",)),
    ("sync/test_sync_processes.py::*", ("sqlite",)),
    ("files/test_importing.py::*killed*", ("sqlite",)),
    ("files/test_importing.py::*in_the_middle*", _DATABASES),
    ("files/*", _STRATEGY),
    ("values/test_object_refs.py::*", _STRATEGY),
    ("values/test_stores.py::*", _DATABASES),
    ("presence/test_records.py::*killed*", ("postgresql",)),
    ("presence/test_records.py::*any_text*", _DATABASES),
    ("presence/*", ("sqlite",)),  # on both databases: cli/test_why.py
    *(
        (f"storage/test_circumstances.py::*{law}*", ("sqlite",))
        for law in ("second_short", "dead_producer", "spurts", "not_kept")
    ),
    *((f"buffer/test_waits.py::*{law}*", _DATABASES) for law in ("a_dataset", "after_a_change", "wake_nobody")),
    ("buffer/test_waits.py::*", ("sqlite",)),
    ("faults/test_steady.py::*", ("sqlite",)),
    ("faults/test_bounded.py::*", ("postgresql",)),
    ("faults/test_storm.py::*postgresql-prioritized-*", _DATABASES),
    ("faults/test_storm.py::*sqlite-prompts*", _DATABASES),
    ("faults/test_storm.py::test_every_group*", ("sqlite",)),
    ("faults/test_storm.py::test_every_prompt*", ("postgresql",)),
    ("faults/test_storm.py::*", ()),
    ("cli/test_doctor.py::test_what_is_wrong*view*", _DATABASES),
    ("cli/test_doctor.py::test_what_is_wrong*", ("sqlite",)),  # on PostgreSQL all at once; an index: probe
    ("cli/test_doctor_places.py::*", ("sqlite",)),
    ("cli/test_watch.py::test_who_waits*", ("sqlite",)),
    ("cli/test_why.py::test_a_waiter_that_was_killed*", ("postgresql",)),
    # What is found on both databases, and is told in words
    *((f"cli/test_why.py::*{law}*", ("sqlite",)) for law in ("share_a_line", "one_name", "asked_for", "each_buffer")),
    *((f"cli/test_save.py::*{law}*", ("sqlite",)) for law in ("a_policy", "by_its_name", "resumed?postgres-sqlite")),
    ("cli/test_files.py::*imported?postgres-sqlite*", ("sqlite",)),
    ("cli/test_doctor.py::*sound*", _DATABASES),
    ("cli/test_doctor.py::*looking*", _DATABASES),
    ("cli/test_doctor.py::*all_at_once*", _DATABASES),
    ("cli/test_doctor.py::*", ("sqlite",)),
    *((f"cli/test_trace.py::*{law}*", _DATABASES) for law in ("three_commands", "life")),
    ("cli/test_trace.py::*", ("sqlite",)),
    *((f"cli/test_rm.py::*{law}*", _DATABASES) for law in ("exact_number", "restore_asks", "leave_leases")),
    ("cli/test_rm.py::*", ("sqlite",)),
    *((f"cli/test_show.py::*{law}*", _DATABASES) for law in ("json", "worst_and", "leased")),
    *((f"cli/test_ls.py::*{law}*", _DATABASES) for law in ("where_is", "same_types", "shown_with", "one_b")),
    ("cli/test_help.py::*sql -*", _DATABASES),
    *((f"cli/test_help.py::*{law}*", _DATABASES) for law in ("older_schema", "upgrade")),
    *((f"cli/test_{name}.py::*", ("sqlite",)) for name in ("help", "ls", "show")),
    *((f"web/test_pages.py::*{law}*", _DATABASES) for law in ("overview", "prometheus", "every_group", "however")),
    ("web/test_pages.py::test_groups*", _DATABASES),
    ("web/test_pages.py::test_a_group_shows*", _DATABASES),
    ("web/test_page.py::*cant_be_read*", _DATABASES),
    *((f"web/test_{name}.py::*", ("sqlite",)) for name in ("pages", "page", "browser")),
    ("demo/test_demo_run.py::test_workers_*", ("sqlite",)),
    ("demo/test_start.py::*", ("sqlite",)),
    ("places/test_buffers.py::test_every_byte*", _PLACES),
    ("places/test_buffers.py::test_bytes_are_on_the_disk*", _DATABASES),
    *((f"places/test_kills.py::test_{law}*", _PLACES) for law in ("a_process_that_is_killed_at", "processes_that")),
    ("places/test_files.py::test_space_comes_back*", _DATABASES),
    *((f"places/test_files.py::*{law}*", _DATABASES) for law in ("until_their_taker", "undone_late")),
    *((f"places/test_{name}.py::*", ("sqlite",)) for name in ("buffers", "files", "kills", "lost_places")),
    ("places/test_settings.py::*", ("sqlite",)),
    *((f"places/test_originals.py::*{law}*", _DATABASES) for law in ("takes_nothing",)),
    ("places/test_reading.py::*found_by_sql*", _DATABASES),
    ("places/test_objects.py::test_the_view*", _DATABASES),
    *((f"places/test_{name}.py::*", ("sqlite",)) for name in ("originals", "reading", "objects")),
    *((f"storage/test_snapshots.py::*{law}*", ("sqlite",)) for law in ("partial_file", "error_of_progress")),
    # Of two ways in the same statements, the other one on PostgreSQL
    ("storage/test_same_draws.py::*postgresql-replayed*", ("sqlite",)),
    *((f"storage/test_shards.py::*postgresql-{case}*", ("sqlite",)) for case in ("uniform", "options1")),
    ("storage/test_circumstances.py::*cannot_decode*postgresql-True*", ("sqlite",)),
    ("storage/test_batches.py::*last_refresh*postgresql-100*", ("sqlite",)),
    *((f"produce/test_coming_back.py::*postgresql-{case}?", ("memory",)) for case in (4, 9)),
    ("storage/test_draws.py::*any_order*", ("postgresql",)),  # compared with SQLite in memory
    ("storage/test_lease_clock.py::*bounded_rate*", ("sqlite",)),
    ("storage/test_history.py::*again*", _DATABASES),
    ("storage/test_history.py::*", ("sqlite",)),
    *((f"storage/test_batches.py::*{law}*", _DATABASES) for law in ("its_consumer", "nobody_received", "last_refresh")),
    *((f"storage/test_batches.py::*{law}*", _DATABASES) for law in ("may_be_anything", "last_ones")),
    ("storage/test_batches.py::*", ("sqlite",)),
    *((f"storage/test_checkpoints.py::*{law}*", _DATABASES) for law in ("at_once", "writers")),
    *((f"storage/test_checkpoints.py::*{law}*", _DATABASES) for law in ("who_restores", "first_random")),
    ("storage/test_checkpoints.py::*", ("sqlite",)),  # random ones: storage/test_history.py
    # Statements that are the same on both: where a database's locks, notices and types matter, on both
    *((f"buffer/test_buffers.py::*{law}*", _DATABASES) for law in ("queries", "leases", "a_wait", "random")),
    ("buffer/test_buffers.py::*not_in_the_other*", _DATABASES),
    ("buffer/test_buffers.py::*", ("sqlite", "memory")),
    *((f"buffer/test_filling.py::*{law}*", _DATABASES) for law in ("several_processes", "keeps_new", "damaged")),
    ("buffer/test_filling.py::*", ("sqlite",)),
    *((f"buffer/test_put_many.py::*{law}*", _SHARED) for law in ("cancelled", "wait_for_it")),
    ("buffer/test_put_many.py::*", _STRATEGY),
    # Of a ledger: what others who draw from it can break
    ("produce/test_coming_back.py::*cancelled*", _DATABASES),
    ("produce/test_coming_back.py::*dead_worker*", _SHARED),
    ("produce/test_coming_back.py::*", _STRATEGY),
    ("produce/test_by_rollout.py::*dead_worker*", _SHARED),
    ("produce/test_by_rollout.py::*added_once*", _SHARED),
    ("produce/test_by_rollout.py::*", _STRATEGY),
    ("produce/test_datasets.py::*several_workers*", _SHARED),
    ("produce/test_datasets.py::*", _STRATEGY),
    ("produce/test_difficulty.py::*a_restore*", ("sqlite",)),
    ("produce/test_difficulty.py::*several_samplers*", _DATABASES),
    ("produce/test_difficulty.py::*what_is_known*", _SHARED),
    ("produce/test_difficulty.py::*", ("memory", "sqlite")),
    ("torch/test_loading.py::*every_group*none*", ("sqlite",)),
    ("torch/test_loading.py::*every_group*spawned*", ("sqlite",)),
    ("torch/test_loading.py::*leases_go_on*", ("sqlite",)),
    ("torch/test_loading.py::*", ("postgresql",)),
    ("torch/test_collate.py::*folder-sqlite*", ("sqlite",)),
    ("torch/test_collate.py::*own_part*database-postgresql-split*", ("postgresql",)),
    ("torch/test_collate.py::*", ()),
    ("torch/test_ranks.py::*killed_one_had*", _DATABASES),
    ("torch/test_ranks.py::*split*source*", ("postgresql",)),
    ("torch/test_ranks.py::*", ("sqlite",)),
    *((f"observe/test_metrics.py::*{law}*", _DATABASES) for law in ("one_scan", "works_and_waits", "are_those")),
    ("observe/test_metrics.py::*", ("sqlite",)),
    ("integrations/test_published.py::*nemo_rl_gets_no_part*", _DATABASES),
    ("integrations/test_published.py::*", ("sqlite",)),
    ("cli/test_requeue.py::*can_be_drawn_again_and*", _DATABASES),
    ("cli/test_requeue.py::*", ("sqlite",)),
    ("cli/test_watch.py::*where_the_run_is*", _DATABASES),
    ("cli/test_watch.py::*", ("sqlite",)),
    ("places/test_copies.py::*all_payloads_in_it*", _DATABASES),
    ("places/test_copies.py::*", ("sqlite",)),
    ("rollouts/test_frameworks.py::*", _DATABASES),
    ("examples/test_runs.py::test_trainer_and_workers*", ("postgresql",)),
    ("examples/test_runs.py::*", ("sqlite",)),
]


#: Laws of the contract, by how their names begin, of what a buffer does above its store.
_ABOVE_THE_STORE = ("a_heartbeat_keeps", "a_lost_lease_shows", "a_size_of_nothing", "what_is_ready")
_ABOVE_THE_STORE += ("waiting_ends_at", "a_full_buffer_refuses", "a_result_says", "what_cannot_be_annotated")
_ABOVE_THE_STORE += ("close_ends_those", "a_cancelled_wait", "they_follow_a_group", "take_batch_waits")

#: Whole runs of seconds, and further cases of a law, by what they are tested with by default.
_LONG = (
    "bench/test_bench.py::test_a_load_accounts*postgresql*",  # on SQLite; the paced one on PostgreSQL
    "bench/test_bench.py::test_a_signal*15*",  # Ctrl-C
    # What a buffer does above its store: on SQLite
    *(f"contract/test_contract.py::TestPostgres*::test_{law}*" for law in _ABOVE_THE_STORE),
    "storage/test_lease_clock.py::*agree*sqlite--7200.0?",
    "storage/test_lease_clock.py::*agree*postgresql-7200.0?",
    "cli/test_watch.py::test_ctrl_c*sqlite*",  # on PostgreSQL, where a connection is open
    "demo/test_demo_run.py::test_killed_at_random*",  # examples
    "demo/test_demo_run.py::test_workers_killed*",  # examples: trainer and workers
    "examples/test_runs.py::test_one_process*sync.py*",  # disaggregated, and the demo's kills in every mode
    "examples/test_runs.py::test_a_mistake*arguments[12]*",  # the first mistake
    "query/test_sql.py::test_the_largest_queries_run*many*",  # the other large ones
    "query/test_sql.py::test_the_largest_queries_run*postgresql-wide and*",  # on SQLite
    "contract/test_contract.py::TestSqlite::test_old_ones_are_as_random*kept*",  # archived ones
    "places/test_buffers.py::test_cancelled_puts_and_takes*-0.0?",
    "places/test_kills.py::test_a_process_that_is_killed_at_any_point*postgresql*",
    "places/test_kills.py::test_processes_that_are_killed*sqlite*",
    "xtuner/test_their_rules.py::test_random_runs*postgresql*",  # on SQLite
    # Forked; every group with spawned ones
    *(f"torch/test_loading.py::*{law}*spawned*" for law in ("errors_of_workers", "trains_on_it", "as_others_are")),
    "sync/test_sync_processes.py::*ends_quietly*closed*",
    # Lost before the answer, which is the worst moment, of a put, a take and an acknowledgement
    "faults/test_postgres_connections.py::*before it arrives*",
    "faults/test_postgres_connections.py::test_a_lease_ends_once*give_back*",
    "faults/test_postgres_connections.py::test_a_take_hands_out_once*ended by the server*",
    "schedules/test_schedules.py::test_three*postgresql*",  # pairs of calls meet at its locks
    # Each of the calls once, committed or not
    *(f"faults/test_postgres_restarts.py::*not_told_comes*{case}?" for case in ("get-False", "lease_batch-True")),
    "produce/test_workers.py::test_the_capacity*reject*",  # produce/test_production_ends.py
)

#: Contracts of which each law is tested by default, but only with its first case: a SQLite file has the others.
_EACH_LAW_ONCE = ("contract/test_contract.py::TestPostgres",)


def _later_cases(items: list[pytest.Item]) -> set[str]:
    """Return the node ids of the cases of a law that its first case answers for."""
    laws: set[tuple[str, str]] = set()
    later = set()
    for item in items:
        contract, law = item.nodeid.removeprefix("tests/").rpartition("::")[0], getattr(item, "originalname", "")
        if contract in _EACH_LAW_ONCE:
            if (contract, law) in laws:
                later.add(item.nodeid)
            laws.add((contract, law))
    return later


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)))


def mark_long(items: list[pytest.Item]) -> None:
    """Mark what isn't run by default."""
    later, long = _later_cases(items), _any_of(_LONG)
    by_default = [(_any_of([pattern]), set(kinds)) for pattern, kinds in _BY_DEFAULT]
    for item in items:
        stores = _stores(item)
        name = item.nodeid.removeprefix("tests/")
        if item.nodeid in later or long.match(name):
            item.add_marker(pytest.mark.long)
        kinds = next((kinds for pattern, kinds in by_default if pattern.match(name)), None) if stores else None
        if kinds is not None and not stores <= kinds:
            item.add_marker(pytest.mark.long)


#: What can break in seconds: pure functions, the layers above a store, and the contract in memory and on a SQLite file.
_FAST = (
    "bad_input/test_arguments.py",
    "buffer/test_buffers.py",
    "chunks/",
    "codec/",
    "contract/test_contract.py::TestSqlite",
    "contract/test_contract.py::TestModel",
    "produce/",
    "query/",
    "rollouts/",
    "rules/",
    "storage/test_checkpoints.py",
    "storage/test_same_draws.py",
    "test_config.py",
    "test_common.py",
)
_SLOW = (
    "chunks/test_races.py",
    "produce/test_sources.py",
    "produce/test_records.py",
    "produce/test_hooks.py",
    "produce/test_worker",
)
_SERVER = {"postgres_url", "postgres_database", "postgres_databases", "lent_database"}


def mark_fast(items: list[pytest.Item]) -> None:
    """Mark the tests of the inner loop."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        slow = item.get_closest_marker("long") or "postgresql" in _stores(item) or _SERVER & set(item.fixturenames)
        if name.startswith(_FAST) and not name.startswith(_SLOW) and not slow:
            item.add_marker(pytest.mark.fast)


def _stores(item: pytest.Item) -> set[str]:
    """The kinds of store that this test runs on."""
    parameters = item.callspec.params.items() if hasattr(item, "callspec") else ()
    values = {str(value) for name, value in parameters if name in _FIXTURES}
    return {_NAMES.get(value, value) for value in values} & _KINDS
