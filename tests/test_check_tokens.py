"""Anything but attention that lets tokens meet is refused by name; what the models that we serve do is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphsrt.capture import capture, meta_model
from graphsrt.check_tokens import check_tokens
from graphsrt.coverage.architectures import model_class
from graphsrt.coverage.tiny_config import tiny_config
from graphsrt.errors import CompileError
from graphsrt.models.stateful import check_stateless
from graphsrt.program import Input, Program, Weight, aten
from graphsrt.recipes import Ckpt

WIDTH, VOCAB = 6, 11


def traced(body: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Program:
    """``embedding -> body(x [T, 6], weight [6, 6]) -> logits`` as a program, T symbolic."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(VOCAB, WIDTH, device="meta"))
            self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
            self.head = nn.Parameter(torch.empty(VOCAB, WIDTH, device="meta"))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.linear(body(F.embedding(tokens, self.table), self.weight), self.head)

    exported = torch.export.export(
        Net(), (torch.zeros(7, dtype=torch.long, device="meta"),),
        dynamic_shapes={"tokens": {0: torch.export.Dim.DYNAMIC}}, strict=False,
    ).run_decompositions({})  # fmt: skip
    program = Program("net")
    values: dict[torch.fx.Node, object] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            name = exported.graph_signature.inputs_to_parameters.get(node.name)
            if name is None:
                values[node] = program.add_input("tokens", Input(("T",), torch.int64, "tokens"))
            else:
                val = node.meta["val"]
                values[node] = program.add_weight(name, Weight(tuple(val.shape), val.dtype, Ckpt(name)))
        elif node.op == "call_function":
            if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
                continue
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda a: values.get(a, -1))
            values[node] = program.call(node.target, *args, name=node.name, **kwargs)
        else:
            program.graph.output(values[node.args[0][0]])
    for node in program.graph.nodes:  # the sizes as torch.export found them
        twin = next((other for other, value in values.items() if value is node), None)
        if twin is not None:
            node.meta["val"] = twin.meta["val"]
    return program


def shifted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x + F.pad(x, (0, 0, 1, 0))[:-1]


MIXES = {
    "shift": (shifted, "pad"),
    "roll": (lambda x, w: x + torch.roll(x, 1, 0), "roll"),
    "running sum": (lambda x, w: x.cumsum(0), "cumsum"),
    "mean over the text": (lambda x, w: x - x.mean(0, keepdim=True), "mean"),
    "mean of all": (lambda x, w: x - x.mean(), "mean"),
    "last token": (lambda x, w: x + x[-1], "select"),
    "softmax over tokens": (lambda x, w: x * x.softmax(0), "softmax"),
    "short convolution": (lambda x, w: F.conv1d(x.T[None], w[:, None, :3], padding=1, groups=WIDTH)[0].T, "conv"),
    "attention spelled out": (lambda x, w: (x @ x.T).softmax(-1) @ x, "matmul"),
    "pairs": (lambda x, w: (x[:, None] - x[None]).amax(1), "sub"),
    "sorted": (lambda x, w: x.sort(0).values, "sort"),
    "flip": (lambda x, w: x + x.flip(0), "flip"),
    "reversed view": (lambda x, w: x + x.T.reshape(-1, WIDTH), "view"),
    "fast Fourier transform": (lambda x, w: torch.fft.fft(x, dim=0).real, "fft"),
    "every second token": (lambda x, w: x[::2].repeat_interleave(2, 0)[: x.shape[0]], "slice"),
    "pairs of tokens": (lambda x, w: torch.cat([x, x]).view(-1, 2 * WIDTH).repeat(1, 1)[:, :WIDTH], "cat"),
    "chosen by each other": (lambda x, w: x.index_select(1, x[:, 0].long() % WIDTH)[:, :WIDTH], "index_select"),
    "looked up among tokens": (lambda x, w: x[x[:, 0].long()], "index"),
}
KEEPS = {
    "mlp": lambda x, w: x + F.silu(x @ w) * F.linear(x, w),
    "norm": lambda x, w: F.layer_norm(x, (WIDTH,), w[0]),
    "heads": lambda x, w: (x.view(-1, 2, 3).transpose(0, 1).softmax(-1)).transpose(0, 1).reshape(-1, WIDTH),
    "product of heads": lambda x, w: (x.view(-1, 2, 3).transpose(0, 1) @ w.view(2, 6, 3)[:, :3])
    .transpose(0, 1)
    .reshape(-1, WIDTH),
    "choice of channels": lambda x, w: x.gather(-1, x.topk(3, -1).indices).repeat(1, 2),
    "scatter": lambda x, w: torch.zeros_like(x).scatter(1, x.topk(2, -1).indices, 1.0) * x,
    "halves": lambda x, w: torch.cat([-x[:, 3:], x[:, :3]], -1),
    "table": lambda x, w: w[x[:, 0].long()] + x,
    "padded channels": lambda x, w: F.pad(x, (0, 2))[:, 2:],
    "flattened": lambda x, w: (x.view(-1) * 2).view(-1, WIDTH),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXES)
def test_tokens_that_meet_are_refused(name: str) -> None:
    body, operator = MIXES[name]
    with pytest.raises(CompileError, match=rf"aten\.\w*{operator}.*(?s:.)*leak"):
        check_tokens(traced(body))


@pytest.mark.parametrize("name", KEEPS)
def test_tokens_apart_are_accepted(name: str) -> None:
    check_tokens(traced(KEEPS[name]))


def test_an_unknown_operator_is_refused() -> None:
    """What no rule speaks of is not let through."""
    program = traced(lambda x, w: torch.linalg.svdvals(x.view(-1, 2, 3)).repeat(1, 3))
    with pytest.raises(CompileError, match="is not known to treat each token by itself"):
        check_tokens(program)


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("lfm2", r"convolution over 3 tokens\n  where: .*conv \(Lfm2ShortConv\)"),
        ("mamba", r"convolution over 4 tokens and a scan.*\n  where: .*mixer \(MambaMixer\)"),
        ("jamba", r"scan.*\n  where: .*mamba \(JambaMambaMixer\)"),
        ("qwen3_next", r"scan.*\n  where: .*linear_attn \(Qwen3NextGatedDeltaNet\)"),
        ("recurrent_gemma", r"convolution over 4 tokens.*\n  where: .*\(RecurrentGemmaRecurrentBlock\)"),
        ("minimax", r"state that every token updates\n  where: .*\(MiniMaxLightningAttention\)"),
        ("rwkv", r"state that every token updates\n  where: .*\(RwkvSelfAttention\)"),
    ],
)
def test_models_with_state_are_refused_before_capture(model_type: str, told: str) -> None:
    """By what transformers' own cache has to keep for them; the module is named."""
    with torch.device("meta"):
        net = model_class(model_type)(tiny_config(model_type))
    with pytest.raises(CompileError, match=told):
        check_stateless(net)


def test_the_graph_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without looking at modules, LFM2's convolution is found in its graph."""
    monkeypatch.setattr("graphsrt.capture.check_stateless", lambda model: None)
    monkeypatch.setattr("graphsrt.capture._number_attention", lambda program, config: None)
    net = meta_model(tiny_config("lfm2"), model_class("lfm2"), torch.float64)
    with pytest.raises(CompileError, match=r"aten\.(conv1d|pad|slice|cat|constant_pad_nd)"):
        capture(net, context_length=64)


def test_output_needs_a_row_for_each_token() -> None:
    program = Program("net")
    tokens = program.add_input("tokens", Input(("T",), torch.int64, "tokens"))
    table = program.add_weight("table", Weight((VOCAB, WIDTH), torch.float64, Ckpt("table")))
    program.graph.output(
        program.call(aten.transpose.int, program.call(aten.embedding.default, table, tokens, name="x"), 0, 1, name="y")
    )
    program.infer()
    with pytest.raises(CompileError, match="no row for each token"):
        check_tokens(program)
