"""A lock for work that goes on and on, in turns."""

from __future__ import annotations

import threading
import time
from collections import deque

_GIVE_WAY_S = 1e-4
"""Longer than it takes to wake a thread that waits for a lock; short beside any step."""


class Turns:
    """A re-entrant lock for threads of which some take it again and again, to run one step at a time.

    A plain lock goes to whoever runs when it is free, and that is most often the thread that has just freed it; others
    would wait for minutes. ``give_way``, called between two steps, lets them in.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[None] = deque()  # one for each thread; appending and popping are atomic

    def __enter__(self) -> None:
        self._waiting.append(None)
        try:
            self._lock.acquire()
        finally:
            self._waiting.pop()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()

    def give_way(self) -> None:
        """Let another thread have the lock, if any wants it. Not while holding it."""
        if self._waiting:
            time.sleep(_GIVE_WAY_S)
