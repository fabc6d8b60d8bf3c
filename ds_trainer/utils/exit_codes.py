"""What the exit code of a training says to whoever started it: a batch script, a launcher, a scheduler."""

from __future__ import annotations

DONE = 0
FAILED = 1
CANNOT_WORK = 2
"""The request cannot work; it would fail again."""
REQUEUE = 75
"""Stopped at a complete checkpoint, by a signal or before a time limit: start it again. (As ``EX_TEMPFAIL`` is.)"""
HUNG = 76
"""The watchdog ended a job that did not get on: start it again, from its last checkpoint."""
STOPPED = 77
"""Stopped at a complete checkpoint because somebody asked for it: do not start it again."""

RESTARTABLE = (REQUEUE, HUNG)
