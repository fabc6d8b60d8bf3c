"""Exit codes of a training run, for the batch script, launcher or scheduler that started it."""

from __future__ import annotations

DONE = 0
FAILED = 1
CANNOT_WORK = 2
"""The request cannot work; a restart would fail again."""
NOTHING_FITS = 3
"""``ds-trainer plan``: no layout fits."""
REQUEUE = 75
"""Stopped at a complete checkpoint by a signal or a time limit: restart it. (The value of ``EX_TEMPFAIL``.)"""
HUNG = 76
"""The watchdog ended a job that had stalled: restart it from its last checkpoint."""
STOPPED = 77
"""Stopped at a complete checkpoint at the request of a person: do not restart it."""

RESTARTABLE = (REQUEUE, HUNG)
