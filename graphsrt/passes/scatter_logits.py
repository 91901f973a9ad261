"""scatter_logits: each rank keeps the logits of its own part of the vocabulary; the sampler asks for a few numbers.

    head: [R, V/n] S(1);  logits = all_gather(head)  →  logits = head

The program then returns ``S(-1)``, and every rank samples from what it holds: a step of R rows moves 8 to 16 bytes of
each rank for a greedy row instead of the row's V logits (``runtime/sampler.py`` has the table). The whole logits are
gathered only for a caller that asks for them.

Needs: select_logit_rows (a program that is sampled from).
Leaves: the last gather of the program gone, and with it the cut of the padding; columns that pad the vocabulary stay.
Numerics: exact.  Source: ours; Megatron-LM keeps logits split for its vocabulary-parallel cross entropy.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops
from graphsrt.placement import Shard
from graphsrt.program import LOGITS, NearMiss, Program, arguments, aten


def scatter_logits(program: Program, *, axis: str = "tp", near_misses: list[NearMiss] | None = None) -> int:
    """Return what the last gather gathers; 1 if the program now does, 0 if there is no such gather."""
    gathered = _gathered(program)
    if gathered is None:
        return 0
    reason = _reason_against(program, gathered, axis)
    if reason is not None:
        if near_misses is not None:
            near_misses.append(NearMiss(gathered.name, gathered.meta.get("module", ""), reason))
        return 0
    program.set_outputs({**program.outputs, LOGITS: arguments(gathered)["x"]})
    program.remove_dead()
    return 1


def _gathered(program: Program) -> fx.Node | None:
    """The gather whose value, or whose value without padding at its end, the program returns."""
    value = program.output
    if value.target is aten.slice.Tensor:
        value = arguments(value)["self"]
    return value if value.target is ops.all_gather else None


def _reason_against(program: Program, gathered: fx.Node, axis: str) -> str | None:
    args = arguments(gathered)
    dim = gathered.meta["val"].dim() - 1
    place = args["x"].meta.get("placement")
    if "logit_rows" not in program.inputs:
        return "nobody samples from this program"
    if args["axis"] != axis or args["dim"] % (dim + 1) != dim or not isinstance(place, Shard):
        return f"gathers dim {args['dim']} over {args['axis']}, not the vocabulary over {axis}"
    if len(gathered.users) > 1 or (program.output is not gathered and len(program.output.users) > 1):
        return "its whole value is used elsewhere"
    cut = arguments(program.output) if program.output is not gathered else {"dim": dim, "start": 0}
    if cut["dim"] % (dim + 1) != dim or cut["start"] != 0 or _cut_size(program) != place.layout.size:
        return f"{program.output.name} cuts off more than padding"
    try:
        for rank in range(place.layout.ranks):
            place.layout.owned_block(rank)
    except ValueError as error:
        return str(error)
    return None


def _cut_size(program: Program) -> int:
    return int(program.output.meta["val"].shape[-1])


def _expected(program: Program) -> int:
    return int("logit_rows" in program.inputs and _gathered(program) is not None)


scatter_logits.expect = _expected  # type: ignore[attr-defined]
