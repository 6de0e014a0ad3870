"""Policies of one's own."""

import pytest

from replaybuf.errors import QueryError
from replaybuf.rules.policies import OrderTerm, ReplayPolicy


def test_one_that_orders_by_an_unknown_field_is_refused_when_it_is_defined() -> None:
    with pytest.raises(QueryError, match=r"^Broken.order: can't order by 'rewards'; did you mean 'reward'\?"):
        type("Broken", (ReplayPolicy,), {"name": "broken", "order": (OrderTerm("rewards"),)})
