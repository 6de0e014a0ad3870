"""Queries over the metadata of groups: a Mongo-like dict, and its compilation to SQL.

`parse` turns a dict into checked nodes, and `query_of` what people type; `to_text` turns nodes into JSON.
`sql_conditions` compiles nodes to SQL, and is imported on demand, because it needs SQLAlchemy.
"""

from __future__ import annotations

from replaybuf.rules.query.nodes import FIELDS as FIELDS
from replaybuf.rules.query.nodes import LogicNode as LogicNode
from replaybuf.rules.query.nodes import Node as Node
from replaybuf.rules.query.nodes import NotNode as NotNode
from replaybuf.rules.query.nodes import Query as Query
from replaybuf.rules.query.nodes import ScalarNode as ScalarNode
from replaybuf.rules.query.nodes import SetNode as SetNode
from replaybuf.rules.query.nodes import Value as Value
from replaybuf.rules.query.nodes import to_text as to_text
from replaybuf.rules.query.parse import parse as parse
from replaybuf.rules.query.parse import query_of as query_of
