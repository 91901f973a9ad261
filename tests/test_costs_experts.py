"""Experts in plans, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from graphsrt import ops
from graphsrt.costs import Sizes, Step, cost
from tests.support import mixtures

E, F, X, K = mixtures.WIDTH, mixtures.INNER, 5, 2


@pytest.mark.parametrize(("experts", "tp"), [("tp", 1), ("tp", 2), ("ep", 2)])
def test_flops_and_bytes_of_the_experts_in_use(experts: str, tp: int) -> None:
    program = mixtures.traced("mixtral", tp, experts).program()
    node = program.calls(ops.moe_experts)[0]
    for batch in (1, 8):
        got = cost(Sizes(program, Step.decode(batch, 9)), node)
        width = F if experts == "ep" or tp == 1 else -(-F // tp)  # a width of 13 is padded to 2 × 7
        count = -(-X // tp) if experts == "ep" else X  # 5 experts are padded to 2 × 3
        share = count / X
        assert got.total_flops == round(batch * K * share * 2 * 3 * E * width)
        used = 1 - (1 - K / X) ** batch
        matrices = [count * 2 * width * E * 8, count * E * width * 8]  # float64
        assert got.weight_bytes == pytest.approx(sum(round(size * used) for size in matrices), abs=8)  # first_expert
