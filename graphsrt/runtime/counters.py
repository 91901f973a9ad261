"""What a scheduler has done since it was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Running totals; a server may read them at any time.

    num_admitted: requests that were given KV, again after a preemption included. num_preemptions: times that one was
    put back. prompt_tokens, cached_tokens: tokens of the prompts of first admissions, and those of them whose KV was
    found in the cache. evicted_pages: cached pages given up for want of room. drafted_tokens, accepted_tokens: tokens
    that drafters proposed and a step verified, and those of them that the model chose as well.
    """

    num_admitted: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evicted_pages: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Part of the prompts that was not computed, in [0, 1]."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Part of the drafted tokens that was accepted, in [0, 1]."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0
