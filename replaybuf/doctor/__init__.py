"""`replaybuf doctor`: what is wrong with a database, and what can be done about it."""

from replaybuf.doctor.examine import examine, repair
from replaybuf.doctor.finding import Check, Finding, Level, Look
from replaybuf.doctor.rescue import Rescued, rescue

__all__ = ["Check", "Finding", "Level", "Look", "Rescued", "examine", "repair", "rescue"]
