"""Token ids to text, a few at a time, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
# A run of undecodable bytes this long is no unfinished character; without a bound each push would decode it all again.
_MAX_HELD = 64


class Detokenizer:
    """The text of one request as its tokens arrive.

    ``text`` is what is decoded so far, cut before the stop string that was complete first (of several that end
    together, before the longest). ``take`` hands out each part of it once and keeps back what may yet change: a
    trailing U+FFFD (half of a UTF-8 character) and a beginning of a stop string.

    New tokens are decoded together with the few before them, and what those give alone is taken off: a tokenizer may
    drop the space before the first word of what it is given.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._max_stop = max((len(stop) for stop in self._stop), default=0)
        self._window: list[int] = []  # tokens before the new ones, then the new ones
        self._num_known = 0  # how many of them are before
        self._known_text = ""  # what those give alone
        self._num_kept = 0  # characters of the window's new text that are in ``text`` already
        self._num_taken = 0
        self._stop_from = 0  # stop strings count from this character on

    def push(self, token_ids: Sequence[int], *, may_stop: bool = True) -> bool:
        """Add tokens; True once a stop string has appeared. ``may_stop=False``: text up to here never stops."""
        if self.stopped or not token_ids:
            return self.stopped
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window, skip_special_tokens=True)
        new = text[len(self._known_text) :]
        if not new:
            # Special tokens: left in the window they would be decoded again with every token to come.
            del self._window[self._num_known :]
        elif 0 < len(new) - len(stable := new.rstrip(_REPLACEMENT)) <= _MAX_HELD:
            self.text += stable[self._num_kept :]
            self._num_kept = max(self._num_kept, len(stable))
        else:
            self.text += new[self._num_kept :]
            self._advance()
        return self._find_stop(may_stop)

    def finish(self) -> bool:
        """No more tokens: what was kept back is text. True if a stop string has appeared."""
        if not self.stopped and len(self._window) > self._num_known:
            text = self._tokenizer.decode(self._window, skip_special_tokens=True)
            self.text += text[len(self._known_text) + self._num_kept :]
            self._advance()
            self._find_stop(True)
        self._stop = ()  # an unfinished stop string is text too
        return self.stopped

    def take(self) -> str:
        """The text that is certain and was not handed out before; may be empty."""
        end = len(self.text) if self.stopped else len(self.text) - self._num_held()
        part = self.text[self._num_taken : end]
        self._num_taken = max(self._num_taken, end)
        return part

    def _advance(self) -> None:
        self._window = self._window[self._num_known :]
        # Long pushes need not be decoded again as a whole: a few tokens are context enough, if they cut no character.
        for size in (8, 32):
            tail = self._window[-size:]
            text = self._tokenizer.decode(tail, skip_special_tokens=True)
            if text and not text.startswith(_REPLACEMENT):
                break
        else:
            tail = self._window
            text = self._tokenizer.decode(tail, skip_special_tokens=True)
        self._window, self._known_text = tail, text
        self._num_known = len(tail)
        self._num_kept = 0

    def _find_stop(self, may_stop: bool) -> bool:
        if not may_stop:
            self._stop_from = len(self.text)
            return False
        starts = ((self.text.find(stop, self._stop_from), len(stop)) for stop in self._stop)
        # What is complete first ends the text, whatever more came with it: the same in any portions.
        found = [(start + length, start) for start, length in starts if start >= 0]
        if found:
            self.text = self.text[: min(found)[1]]
            self.stopped = True
        else:  # a later match can begin no earlier than this
            self._stop_from = max(self._stop_from, len(self.text) - self._max_stop + 1)
        return self.stopped

    def _num_held(self) -> int:
        for start in range(max(self._stop_from, len(self.text) - self._max_stop + 1), len(self.text)):
            tail = self.text[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return len(tail)
        return 0
