"""Databases to observe."""

from tests.cli.conftest import _no_variables as _no_variables
from tests.cli.conftest import busy as busy
from tests.cli.conftest import empty as empty
from tests.cli.conftest import filled as filled
