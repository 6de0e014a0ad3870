"""What the process that others are forked from imports."""

import tests.faults.operations
import tests.faults.roles  # noqa: F401
