"""The seeded mutations fit the code as it is."""

from __future__ import annotations

import ast

import pytest

from tests.mutations.seeds import MUTATIONS, NEAR, ROOT, Mutation


def test_their_texts_are_there_once() -> None:
    assert [problem for mutation in MUTATIONS if (problem := mutation.problem())] == []


@pytest.mark.long
def test_they_become_other_code() -> None:
    assert [mutation.name for mutation in MUTATIONS if _is_the_same(mutation)] == []


def _is_the_same(mutation: Mutation) -> bool:
    before = (ROOT / "replaybuf" / mutation.file).read_text()
    return ast.dump(ast.parse(before.replace(mutation.old, mutation.new))) == ast.dump(ast.parse(before))


def test_names_are_unique_and_areas_have_tests() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 60
    assert {mutation.area for mutation in MUTATIONS} == set(NEAR)


def test_the_nearby_tests_are_there() -> None:
    for arguments in NEAR.values():
        for path, _, name in (argument.partition("::") for argument in arguments if argument.startswith("tests/")):
            assert (ROOT / path).exists(), path
            assert all(f" {part}" in (ROOT / path).read_text() for part in name.split("::") if part), name
