"""What the process that others are forked from imports."""

import tests.faults.operations
import tests.faults.roles
import tests.faults.runs
import tests.histories.workers  # noqa: F401
