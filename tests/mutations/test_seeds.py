"""The seeded mutations fit the code as it is."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.mutations.areas import NEAR
from tests.mutations.seeds import MUTATIONS, ROOT, Mutation


@functools.cache
def _dump(source: str) -> str:
    return ast.dump(ast.parse(source))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_its_text_is_there_once_and_becomes_other_code(mutation: Mutation) -> None:
    assert mutation.problem() is None
    before = (ROOT / "replaybuf" / mutation.file).read_text()
    after = before.replace(mutation.old, mutation.new)
    assert ast.dump(ast.parse(after)) != _dump(before)


def test_names_are_unique_and_areas_have_tests() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 60
    assert {mutation.area for mutation in MUTATIONS} == set(NEAR)


def test_the_nearby_tests_are_there() -> None:
    for arguments in NEAR.values():
        assert all((ROOT / argument).exists() for argument in arguments if argument.startswith("tests/"))
