"""What some logit rows of a step carry beside the numbers that every row has: changed logits, and wanted probabilities.

Only rows that need something appear, so that a batch of plain requests costs nothing here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from graphsrt.runtime.logit_edits import LogitEdits
from graphsrt.runtime.request import Request

Fields = dict[str, NDArray]
"""Arrays of a ``ForwardBatch`` by name."""


def row_features(
    requests: Sequence[Request],
    drafts: Sequence[Sequence[int]],
    owner: NDArray[np.int64],
    position: NDArray[np.int64],
    eos: Collection[int],
) -> Fields:
    """The edits and log-probabilities of R logit rows; ``owner``, ``position`` int64[R] say whose each is, and where.

    A row whose token is known already is one of a prompt whose log-probabilities are wanted. The others are sampled:
    that of the last known token, and those of the drafts after it. eos: the model's end-of-sequence tokens.
    """
    edits, wanted = [], []
    for row, (index, place) in enumerate(zip(owner.tolist(), position.tolist())):
        request = requests[index]
        params = request.params
        if params is None:
            continue
        if place < request.num_tokens - 1:
            assert params.prompt_logprobs is not None
            wanted.append((row, request.tokens[place + 1], params.prompt_logprobs))
            continue
        if params.logprobs is not None:
            wanted.append((row, -1, params.logprobs))
        ahead = drafts[index][: place - request.num_tokens + 1]
        if params.edits_logits or params.min_new_tokens > request.num_output_tokens + len(ahead):
            if request.edits is None:
                request.edits = LogitEdits(params, request.prompt_ids, params.ending(eos))
            output = request.tokens[request.num_prompt_tokens : request.num_tokens]
            edits.append((row, request.edits.at(output, ahead)))
    fields: Fields = {}
    if wanted:
        names = ("logprob_rows", "logprob_targets", "logprob_top")
        fields |= dict(zip(names, np.array(wanted, dtype=np.int64).T))
    if edits:
        fields |= {
            "edit_rows": np.repeat([row for row, _ in edits], [len(own) for _, own in edits]),
            "edit_tokens": np.concatenate([own.ids for _, own in edits]),
            "edit_bias": np.concatenate([own.bias for _, own in edits]),
            "edit_scale": np.concatenate([own.scale for _, own in edits]),
            "edit_shift": np.concatenate([own.shift for _, own in edits]),
        }
    return fields
