"""What one operator of a program costs on one rank: FLOPs, bytes of memory, bytes sent to other ranks.

Costs are counted from the operator and the local shapes of its values, with numbers put in for the symbols, so they
hold for any program, whatever model it came from. See ``docs/plan.md`` for the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.costs_experts import WEIGHTS, expert_flops, share_used
from graphsrt.errors import CompileError, explain
from graphsrt.program import Program, arguments, aten, target_name, walk

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """The step that is costed: ``tokens`` new tokens in all, of ``sequences`` sequences that are ``length`` tokens long
    after it, ``length`` counting the new ones. Each sequence gets as many new tokens as the others."""

    name: str
    tokens: int
    sequences: int
    length: int

    @staticmethod
    def prefill(length: int) -> Step:
        """One whole prompt."""
        return Step("prefill", length, 1, length)

    @staticmethod
    def decode(batch: int, length: int) -> Step:
        """One more token of each of ``batch`` sequences."""
        return Step("decode", batch, batch, length)

    def sizes(self) -> dict[str, int]:
        """The numbers that symbols of a program stand for; one row of logits for each sequence.

        Of the table of slots, ``[num_reqs, max_context]``, the rows of the sequences are read, as far as they are long.
        """
        batch = {"T": self.tokens, "B": self.sequences, "B1": self.sequences + 1, "R": self.sequences}
        return {**batch, "num_reqs": self.sequences, "max_context": self.length}

    def keys_read(self, window: int | None, chunk: int | None = None) -> int:
        """Cached tokens of which a layer reads keys and values: those that at least one new token sees."""
        oldest = self.length - self.tokens // self.sequences  # position of the oldest new token
        first = 0 if window is None else max(0, oldest - window + 1)
        if chunk is not None:
            first = max(first, oldest // chunk * chunk)
        return self.sequences * (self.length - first)

    def pairs(self, window: int | None, chunk: int | None = None) -> int:
        """(new token, token that it sees) pairs: causal, no further back than the window, inside one chunk."""

        def in_one_chunk(tokens: int) -> int:
            growing = tokens if window is None else min(tokens, window)
            return growing * (growing + 1) // 2 + (tokens - growing) * growing

        def before(position: int) -> int:
            whole, rest = (0, position) if chunk is None else divmod(position, chunk)
            return (whole * in_one_chunk(chunk) if chunk else 0) + in_one_chunk(rest)

        return self.sequences * (before(self.length) - before(self.length - self.tokens // self.sequences))


@dataclass(frozen=True)
class Cost:
    """Of one rank. ``flops``: of matrix products and attention, by the dtype that they are computed in."""

    flops: dict[torch.dtype, int] = field(default_factory=dict)
    weight_bytes: int = 0
    activation_bytes: int = 0
    kv_read_bytes: int = 0
    kv_written_bytes: int = 0
    sent_bytes: int = 0
    num_collectives: int = 0

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def memory_bytes(self) -> int:
        """All bytes that go through memory."""
        return self.weight_bytes + self.activation_bytes + self.kv_read_bytes + self.kv_written_bytes

    def __add__(self, other: Cost) -> Cost:
        flops = {d: self.flops.get(d, 0) + other.flops.get(d, 0) for d in {**self.flops, **other.flops}}
        numbers = {n: getattr(self, n) + getattr(other, n) for n in vars(self) if n != "flops"}
        return Cost(flops, **numbers)

    def times(self, count: int) -> Cost:
        """The cost of ``count`` such things."""
        flops = {d: n * count for d, n in self.flops.items()}
        return Cost(flops, **{n: getattr(self, n) * count for n in vars(self) if n != "flops"})


class Sizes:
    """Shapes and bytes of a program's values in one step."""

    def __init__(self, program: Program, step: Step):
        self.program, self.step = program, step
        shapes = program.shapes
        self._symbols = {shapes.dim(name).node.expr: number for name, number in step.sizes().items()}
        self._shapes: dict[int, Shape] = {}  # fake values are shared and live as long as the program

    def of(self, node: fx.Node) -> list[tuple[Shape, torch.dtype]]:
        """Shape and dtype of a node's tensors."""
        value = node.meta.get("val")
        return [(self.shape(v), v.dtype) for v in _flat(value) if isinstance(v, torch.Tensor)]

    def shape(self, value: torch.Tensor) -> Shape:
        """This rank's shape of a fake tensor, in numbers."""
        if id(value) not in self._shapes:
            self._shapes[id(value)] = tuple(self._number(size) for size in value.shape)
        return self._shapes[id(value)]

    def bytes(self, node: fx.Node) -> int:
        """Bytes of a node's tensors."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.of(node))

    def _number(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        value = size.node.expr.subs(self._symbols)
        if not value.is_Integer:
            raise CompileError(
                explain("a size depends on more than the step", expected=", ".join(self.step.sizes()), got=str(value))
            )
        return int(value)


def cost(sizes: Sizes, node: fx.Node) -> Cost:
    """The cost of one operator on one rank."""
    if node.target in ops.AFTER_ALL_REDUCE:
        return _collective_cost(sizes, node) + _local_cost(sizes, node)
    if node.target in ops.COLLECTIVES:
        return _collective_cost(sizes, node)
    return _local_cost(sizes, node)


def _local_cost(sizes: Sizes, node: fx.Node) -> Cost:
    """What a rank does by itself; of an operator that begins with a sum over ranks, what it does with the sum."""
    if is_view(sizes, node):
        return Cost()
    flops = _flops(sizes, node)
    weights, activations = 0, sizes.bytes(node)  # every result is written once
    kv_read = kv_written = 0
    table, rows = GATHERED.get(node.target, (None, None))
    for name, used in _operands(node):
        if is_pool(sizes.program, used):
            continue  # counted by what of it is read and written
        size = _stored_bytes(sizes, used)
        if name == table:
            size = min(size, _looked_up_bytes(sizes, node, used, rows))
        if node.target is ops.moe_experts and name in WEIGHTS:
            size = round(size * share_used(sizes, node))  # an expert without tokens is not read
        if _storage(sizes, used).op == "get_attr":
            weights += size
        else:
            activations += size
    if node.target in WRITTEN:
        kv_read, kv_written = _kv_traffic(sizes, node)
    return Cost(flops, weights, activations, kv_read, kv_written)


# -- memory ------------------------------------------------------------------------------------------------------------

GATHERED: dict[Any, tuple[str, str | None]] = {
    ops.vocab_embedding: ("weight", None),
    ops.rope: ("table", "positions"),
    ops.qk_norm_rope: ("table", "positions"),
    ops.rope_kv_write: ("table", "positions"),
    aten.embedding.default: ("weight", None),
    aten.index_select.default: ("self", None),
    aten.index.Tensor: ("self", None),
    aten.gather.default: ("self", None),
}
"""Operators that look something up in a table, of which they read no more: the table, and the argument with the numbers
of its rows, or None if the result is what was looked up."""


def _looked_up_bytes(sizes: Sizes, node: fx.Node, table: fx.Node, rows: str | None) -> int:
    if rows is None:
        return sizes.bytes(node)
    (shape, dtype), *_ = sizes.of(table)
    (numbers, _), *_ = sizes.of(arguments(node)[rows])
    # rows looked up × length of a row × bytes of an element
    return math.prod(numbers) * math.prod(shape[1:]) * dtype.itemsize


def is_view(sizes: Sizes, node: fx.Node) -> bool:
    """Whether the operator computes nothing: its result is the memory of an argument, seen in another way."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function"  # getitem
    returns = node.target._schema.returns
    if not returns or any(r.alias_info is None or r.alias_info.is_write for r in returns):
        return False
    source = next((used for _, used in _operands(node)), None)
    # to() and its like give their argument back only where nothing changes
    return source is not None and {d for _, d in sizes.of(node)} <= {d for _, d in sizes.of(source)}


def _storage(sizes: Sizes, node: fx.Node) -> fx.Node:
    """The value whose memory a view shows."""
    while node.op == "call_function" and node.target not in ops.COLLECTIVES and is_view(sizes, node):
        node = next(walk([list(node.args), list(node.kwargs.values())]))
    return node


def _stored_bytes(sizes: Sizes, node: fx.Node) -> int:
    """Bytes read when a value is read: an expanded one is no larger than what it was expanded from."""
    return min(sizes.bytes(node), sizes.bytes(_storage(sizes, node)))


def is_pool(program: Program, node: fx.Node) -> bool:
    """Whether a node is the memory of cached keys and values."""
    return node.op == "placeholder" and program.inputs[str(node.target)].role.startswith("kv_pool")


def slot_bytes(program: Program, name: str) -> int:
    """Bytes of one token, in all layers, in a pool."""
    pool = program.inputs[name]
    return math.prod(int(size) for size in pool.shape if size != "slots") * pool.dtype.itemsize


WRITTEN: dict[Any, str] = {
    ops.radix_attention: "k", ops.kv_write: "k", ops.rope_kv_write: "k", ops.radix_latent_attention: "latent",
}  # fmt: skip
"""Operators that read and write the pool, and the argument with what they write."""


def _kv_traffic(sizes: Sizes, node: fx.Node) -> tuple[int, int]:
    """Bytes of the pool that are read and written by an operator of one layer."""
    args = arguments(node)
    pool = str(args["kv_pool"].target)
    layers = int(sizes.program.inputs[pool].shape[0])
    token = slot_bytes(sizes.program, pool) // layers  # keys and values of one token in this layer
    written = token * sizes.step.tokens if args[WRITTEN[node.target]] is not None else 0
    if node.target in (ops.kv_write, ops.rope_kv_write):
        return 0, written
    return token * sizes.step.keys_read(args["sliding_window"], args["chunk_size"]), written


def peak_activation_bytes(sizes: Sizes) -> int:
    """Most bytes of values that are alive at a time when operators run one after the other, inputs left out."""
    nodes = sizes.program.nodes
    last: dict[fx.Node, int] = {}
    roots: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(nodes):
        roots[node] = _storage(sizes, node)
        for _, used in [*_operands(node), ("", node)]:
            last[roots.get(used, used)] = index
    for returned in sizes.program.outputs.values():
        last[roots[returned]] = len(nodes)
    ends: dict[int, list[fx.Node]] = {}
    for root, index in last.items():
        ends.setdefault(index, []).append(root)
    alive = peak = 0
    for index, node in enumerate(nodes):
        alive += sizes.bytes(node) if roots[node] is node else 0
        peak = max(peak, alive)
        alive -= sum(sizes.bytes(root) for root in ends.get(index, []) if root.op == "call_function")
    return peak


# -- FLOPs -------------------------------------------------------------------------------------------------------------


def _matmul(sizes: Sizes, node: fx.Node, args: dict[str, Any], names: tuple[str, str]) -> int:
    left = sizes.of(args[names[0]])[0][0]
    # a multiplication and an addition × for each number of the result × length of the contracted dimension
    return 2 * math.prod(sizes.of(node)[0][0]) * left[-1]


def _convolution(sizes: Sizes, node: fx.Node, args: dict[str, Any], names: tuple[str, str]) -> int:
    kernel = sizes.of(args[names[1]])[0][0]
    # as a matrix product; each number of the result contracts input channels of its group × kernel
    return 2 * math.prod(sizes.of(node)[0][0]) * math.prod(kernel[1:])


def _attention(sizes: Sizes, node: fx.Node, args: dict[str, Any], names: tuple[str, str]) -> int:
    _, heads, size = sizes.of(args["q"])[0][0]
    value_size = sizes.of(node)[0][0][-1]
    # a multiplication and an addition × query heads × pairs × (scores: q·k, then probabilities · v)
    return 2 * heads * sizes.step.pairs(args["sliding_window"], args["chunk_size"]) * (size + value_size)


def _latent_attention(sizes: Sizes, node: fx.Node, args: dict[str, Any], names: tuple[str, str]) -> int:
    query = sizes.of(args[names[0]])[0][0]
    _, heads, size = query
    rope_size, value_size = sizes.of(args["q_rope"])[0][0][-1], sizes.of(node)[0][0][-1]
    # a multiplication and an addition × query heads × pairs × (scores: q·k in both parts, then probabilities · v)
    flops = 2 * heads * sizes.step.pairs(args["sliding_window"]) * (size + rope_size + value_size)
    if "w_kv_b" in args:  # latents of all tokens become keys and values: as a matrix product
        flops += 2 * math.prod(sizes.of(args["latent"])[0][0]) * sizes.of(args["w_kv_b"])[0][0][0]
    return flops


Counter = Callable[[Sizes, fx.Node, dict[str, Any], tuple[str, str]], int]
FLOPS: dict[Any, tuple[Counter, tuple[str, str]]] = {
    aten.linear.default: (_matmul, ("input", "weight")),
    aten.matmul.default: (_matmul, ("self", "other")),
    aten.mm.default: (_matmul, ("self", "mat2")),
    aten.bmm.default: (_matmul, ("self", "mat2")),
    aten.addmm.default: (_matmul, ("mat1", "mat2")),
    aten.baddbmm.default: (_matmul, ("batch1", "batch2")),
    aten.convolution.default: (_convolution, ("input", "weight")),
    aten.conv1d.default: (_convolution, ("input", "weight")),
    aten.conv2d.default: (_convolution, ("input", "weight")),
    ops.fp8_linear: (_matmul, ("q", "w")),
    ops.int8_linear: (_matmul, ("x", "q")),
    ops.int4_linear: (_matmul, ("x", "q")),
    ops.attention: (_attention, ("q", "k")),
    ops.radix_attention: (_attention, ("q", "kv_pool")),
    ops.latent_attention: (_latent_attention, ("q_nope", "latent")),
    ops.radix_latent_attention: (_latent_attention, ("q_latent", "kv_pool")),
    ops.moe_experts: (expert_flops, ("x", "gate_up")),
}
"""Operators with FLOPs that count, how to count them, and their two operands."""

MEMORY_ONLY: set[Any] = {
    ops.kv_write, ops.rms_norm, ops.l2_norm, ops.add_rms_norm, ops.add_layer_norm, ops.rope, ops.qk_norm_rope,
    ops.rope_kv_write, ops.glu, ops.silu_mul, ops.vocab_embedding, ops.fp8_scale, ops.quantize_fp8,
    ops.rms_norm_quant, ops.rms_norm_static_quant, ops.add_rms_norm_quant, ops.add_rms_norm_static_quant,
    ops.silu_mul_quant, ops.silu_mul_static_quant,
}  # fmt: skip
"""Our operators that compute a few FLOPs for each number that they read: memory decides their time."""


def _flops(sizes: Sizes, node: fx.Node) -> dict[torch.dtype, int]:
    if node.target not in FLOPS:
        return {}
    count, names = FLOPS[node.target]
    args = arguments(node)
    return {sizes.of(args[names[0]])[0][1]: count(sizes, node, args, names)}


def uncounted(program: Program) -> list[str]:
    """Names of operators whose FLOPs nobody knows here; they are counted as if they only moved memory.

    Operators of PyTorch other than matrix products are not among them: they do a few FLOPs for each number.
    """
    known = {*FLOPS, *MEMORY_ONLY, *ops.COLLECTIVES}
    return sorted(
        {
            target_name(n.target)
            for n in program.nodes
            if n.target not in known
            and isinstance(n.target, torch._ops.OpOverload)
            and (n.target.namespace != "aten" or _is_product(n.target))
        }
    )


def _is_product(target: torch._ops.OpOverload) -> bool:
    name = target._schema.name.removeprefix("aten::")
    return any(part in name for part in ("matmul", "bmm", "_mm", "einsum", "conv", "attention", "tensordot", "lstm"))


# -- collectives -------------------------------------------------------------------------------------------------------


def _collective_cost(sizes: Sizes, node: fx.Node) -> Cost:
    args = arguments(node)
    ranks = sizes.program.mesh.get(args["axis"], 1)
    if ranks == 1:
        return Cost()
    if node.target is ops.take_own:
        return Cost(activation_bytes=2 * sizes.bytes(node))  # its part is read and written; nothing is sent
    return Cost(
        sent_bytes=ring_bytes(ops.kind_of_collective(node.target), sizes.bytes(args["x"]), ranks), num_collectives=1
    )


def ring_bytes(target: Any, num_bytes: int, ranks: int) -> int:
    """Bytes that each rank sends in a ring, for an argument of ``num_bytes`` on every rank."""
    if target is ops.all_gather:
        # ranks - 1 times, a rank passes on one rank's argument
        return (ranks - 1) * num_bytes
    if target is ops.reduce_scatter:
        # ranks - 1 times, a rank passes on one share of the partial sums
        return math.ceil((ranks - 1) * num_bytes / ranks)
    if target is ops.all_reduce:
        # a reduce-scatter and then an all-gather of the shares: 2 × (ranks - 1) × one share
        return math.ceil(2 * (ranks - 1) * num_bytes / ranks)
    raise CompileError(explain("no formula for what this collective sends", got=target_name(target)))


# -- operands ----------------------------------------------------------------------------------------------------------


def _operands(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """The values that an operator reads, each with the name of the argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return [("", used) for used in walk(list(node.args))]
    return [(name, used) for name, argument in arguments(node).items() for used in walk(argument)]


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


__all__ = [
    "Cost", "Sizes", "Step", "cost", "is_pool", "peak_activation_bytes", "ring_bytes", "slot_bytes",
    "uncounted",
]  # fmt: skip
