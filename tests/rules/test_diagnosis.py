"""Why somebody waits, as a function of the circumstances: the cause to remove comes first, the others follow."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf.rules.causes import diagnose
from replaybuf.rules.circumstances import Circumstances, Taking, Wait, Worker
from replaybuf.rules.diagnosis import Diagnosis, Fact, Reason, and_also
from replaybuf.rules.limits import Limits
from replaybuf.rules.transitions import Tally
from tests.rules.diagnosed import (
    BLOCK,
    CASES,
    FEW,
    FOR_ROOM,
    FOR_TRAINER,
    FULL,
    GREAT,
    HEALTHY,
    KILLED,
    LIVE,
    NOW,
    STEADY,
    C,
    put_at,
    since,
    tallies,
    wait,
    why,
    worker,
)


@pytest.mark.parametrize("case", CASES)
def test_the_sentence_names_the_cause_to_remove(case: str) -> None:
    diagnosis, reason, text = CASES[case]
    assert diagnosis.reason == reason
    assert text in diagnosis.sentence
    assert "\n" not in str(diagnosis)


def test_every_reason_is_met() -> None:
    assert {reason for _, reason, _ in CASES.values()} == set(Reason)


def test_other_causes_follow_as_one_fact() -> None:
    """Behind what expired are producers that were killed, and who took the last groups."""
    counts = tallies(expired=64, completed_put=80, completed_expired=64, completed_leased=16)
    diagnosis = why(wait(), counts, workers=[KILLED], last_take=Taking("trainer-2", NOW - 7, 16))
    assert diagnosis.reason == Reason.EXPIRED
    line, silent, last = diagnosis.facts
    assert line.text == "task math: 0 completed groups there, 64 needed (64 expired, 16 leased)"
    assert (silent.reason, "no producer is left" in silent.text) == (Reason.ABSENT, True)
    assert last.text == "last drawn: 16 groups by trainer-2 at 20:43:03 UTC"


@pytest.mark.parametrize(("lost", "cause"), [("completed_set_aside", "failed"), ("completed_expired", "expired")])
def test_groups_that_are_lost_later_than_in_the_hour_of_their_put_explain_a_wait(lost: str, cause: str) -> None:
    counts: Any = tallies(completed=5, completed_put=10, **{lost: 5})
    diagnosis = why(wait(10), counts, workers=[LIVE], last_put=put_at(3660), **since(3600, completed=10))
    assert f"5 of the 5 groups put {cause}" in diagnosis.sentence


@pytest.mark.parametrize("case", HEALTHY)
def test_groups_that_arrive_come_first_in_a_healthy_run(case: str) -> None:
    """One came a second ago, and 7 of 60 are missing: what else there is follows."""
    counts, circumstances = HEALTHY[case]
    diagnosis = why(wait(60), tallies(completed=53, completed_put=48) | counts, **STEADY | circumstances)
    assert diagnosis.reason == Reason.SLOW
    assert "(53 of 60): gen-1 is alive, the last group was put at 20:43:09 UTC, and more are" in diagnosis.sentence
    assert len([fact for fact in diagnosis.facts if fact.reason]) == 1


@pytest.mark.parametrize(("count", "reason"), [(60, Reason.SLOW), (62, Reason.UNFIT)])
def test_what_is_generated_counts_as_it_was_before(count: int, reason: Reason) -> None:
    """Of 24 in flight a third will pass the filter: 8, no more."""
    counts = tallies(completed=53, completed_put=50, filtered_put=100, init_leased=24)
    assert why(wait(count), counts, workers=[LIVE]).reason == reason


def test_what_a_worker_that_is_gone_holds_is_no_deadlock() -> None:
    """Though all others wait for the trainer: other workers generate it when the lease ends."""
    diagnosis, _, _ = CASES["one waits, and a worker that was killed holds the rest"]
    assert "deadlock" not in str(diagnosis)


def test_a_wait_that_can_never_end_is_final() -> None:
    """Since a dataset has ended; not while enough is in flight, or while another task lacks more."""
    facts = {"workers": [LIVE], "datasets": {"math": 50}}
    assert why(wait(10), FEW, **facts).final
    for still in ({"init_leased": 3}, {"init": 1}, {"completed_leased": 1}):
        assert not why(wait(10), FEW | tallies(**still), **facts).final


@pytest.mark.parametrize("seconds", [2, 13, 22, 45, 59])
def test_one_situation_has_one_sentence(seconds: float) -> None:
    """Whenever its idle workers gave their last sign of life."""
    circumstances = Circumstances(NOW, FEW, workers=[worker(seen=seconds)], last_put={("math", C): NOW - 100})
    sentence = "gen-1 is alive, the last group was put at 20:41:30 UTC, and more are needed. Wait, ask for fewer"
    assert sentence in diagnose(wait(), circumstances).sentence
    assert circumstances.workers[0].state(NOW) == "alive"


def test_a_moment_of_another_day_has_its_date() -> None:
    diagnosis = why(wait(), FEW, workers=[worker(seen=3 * 86_400)])
    assert "gen-1 went silent: last seen at 2025-11-19 20:43 UTC" in diagnosis.sentence


def test_of_several_tasks_the_one_that_comes_last_by_itself_is_named() -> None:
    waiting = Wait({"math": 64, "code": 8, "cod": 1})
    counts = FEW | tallies("code", completed=9)
    diagnosis = diagnose(waiting, Circumstances(NOW, counts, workers=[LIVE]))
    assert (diagnosis.task_name, diagnosis.reason) == ("cod", Reason.NO_SUCH_TASK)
    assert "Did you mean code?" in diagnosis.sentence
    assert any("Too little is ready for math (8 of 64)" in fact.text for fact in diagnosis.facts)
    assert not any("ready for code" in fact.text for fact in diagnosis.facts)


def test_tasks_that_lack_groups_for_one_cause_are_in_one_sentence() -> None:
    """The cause is said once, be it the first or one of the others."""
    counts = FEW | tallies("code", completed_leased=8, completed_put=65)
    waiting = Wait({"math": 64, "code": 8, "chat": 8})
    diagnosis = diagnose(waiting, Circumstances(NOW, counts | tallies("chat", completed_put=1), workers=[KILLED]))
    assert diagnosis.sentence.startswith("Nothing is ready for code (0 of 8): all 8 completed groups are leased")
    [also] = [fact.text for fact in diagnosis.facts if fact.reason]
    assert "Too little is ready for code (0 of 8), math (8 of 64) and chat (0 of 8): no producer is left" in also
    of_both = diagnose(
        Wait({"math": 64, "code": 8}), Circumstances(NOW, FEW | tallies("code", completed_put=8), workers=[KILLED])
    )
    assert of_both.sentence.startswith("Too little is ready for math (8 of 64) and code (0 of 8): no producer is left")
    assert str(of_both).count("no producer is left") == 1
    counts = FEW | tallies("code", completed_put=8)
    slow = Circumstances(NOW, counts, workers=[LIVE], last_put={("math", C): NOW - 9, ("code", C): NOW - 4})
    sentence = diagnose(Wait({"math": 64, "code": 8}), slow).sentence
    assert "math (8 of 64) and code (0 of 8): gen-1 is alive, the last group was put at 20:43:06 UTC, and" in sentence


def test_counts_of_several_tasks_are_those_of_each() -> None:
    counts = tallies(completed=16, completed_put=16) | tallies("code", completed=16, completed_put=16)
    answer = diagnose(Wait({"math": 16, "code": 16}, limits=Limits(min_size=20)), Circumstances(NOW, counts))
    assert "math (0 of 16) and code (0 of 16): in each, 16 completed groups are there, but min_size" in answer.sentence


def test_at_least_a_part_is_enough() -> None:
    """What is needed counts, not what would be taken."""
    assert why(wait(8), FEW).reason == Reason.READY


def test_the_numbers_of_each_task_are_facts() -> None:
    counts = tallies(completed=12, expired=3, failed=1, completed_leased=4, archived=9)
    mixed = why(wait(64, '{"times_sampled": 0}'), counts, matches={"math": 2})
    assert "(12 completed before the mix or where, " in mixed.facts[0].text
    diagnosis = why(wait(64, GREAT), counts, matches={"math": 2}, limits=Limits(min_size=16))
    assert diagnosis.facts[0].text == (
        "task math: 2 completed groups there, 64 needed (12 completed before the where, 1 failed, 3 expired, "
        "4 leased), but min_size is 16"
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("math", "math"),
        ("math ", "'math '"),
        ("a b", "a b"),
        ("a  b", "'a  b'"),
        ("a\xa0b", "'a\\xa0b'"),
        ("\t", "'\\t'"),
    ],
)
def test_names_that_differ_in_white_space_look_different(name: str, shown: str) -> None:
    """In each sentence that names the task."""
    diagnosis = diagnose(Wait({name: 3}), Circumstances(NOW, tallies("other", completed_put=1)))
    assert diagnosis.sentence.startswith(f"Nothing is ready for {shown} (0 of 3)")
    assert diagnosis.facts[0].text == f"task {shown}: 0 completed groups there, 3 needed"
    other_diagnosis = diagnose(Wait({"other": 3}), Circumstances(NOW, tallies(name, completed_put=1)))
    assert f"there is the task {shown}." in other_diagnosis.sentence


def test_hostile_texts_stay_on_their_line() -> None:
    """The sentence goes into logs and error messages as it is."""
    hostile = "\x1b]0;owned\x07\n2026-01-01 INFO all is well\r\u202e"
    counts = tallies(hostile, failed=9, failed_put=9)
    waiting = Wait({hostile: 3}, query=hostile, worker=hostile)
    circumstances = Circumstances(NOW, counts, errors={hostile: hostile}, failed_by={hostile: {hostile: 9}}, matches={})
    assert str(diagnose(waiting, circumstances)).isprintable()


@pytest.mark.parametrize(
    ("stored", "limits"),
    [
        ({}, Limits()),
        ({"capacity": 64, "on_full": "block"}, BLOCK),
        (
            {"samples_per_insert": 1.0, "error_buffer": [-8, 8], "min_size": 0},
            Limits(samples_per_insert=1.0, error_buffer=(-8, 8)),
        ),
        ({"of_later_versions": 3}, None),
        ({"capacity": -1}, None),
        ({"capacity": "many"}, None),
    ],
)
def test_limits_are_read_as_a_process_wrote_them(stored: dict[str, Any], limits: Limits | None) -> None:
    assert Limits.recorded(stored) == limits


@pytest.mark.parametrize(
    ("quiet", "workers", "arrives"),
    [(0, [LIVE], True), (30, [LIVE], True), (31, [LIVE], False), (0, [KILLED], False)],
    ids=["now", "for less than a pause", "for longer", "no producer is left"],
)
def test_groups_that_have_stopped_to_come_dont_arrive(quiet: float, workers: list[Worker], arrives: bool) -> None:
    circumstances = Circumstances(NOW, tallies(completed_put=150), workers=workers, last_put={("math", C): NOW - quiet})
    assert circumstances.arrives("math", C) == arrives


def test_a_dataset_that_has_ended_is_why_its_producers_have() -> None:
    answer = why(wait(), FEW, workers=[KILLED], waits=[FOR_TRAINER], datasets={"math": 50})
    assert [answer.reason, *(fact.reason for fact in answer.facts if fact.reason)] == [Reason.FINISHED, Reason.ABSENT]


def test_of_hundreds_of_tasks_few_are_named() -> None:
    """A short answer, and soon: it is made in the event loop of who waits."""
    counts = {(f"task-{number}", C, Tally.PUT): 1 for number in range(300)}
    diagnosis = diagnose(Wait({task: 9 for task, _, _ in counts}), Circumstances(NOW, counts, workers=[LIVE]))
    assert len(str(diagnosis)) < 1500


def test_what_the_consumer_lacks_is_said_with_all_that_is_known() -> None:
    """The producer that has put is one, though it waits."""
    waits = [FOR_ROOM, Wait({"math": 8, "code": 8}, worker="trainer-1")]
    found = why(FOR_ROOM, FULL | tallies("code", completed=3), limits=BLOCK, workers=[LIVE], waits=waits)
    assert "trainer-1 waits itself for 8 completed groups of math and 8 of code: gen-1 waits for room" in found.sentence


def test_who_was_killed_is_replaced_by_a_later_one_that_does_the_same() -> None:
    """Each successor replaces one."""
    killed_workers = [worker(name, seen=500, groups=0, taken=9) for name in ("t-1", "t-2")]
    later = Worker("t-3", NOW - 400, NOW - 5, taken=9)
    around = Circumstances(NOW, FEW, workers=[LIVE, later, *killed_workers, worker("gen-2", seen=500)])
    assert [around.state_of(w) for w in around.workers] == ["alive", "alive", "replaced", "silent", "silent"]


def test_what_follows_a_question_is_a_sentence() -> None:
    diagnosis = Diagnosis(Reason.ABSENT, "Is the consumer running?", facts=(Fact("task math: 2 groups there"),))
    assert and_also(str(diagnosis), "nothing was stored") == (
        "Is the consumer running? Task math: 2 groups there; nothing was stored"
    )
