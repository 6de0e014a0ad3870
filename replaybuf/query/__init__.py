"""Queries over the metadata of groups: a Mongo-like dict, and its translation to SQL.

`parse` turns a dict into nodes and checks it; `to_text` turns nodes into JSON. `sql_conditions` has their meaning in
SQL, and is imported where it is needed, because of SQLAlchemy.
"""

from __future__ import annotations

from replaybuf.query.nodes import FIELDS as FIELDS
from replaybuf.query.nodes import TAG_PREFIX as TAG_PREFIX
from replaybuf.query.nodes import BetweenNode as BetweenNode
from replaybuf.query.nodes import FieldType as FieldType
from replaybuf.query.nodes import LogicNode as LogicNode
from replaybuf.query.nodes import Node as Node
from replaybuf.query.nodes import NotNode as NotNode
from replaybuf.query.nodes import Query as Query
from replaybuf.query.nodes import ScalarNode as ScalarNode
from replaybuf.query.nodes import SetNode as SetNode
from replaybuf.query.nodes import Value as Value
from replaybuf.query.nodes import to_text as to_text
from replaybuf.query.parse import parse as parse
from replaybuf.query.parse import span_of as span_of
