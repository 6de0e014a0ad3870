"""The place of a mistake in the text of a query."""

from __future__ import annotations

import json

import pytest

from replaybuf.errors import QueryError
from replaybuf.query import parse, span_of


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"staleness": {"$gt": "x"}}', '"$gt": "x"'),
        ('{"stalenes": 1}', '"stalenes": 1'),
        ('{ "reward" : 1 , "$and" : [ {} , {"staleness": {"$gte": 1, "$lt": []}} ] }', '"$lt": []'),
        ('{"uid": {"$in": [1, 2, "three", 4]}}', '"three"'),
        ('{"tags.a.b": {"$like": "}{"}}', '"$like": "}{"'),
        ('{"$or": [{"\\u0073tatus": "no such"}]}', '"\\u0073tatus": "no such"'),
        ('{"$or": {"uid": 1}}', '"$or": {"uid": 1}'),
    ],
)
def test_the_place_of_an_error_is_found_in_the_text(text: str, wrong: str) -> None:
    with pytest.raises(QueryError) as caught:
        parse(json.loads(text))
    span = span_of(text, caught.value.place)
    assert span is not None
    assert text[slice(*span)] == wrong


@pytest.mark.parametrize("text", ["", "{", '{"a"', '{"a": [1, {"b"', '{"a": 1}', "[" * 100_000])
def test_a_place_that_is_not_there_has_none(text: str) -> None:
    assert span_of(text, "staleness.$gt") is None


def test_the_whole_query_is_the_empty_place() -> None:
    assert span_of(' {"uid": [1, 2]} ', "") == (1, 16)
