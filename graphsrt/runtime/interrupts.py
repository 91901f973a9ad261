"""Ctrl-C at a moment of our choosing: while messages are half sent or read, it is noted and not raised."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class DeferredInterrupt:
    """Within it, in the main thread, SIGINT only sets ``pending``, until ``deliver`` or the end."""

    def __init__(self) -> None:
        self._handler: Any = None
        self.pending = False

    def __enter__(self) -> Self:
        # In other threads Python raises no signals, and may not set handlers.
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._handler = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if self.pending and kind is None:
            self.deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending = True

    def deliver(self) -> None:
        """Do what the program does on SIGINT: usually, raise KeyboardInterrupt."""
        self.pending = False
        self._handler(signal.SIGINT, None)
