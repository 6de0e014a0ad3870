"""`replaybuf doctor`: what is wrong with a database, and what can be done about it.

A module `check_...` for each area has its questions in SQL and the findings, `repairs` what mends them. `rescue` saves
what is left of a damaged file.
"""

from replaybuf.doctor.examine import examine
from replaybuf.doctor.findings import Check, CheckContext, Finding, Severity

__all__ = ["Check", "CheckContext", "Finding", "Severity", "examine"]
