"""What the process that others are forked from imports."""

import gc

import tests.faults.operations
import tests.faults.roles
import tests.faults.runs
import tests.faults.steady
import tests.processes.worker  # noqa: F401

gc.collect()
gc.freeze()  # no fork has to look through what all of them share
