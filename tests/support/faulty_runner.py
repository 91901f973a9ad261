"""A model's rank whose tokens can be made wrong while it runs: a file that ``FAULT`` names holds the rank's number."""

from __future__ import annotations

import os
from pathlib import Path

from graphsrt.runtime import model_runner


def create(rank, size, collectives, init):
    sample, fault = model_runner.sample, Path(os.environ["FAULT"])

    def sample_wrongly(logits, how):
        tokens = sample(logits, how)
        wrong = fault.exists() and fault.read_text() == str(rank)
        return tokens + 1 if wrong else tokens

    model_runner.sample = sample_wrongly
    return model_runner.create(rank, size, collectives, init)
