"""Matrix products and tables: rules of :mod:`graphsrt.check_rules`."""

from __future__ import annotations

from graphsrt import ops
from graphsrt.check_rules import SUM, WHOLE, Call, Held, Refused, addresses, rule, shard
from graphsrt.check_rules_views import cut
from graphsrt.placement import Layout, Partial, R, Shard
from graphsrt.program import aten

# -- contractions -----------------------------------------------------------------------------------------------------


@rule(aten.linear.default)
def _linear(call: Call) -> Held:
    bias = call.args["bias"]
    return product(call, "input", call.of("weight"), contracted=1, made=0, bias="bias" if bias is not None else None)


@rule(aten.addmm.default)
def _addmm(call: Call) -> Held:
    return product(call, "mat1", call.of("mat2"), contracted=0, made=1, bias="self")


@rule(aten.mm.default)
def _mm(call: Call) -> Held:
    return product(call, "self", call.of("mat2"), contracted=0, made=1, bias=None)


@rule(aten.matmul.default, aten.bmm.default)
def _matmul(call: Call) -> Held:
    right = "other" if "other" in call.args else "mat2"
    a, b = call.of("self"), call.of(right)
    na, nb = call.ndim("self"), call.ndim(right)
    if na < 2 or nb < 2:
        raise Refused("a product with a vector that is not whole", "matrices")
    if nb == 2:
        return product(call, "self", b, contracted=0, made=1, bias=None)
    out = max(na, nb)
    batch = []
    for held, n in ((a, na), (b, nb)):
        if held.zeroed or not isinstance(held.placement, Shard) or held.placement.dim >= n - 2:
            raise Refused(
                "a product of batches that is divided inside a matrix", "S along a batch dim of both", f"{a} and {b}"
            )
        batch.append((held.placement.dim + out - n, held.placement.layout))
    if batch[0] != batch[1]:
        raise Refused("batches are divided differently", str(a), str(b))
    return shard(*batch[0])


def product(call: Call, x_name: str, w: Held, *, contracted: int, made: int, bias: str | None) -> Held:
    """``x [..., k] @ w``: ``contracted`` and ``made`` are the dims of what is held of ``w`` that go and that appear."""
    x = call.of(x_name)
    b = call.of(bias) if bias else None
    last = call.ndim(x_name) - 1
    xp, wp = x.placement, w.placement
    if x.zeroed or (b is not None and b.zeroed):
        raise Refused("the input or the bias has zeros in place of copies", "copies where not owned", f"{x} and {b}")
    if isinstance(wp, Partial):
        raise Refused("the weight is a sum that is not complete", "R or S", str(w))
    if isinstance(xp, Partial):
        if xp.op != "sum" or wp != R or b not in (None, SUM):
            raise Refused("a sum that is not complete meets a divided weight or a bias on every rank", "R", str(x))
        return SUM
    if isinstance(wp, Shard) and wp.dim == made:
        if xp != R:
            raise Refused("a weight divided along its output needs a whole input", "R", str(x))
        if w.zeroed:
            raise Refused("rows of the weight that claim to be copies are zeros", "copies where not owned", str(w))
        want = shard(call.ndim(bias) - 1, wp.layout) if bias else None
        if b != want:
            raise Refused("the bias does not follow the rows of its weight", str(want), str(b))
        return shard(last, wp.layout)
    if isinstance(wp, Shard) and wp.dim == contracted:
        if not isinstance(xp, Shard) or xp.dim != last or addresses(xp.layout) != addresses(wp.layout):
            raise Refused(
                "input and weight are contracted over different addresses", f"S({last}) of {wp.layout}", str(x)
            )
        if not w.zeroed and not all(run.owned for rank in wp.layout.runs for run in rank):
            raise Refused("addresses held twice are counted twice", "zeros in the weight where not owned", str(w))
        if b not in (None, SUM):
            raise Refused("the bias would be added once on every rank", "P(sum), on one rank only", str(b))
        return SUM
    if wp != R:
        raise Refused("the weight is divided along a dim that this product does not know", "dim 0 or 1", str(w))
    if isinstance(xp, Shard) and xp.dim == last:
        raise Refused(
            "the input is divided along the contracted dim, the weight is whole",
            f"S({contracted}) of {xp.layout}",
            str(w),
        )
    if b not in (None, WHOLE):
        raise Refused("the bias is not whole where the product is", "R", str(b))
    return x


# -- tables -----------------------------------------------------------------------------------------------------------


@rule(aten.embedding.default)
def _embedding(call: Call) -> Held:
    table, index = call.of("weight"), call.of("indices")
    if isinstance(index.placement, Partial) or isinstance(table.placement, Partial):
        raise Refused("an index or table that is a sum that is not complete", "R or S", f"{table}, {index}")
    if index.placement == R and isinstance(table.placement, Shard) and table.placement.dim == 1:
        return shard(len(call.shape(call.node)) - 1, table.placement.layout)
    if table.placement == R:
        return index
    raise Refused("a rank holds only some rows of the table", "graphsrt.vocab_embedding", str(table))


@rule(ops.vocab_embedding)
def _vocab_embedding(call: Call) -> Held:
    table, start = call.of("weight"), call.of("start")
    if call.of("tokens") != WHOLE:
        raise Refused("tokens differ from rank to rank", "R", str(call.of("tokens")))
    if not isinstance(table.placement, Shard) or table.placement.dim != 0 or start.starts is None:
        raise Refused("a vocabulary slice and its first id are needed", "S(0) and shard_start", f"{table} and {start}")
    layout, end = table.placement.layout, 0
    for rank, (runs, first) in enumerate(zip(layout.runs, starts(start.starts))):
        if first >= layout.size and end == layout.size:
            continue
        real = min(layout.local_size, layout.size - first)
        held = cut(addresses(layout)[rank], 0, real)
        owned = sum(run.length for run in runs if run.owned)
        if first != end or held != ((first, real),) or (table.zeroed and owned != real):
            raise Refused(
                f"rank {rank} takes ids from {first} on, but does not hold them",
                f"ids {end} on, in order",
                f"ids {held}, {table}",
            )
        end = first + real
    if end != layout.size:
        raise Refused("some ids are looked up on no rank", f"ids up to {layout.size}", f"up to {end}")
    return SUM


def starts(layout: Layout) -> list[int]:
    """What :class:`~graphsrt.recipes.ShardStart` evaluates to on every rank."""
    return [rank[0].start if rank[0].owned else layout.size for rank in layout.runs]
