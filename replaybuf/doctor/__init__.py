"""`replaybuf doctor`: what is wrong with a database, and what can be done about it.

A module `check_...` for each area has its questions in SQL, the findings, and the repairs.
"""

from replaybuf.doctor.examine import examine, repair
from replaybuf.doctor.findings import Check, CheckContext, Finding, Severity
from replaybuf.doctor.rescue import Rescued, rescue

__all__ = ["Check", "CheckContext", "Finding", "Rescued", "Severity", "examine", "repair", "rescue"]
