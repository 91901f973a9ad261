"""The summary of a model's programs, as text: passes and memory."""

from __future__ import annotations

from graphsrt import ops
from graphsrt.costs import slot_bytes
from graphsrt.dump import pass_table, weight_bytes
from graphsrt.passes.runner import Stages
from graphsrt.program import PREFILL_MIN_TOKENS, Program

SHARDING = "shard_tensor_parallel"


def facts_text(stages: Stages) -> str:
    """The pass table, then one line for each fact of the programs."""
    program = stages.final
    lines = [pass_table(program.history).rstrip(), ""]
    if stages.prefill is not None:
        shared = sum(mine is other for (_, mine), (_, other) in zip(stages.programs, stages.prefill.programs)) - 1
        tail = stages.prefill.final.history[shared:]
        lines += [f"prefill, in steps of {prefill_tokens(stages)} tokens or more:", pass_table(tail).rstrip(), ""]
    lines.append(f"{program.name}, tp={program.mesh.get('tp', 1)}, {str(program.dtype).removeprefix('torch.')}")
    mine = sum(map(weight_bytes, program.weights.values()))
    whole = whole_bytes(stages)
    ranks = program.mesh.get("tp", 1)
    share = f" of {_bytes(whole)} ({mine * ranks / whole:.3f} × 1/{ranks})" if whole and ranks > 1 else ""
    lines.append(f"weights of a rank   {_bytes(mine)}{share}")
    kept = replicated(program)
    if kept:
        total = sum(size for _, size in kept)
        worst = ", ".join(f"{name} {_bytes(size)}" for name, size in kept[:3])
        lines.append(
            f"whole on each rank  {_bytes(total)} in {len(kept)} weights: {worst}{', …' if len(kept) > 3 else ''}"
        )
    for miss in [miss for report in program.history if report.name == SHARDING for miss in report.near_misses][:3]:
        lines.append(f"  not divided       {miss.node}: {miss.reason}")
    if "kv_pool" in program.inputs:
        lines.append(f"KV of a token       {_bytes(kv_bytes(program))} on each rank")
    if ranks > 1:
        lines.append(f"collectives         {_collectives(program)} a step")
        if stages.prefill is not None:
            lines.append(f"  in prefill        {_collectives(stages.prefill.final)} a step")
    return "\n".join(lines)


def prefill_tokens(stages: Stages) -> int | None:
    """From how many tokens on a step runs the prefill program; None where there is but one program."""
    return stages.prefill.final.constants[PREFILL_MIN_TOKENS] if stages.prefill is not None else None


def _collectives(program: Program) -> str:
    reductions, gathers = ops.count_collectives(node.target for node in program.nodes)
    return f"{reductions} reductions, {gathers} gathers"


def whole_bytes(stages: Stages) -> int:
    """Bytes of the weights of the captured program: the model on one rank."""
    return sum(map(weight_bytes, stages.programs[0][1].weights.values()))


def replicated(program: Program) -> list[tuple[str, int]]:
    """Weights that each rank holds whole, largest first; empty on a single rank."""
    if program.mesh.get("tp", 1) == 1:
        return []
    found = [(name, weight_bytes(w)) for name, w in program.weights.items() if str(w.placement) == "R"]
    return sorted(found, key=lambda item: -item[1])


def kv_bytes(program: Program) -> int:
    """KV bytes of one token on one rank: layers × local KV heads × numbers of a key and a value × bytes, by pools."""
    return sum(slot_bytes(program, name) for name in program.kv_pools)


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return ""
