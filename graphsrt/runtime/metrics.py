"""What an engine has done so far: counts, times and histograms, as numbers, as a table, and for Prometheus."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphsrt.runtime.request import Request
    from graphsrt.runtime.results import StepResult

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class Histogram:
    """Observations by size. ``counts[i]`` are those up to ``bounds[i]``, the last those above all bounds."""

    bounds: Sequence[float] = _SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """0 if nothing was observed."""
        return self.total / self.count if self.count else 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Take in ``value``, as often as it was seen."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def quantile(self, q: float) -> float:
        """The bound below which a share ``q`` of the observations lie; infinite above the last, 0 if there are none."""
        needed, seen = q * self.count, 0
        for bound, count in zip([*self.bounds, float("inf")], self.counts):
            seen += count
            if seen >= needed and seen:
                return bound
        return 0.0


@dataclass
class Metrics:
    """A picture of an engine: totals since it was made, except for the first five fields, which are of now.

    num_waiting, num_running: requests in line, and those that hold KV. pages_used of pages_total: KV pages that
        requests hold. pages_cached: pages that hold prefixes for reuse and that any request may take.
    num_requests: all that were added; num_finished, num_cancelled, num_expired (deadline), num_failed: how they ended.
    num_preemptions: times that a request was put back for want of pages.
    prompt_tokens: prompt tokens computed, those computed again after a preemption included; asked_tokens: tokens of
        prompts that were admitted, and cached_tokens those of them whose KV was there already; generated_tokens: tokens
        that requests have gained; drafted_tokens, accepted_tokens: guessed ahead, and those that were right.
    num_captured_steps: steps that ran as captured ones, of fixed sizes; all others, such as those with prompts, ran
        with sizes as they came. num_decode_steps: steps in which all sequences decoded, captured or not. padding_rows:
        rows that captured steps computed for nobody.
    step_s: seconds in steps, wall time. It is the sum of compute_s, rank 0 in the program's kernels; collectives_s,
        rank 0 in collectives, waiting for other ranks included; and host_s, the rest: scheduling, the way to the ranks
        and back, launches, sampling and text. On a GPU the first two are as the CPU of rank 0 sees them.
    time_to_first_token, inter_token, request_time: seconds from adding a request to its first token, between two
        tokens, and to its end.
    """

    num_waiting: int = 0
    num_running: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_expired: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_decode_steps: int = 0
    num_captured_steps: int = 0
    padding_rows: int = 0
    prompt_tokens: int = 0
    asked_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    generated_tokens: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0
    collectives_s: float = 0.0
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    request_time: Histogram = field(default_factory=Histogram)

    @property
    def host_s(self) -> float:
        """What is left of ``step_s``."""
        return max(self.step_s - self.compute_s - self.collectives_s, 0.0)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Over the time that steps ran."""
        return self.prompt_tokens / self.step_s if self.step_s else 0.0

    @property
    def generated_tokens_per_s(self) -> float:
        """Over the time that steps ran."""
        return self.generated_tokens / self.step_s if self.step_s else 0.0

    @property
    def page_use(self) -> float:
        """Share of the KV pages that requests hold."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompts' tokens that did not have to be computed."""
        return self.cached_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def count_step(self, seconds: float, prompt_tokens: int, result: StepResult) -> None:
        """Take in a step."""
        self.num_steps += 1
        self.num_decode_steps += prompt_tokens == 0
        if result.captured_rows:
            self.num_captured_steps += 1
            self.padding_rows += result.captured_rows - len(result.token_ids)
        self.prompt_tokens += prompt_tokens
        self.step_s += seconds
        self.compute_s += result.compute_s
        self.collectives_s += result.collectives_s

    def count_tokens(self, request: Request, now: float) -> None:
        """Take in the tokens that a request has gained since it was counted last."""
        gained = request.num_output_tokens - request.num_timed
        if gained <= 0:
            return
        self.generated_tokens += gained
        if request.last_token_at is None:
            self.time_to_first_token.observe(now - request.added_at)
            gained, request.last_token_at = gained - 1, now
        if gained:
            self.inter_token.observe((now - request.last_token_at) / gained, gained)
        request.num_timed, request.last_token_at = request.num_output_tokens, now

    def count_end(self, request: Request, now: float) -> None:
        """Take in a request that has just ended."""
        self.request_time.observe(now - request.added_at)
        if request.error is not None:
            self.num_failed += 1
        elif request.finish_reason == "cancelled":
            self.num_cancelled += 1
        elif request.finish_reason == "deadline":
            self.num_expired += 1
        else:
            self.num_finished += 1

    def copy(self) -> Metrics:
        """A picture that does not change any more."""
        return copy.deepcopy(self)

    def __str__(self) -> str:
        share = 100 / self.step_s if self.step_s else 0.0

        def spread(times: Histogram) -> str:
            shown = [f"{1000 * times.quantile(q):g}" for q in (0.5, 0.99)]
            return f"mean {1000 * times.mean:.1f} ms, half ≤ {shown[0]} ms, 99 % ≤ {shown[1]} ms"

        rows = [
            ("requests", f"{self.num_requests}: {self.num_finished} finished, {self.num_cancelled} cancelled, "
                         f"{self.num_expired} out of time, {self.num_failed} failed; "
                         f"{self.num_running} running, {self.num_waiting} waiting"),
            ("tokens", f"{self.prompt_tokens} prompt ({self.prompt_tokens_per_s:.1f}/s), "
                       f"{self.generated_tokens} generated ({self.generated_tokens_per_s:.1f}/s)"),
            ("prefix reuse", f"{self.cached_tokens} tokens, {100 * self.prefix_hit_rate:.1f} %"),
            ("drafts", f"{self.accepted_tokens} of {self.drafted_tokens} tokens right"),
            ("KV pages", f"{self.pages_used} of {self.pages_total} held ({100 * self.page_use:.1f} %), "
                         f"{self.pages_cached} cached; {self.num_preemptions} preemptions"),
            ("steps", f"{self.num_steps} in {self.step_s:.2f} s: compute {share * self.compute_s:.1f} %, "
                      f"collectives {share * self.collectives_s:.1f} %, host {share * self.host_s:.1f} %"),
            ("captured", f"{self.num_captured_steps} of {self.num_decode_steps} steps that only decoded, "
                         f"{self.padding_rows} rows of padding"),
            ("first token", spread(self.time_to_first_token)),
            ("next tokens", spread(self.inter_token)),
        ]  # fmt: skip
        return "\n".join(f"{label:<13} {text}" for label, text in rows)

    def prometheus(self) -> str:
        """The same in the text format of Prometheus, version 0.0.4, as a server would give it at ``/metrics``."""
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        gauges = {
            "requests_waiting": (self.num_waiting, "Requests in line."),
            "requests_running": (self.num_running, "Requests that hold KV pages."),
            "kv_pages_used": (self.pages_used, "KV pages that requests hold."),
            "kv_pages_cached": (self.pages_cached, "KV pages that hold prefixes for reuse."),
            "kv_pages": (self.pages_total, "KV pages that there are."),
        }
        counters = {
            "preemptions": (self.num_preemptions, "Times that a request was put back for want of KV pages."),
            "steps": (self.num_steps, "Steps run."),
            "decode_steps": (self.num_decode_steps, "Steps in which all sequences decoded."),
            "captured_steps": (self.num_captured_steps, "Steps run as captured ones, of fixed sizes."),
            "padding_rows": (self.padding_rows, "Rows that captured steps computed for nobody."),
            "prompt_tokens": (self.prompt_tokens, "Prompt tokens computed."),
            "asked_prompt_tokens": (self.asked_tokens, "Tokens of prompts that were admitted."),
            "cached_prompt_tokens": (self.cached_tokens, "Those of them whose KV was there already."),
            "generated_tokens": (self.generated_tokens, "Tokens that requests have gained."),
            "drafted_tokens": (self.drafted_tokens, "Tokens guessed ahead."),
            "accepted_tokens": (self.accepted_tokens, "Tokens guessed ahead that were right."),
        }
        for name, (value, text) in gauges.items():
            yield from _family(name, "gauge", text, {"": value})
        for name, (value, text) in counters.items():
            yield from _family(f"{name}_total", "counter", text, {"": value})
        ends = {"finished": self.num_finished, "cancelled": self.num_cancelled, "deadline": self.num_expired,
                "failed": self.num_failed}  # fmt: skip
        yield from _family("requests_total", "counter", "Requests added.", {"": self.num_requests})
        yield from _family("requests_ended_total", "counter", "Requests by how they ended.",
                           {f'{{reason="{reason}"}}': count for reason, count in ends.items()})  # fmt: skip
        parts = {"compute": self.compute_s, "collectives": self.collectives_s, "host": self.host_s}
        yield from _family("step_seconds_total", "counter", "Time in steps, as rank 0 spent it.",
                           {f'{{part="{part}"}}': seconds for part, seconds in parts.items()})  # fmt: skip
        for name, times, text in (
            ("time_to_first_token_seconds", self.time_to_first_token, "From adding a request to its first token."),
            ("inter_token_seconds", self.inter_token, "Between two tokens of a request."),
            ("request_seconds", self.request_time, "From adding a request to its end."),
        ):
            seen: int = 0
            values: dict[str, float] = {}
            for bound, count in zip([*map(str, times.bounds), "+Inf"], times.counts):
                seen += count
                values[f'_bucket{{le="{bound}"}}'] = seen
            values["_sum"], values["_count"] = times.total, seen
            yield from _family(name, "histogram", text, values)


def _family(name: str, kind: str, text: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP graphsrt_{name} {text}"
    yield f"# TYPE graphsrt_{name} {kind}"
    for suffix, value in values.items():
        yield f"graphsrt_{name}{suffix} {value!r}"
