import torch
from torch.nn.functional import linear

from examples.recognize_spelled_silu import recognize_spelled_silu
from graphsrt.testing import check, trace


def mlp(x, gate, up):
    g = linear(x, gate)
    return g * torch.sigmoid(g) * linear(x, up)


def test_fires():
    program = trace(mlp, inputs={"x": ("T", 34)}, weights={"gate": (46, 34), "up": (46, 34)})
    done = check(recognize_spelled_silu, program, fires=1)
    assert "sigmoid(" in done.before and "sigmoid(" not in done.after
    assert 'glu(linear, linear_1, act="silu")' in done.after


def test_near_miss():
    program = trace(mlp, inputs={"x": ("T", 34)}, weights={"gate": (46, 34), "up": (1, 34)})
    check(recognize_spelled_silu, program, fires=0, near_miss="up ('T', 1) differ")
