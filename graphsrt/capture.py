"""From a Hugging Face causal LM to a :class:`Program`: the only file that knows ``torch.export``.

The model runs untouched on the meta device with flattened tokens as a batch of one. transformers' own attention
interface hands every attention call to :func:`_attention`, which records it as one ``graphsrt::attention`` operator and
refuses by name whatever that operator cannot carry. Rotary embeddings whose frequencies depend on the length of the
sequence are fixed once from the engine's context length, so that cached keys agree with later queries.
"""

from __future__ import annotations

import copy
import inspect
import operator
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from graphsrt import ops
from graphsrt.capture_buffers import join_written_parts
from graphsrt.capture_complex import split_complex
from graphsrt.check_tokens import check_tokens
from graphsrt.errors import CompileError, explain
from graphsrt.flat_model import FlatModel
from graphsrt.models import experts
from graphsrt.models.sparse import check_dense
from graphsrt.models.stateful import check_stateless
from graphsrt.program import LOGITS, Input, Program, Weight, arguments, aten, where
from graphsrt.recipes import Ckpt, Const

INTERFACE = "graphsrt"
KNOWN_ROPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
MAX_CONSTANT_VALUES = 65536
"""Largest computed buffer that is written out in program text; anything bigger belongs in the checkpoint."""

# Arguments that transformers passes to an attention function and that say nothing about the result here.
_IRRELEVANT = {
    "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict",
    "dropout", "past_key_values", "past_key_value", "logits_to_keep", "inputs_embeds",
}  # fmt: skip


def _attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None = None, **extra: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention function: ``query [1, H, T, D]``, ``key``/``value [1, K, T, D]`` -> ``[1, T, H, D]``."""
    layer = getattr(module, "layer_idx", None)
    place = f"attention of layer {layer} ({type(module).__name__})"

    def refuse(what: str, got: Any) -> CompileError:
        return CompileError(explain(f"{place} needs {what}, which the attention operator does not carry", got=str(got)))

    if layer is None:
        raise CompileError(f"{type(module).__name__} does not say which layer it is (no layer_idx)")
    if attention_mask is not None:
        raise refuse("an attention mask", f"a mask of shape {tuple(attention_mask.shape)}")
    if extra.pop("dropout", 0.0):
        raise refuse("dropout", "a model in training mode; call model.eval() first")
    causal = extra.pop("is_causal", None)
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise refuse("non-causal attention", "is_causal=False")
    scale = extra.pop("scaling", None)
    window = extra.pop("sliding_window", None)
    softcap = extra.pop("softcap", None)
    chunk = None
    sinks = extra.pop("s_aux", None)
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    kind = layer_types[layer] if layer_types and layer < len(layer_types) else "full_attention"
    if kind == "sliding_attention" and window is None:
        window = _window_of_the_mask(module)
    if kind == "sliding_attention" and window is None:
        raise refuse("a sliding window", "layer_types says sliding_attention, but the model passes no sliding_window")
    if kind == "chunked_attention":  # the size is in the mask, which transformers does not make for this interface
        chunk = getattr(module.config, "attention_chunk_size", None)
        if chunk is None:
            raise refuse(
                "a chunk size", "layer_types says chunked_attention, but the config has no attention_chunk_size"
            )
    elif kind not in ("full_attention", "sliding_attention", "attention"):
        raise refuse(f"{kind}", kind)
    for name, item in extra.items():
        if item is not None and item is not False and name not in _IRRELEVANT:
            raise refuse(f"the argument {name}", tuple(item.shape) if isinstance(item, torch.Tensor) else item)
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise refuse(
            "heads in whole groups", f"{query.shape[1]} query, {key.shape[1]} key, {value.shape[1]} value heads"
        )
    out = ops.attention(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1),
        layer_id=layer, scale=float(scale if scale is not None else query.shape[-1] ** -0.5),
        sliding_window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap), sinks=sinks,
        chunk_size=None if chunk is None else int(chunk),
    )  # fmt: skip
    return out[None], None


def _window_of_the_mask(module: nn.Module) -> int | None:
    """The window that transformers would put into the mask of a layer that passes none: its mask function reads it from
    the config. None where the model's file does not use that function."""
    code = sys.modules.get(type(module).__module__)
    if not hasattr(code, "create_sliding_window_causal_mask"):
        return None
    window = getattr(module.config, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None


def check_config(config: Any) -> None:
    """Refuse, by name, what no captured program can honour; before any weight is read."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for kind in sorted(rope_types(text)):
        if kind not in KNOWN_ROPES:
            raise CompileError(
                explain(
                    f"unknown rope type {kind!r}",
                    where="rope_parameters of the config",
                    expected=", ".join(KNOWN_ROPES),
                    hint="correct rope_parameters, or upgrade transformers if the model is newer than it",
                )
            )


def rope_types(config: Any) -> set[str]:
    """The rope types that a text config names."""
    found = set()
    for parameters in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if isinstance(parameters, dict):
            nested = [p for p in parameters.values() if isinstance(p, dict)]
            for item in nested or [parameters]:
                kind = item.get("rope_type", item.get("type"))
                if kind is not None:
                    found.add(kind)
    return found


def meta_twin(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model whose parameters are on the meta device in ``dtype``; the original is left untouched."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        target = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, device="meta", dtype=target)

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(empty(parameter.data), requires_grad=False)
    twin = copy.deepcopy(model, memo)
    return twin.eval()


def meta_model(config: Any, model_class: type, dtype: torch.dtype) -> nn.Module:
    """The model of a config on the meta device, its computed buffers (rotary frequencies, scales) filled in."""
    with torch.device("meta"), _default_dtype(dtype):
        model = model_class(copy.deepcopy(config))
    owners: dict[str, Any] = {"": model}  # each module's nearest pretrained model, which knows how to fill it
    for path, module in model.named_modules():
        owners[path] = module if hasattr(module, "_init_weights") else owners[path.rpartition(".")[0]]
        unfilled = [n for n, b in module._buffers.items() if b is not None and b.is_meta and _computed(module, n)]
        if not unfilled:
            continue
        for name in unfilled:
            buffer = module._buffers[name]
            filler = float("nan") if buffer.is_floating_point() else -(2**31)
            module._buffers[name] = torch.full(buffer.shape, filler, dtype=buffer.dtype, device="cpu")
        owners[path]._init_weights(module)
        for name in unfilled:
            buffer = module._buffers[name]
            if (torch.isnan(buffer) if buffer.is_floating_point() else buffer == -(2**31)).any():
                raise CompileError(
                    explain(
                        f"buffer {name} of {type(module).__name__} is computed when the model is built, "
                        "but transformers cannot compute it again",
                        hint="pass a model in memory instead of a config",
                    )
                )
    return model.eval()


def _computed(module: nn.Module, name: str) -> bool:
    return name in module._non_persistent_buffers_set


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fix_rope(model: nn.Module, context_length: int) -> None:
    """Fix rotary frequencies that depend on the sequence length to those of a ``context_length`` sequence."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None or not hasattr(module, "config"):
            continue
        per_layer_type = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in per_layer_type.items():
            if kind not in LENGTH_DEPENDENT_ROPES:
                continue
            extra = {} if layer_type is None else {"layer_type": layer_type}
            prefix = "" if layer_type is None else f"{layer_type}_"
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, "cpu", seq_len=context_length, **extra)
            setattr(module, f"{prefix}inv_freq", inv_freq)
            setattr(module, f"{prefix}attention_scaling", scaling)
        if any(kind in LENGTH_DEPENDENT_ROPES for kind in per_layer_type.values()):
            # the decorated forward would change the frequencies from step to step
            module.forward = inspect.unwrap(type(module).forward).__get__(module)


def hidden_indices(asked: Iterable[int], config: Any) -> list[int]:
    """Indices into transformers' hidden states, ascending, negative ones counted from the end; ValueError if outside.

    0 is the embedding, ``i`` what layer ``i - 1`` gives, and the last, that of the last layer, is after the final norm.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = int(text.num_hidden_layers)
    found = set()
    for index in asked:
        if not isinstance(index, int) or isinstance(index, bool) or not -layers - 1 <= index <= layers:
            raise ValueError(
                explain(
                    "capture_hidden names hidden states by transformers' index",
                    expected=f"integers from {-layers - 1} to {layers} ({layers} layers)",
                    got=repr(index),
                )
            )
        found.add(index % (layers + 1))
    return sorted(found)


def capture(model: Any, *, context_length: int, name: str | None = None, hidden: Sequence[int] = (),
            input_embeds: bool = False) -> Program:  # fmt: skip
    """Export a causal LM on the meta device (it is modified) as a :class:`Program`: a model of transformers, or a plain
    module ``(tokens [T], positions [T]) -> logits [T, V]`` with a ``config``, which calls ``ops.attention`` itself.

    ``hidden``: indices of hidden states that are returned as well, as ``hidden_<index>``. ``input_embeds``: the program
    takes embeddings in place of tokens; see :class:`FlatModel`.

    Raises CompileError where the model does something that a served program cannot keep: attention outside the
    interface, state between tokens, control flow on the token count.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(INTERFACE, _attention)
    config = model.config
    check_config(config)
    check_stateless(model)
    check_dense(model)
    for part in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        part._attn_implementation = INTERFACE
    experts.settle(model, INTERFACE)
    fix_rope(model, context_length)
    stored = set(model.state_dict(keep_vars=True))  # a buffer among them (a router's bias) is the checkpoint's
    constants = {n: b for n, b in model.named_buffers(remove_duplicate=False) if not b.is_meta and n not in stored}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to("meta")
    try:
        exported = _export(FlatModel(model, hidden, input_embeds), config)
        program = _convert(exported, model, constants, name or str(getattr(config, "model_type", "model")), hidden)
    except CompileError as error:
        if getattr(model, "_supports_attention_backend", True):
            raise
        raise CompileError(  # the cause, though what shows first is often something that follows from it
            explain(
                "attention does not go through transformers' attention interface",
                where=type(model).__name__,
                got=str(error).partition("\n")[0],
                hint="such a model needs a reference model (docs/adding_a_model.md)",
            )
        ) from error
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    program.constants = {
        "context_length": context_length,
        "vocab_size": int(program.output.meta["val"].shape[-1]),
        "num_layers": len(program.calls(ops.attention)),
    }
    _number_attention(program, text)
    check_tokens(program)
    return program


def _export(wrapper: FlatModel, config: Any) -> torch.export.ExportedProgram:
    example = (torch.zeros(7, dtype=torch.long, device="meta"), torch.arange(7, device="meta"))
    names = ("tokens", "positions")
    if wrapper.takes_embeds:
        table: Any = wrapper.embedding.weight
        embeds = torch.zeros(7, table.shape[1], dtype=table.dtype, device="meta")
        example = (*example, embeds, torch.zeros(7, 1, dtype=torch.bool, device="meta"))  # type: ignore[assignment]
        names = (*names, "input_embeds", "is_embeds")  # type: ignore[assignment]
    dynamic = {name: {0: torch.export.Dim.DYNAMIC} for name in names}
    try:
        with torch.no_grad(), _numbers_on_the_cpu():
            exported = torch.export.export(
                wrapper, example, dynamic_shapes=dynamic, strict=False, prefer_deferred_runtime_asserts_over_guards=True
            )
        if join_written_parts(exported.graph):
            exported.graph_module.recompile()
        if any(_mutates(node) for node in exported.graph.nodes):
            exported = exported.run_decompositions({})  # functionalises in-place operators, keeps all others
    except CompileError:
        raise
    except Exception as error:  # torch.export raises whatever the model's code raises
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, CompileError):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, CompileError):
            raise cause from None
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CompileError(
            explain(
                f"{type(config).__name__} cannot be captured: {first[:500]}",
                hint="the model's code depends on data or on the number of tokens in a way that torch.export refuses",
            )
        ) from error
    return exported


@contextmanager
def _numbers_on_the_cpu() -> Iterator[None]:
    """``torch.tensor(0.5, device=x.device)`` would forget its number on the meta device."""
    original = torch.tensor

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        if isinstance(data, (int, float)) and torch.device(options.get("device") or "cpu").type == "meta":
            options["device"] = "cpu"
        return original(data, **options)

    torch.tensor = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.tensor = original


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _convert(
    exported: torch.export.ExportedProgram,
    model: nn.Module,
    constants: dict[str, torch.Tensor],
    name: str,
    hidden: Sequence[int],
) -> Program:
    split_complex(exported.graph)
    program = Program(name)
    prefix = getattr(model, "base_model_prefix", "")
    canonical = _canonical_names(model)
    signature = exported.graph_signature
    parameters = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    values: dict[fx.Node, Any] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            if not node.users:
                continue
            if node.name in ("tokens", "positions"):
                values[node] = program.add_input(node.name, Input(("T",), torch.int64, node.name))
                continue
            if node.name in ("input_embeds", "is_embeds"):
                given = node.meta["val"]
                declared = Input(("T", int(given.shape[1])), given.dtype, f"forward_batch.{node.name}")
                values[node] = program.add_input(node.name, declared)
                continue
            if node.name in signature.inputs_to_lifted_tensor_constants:
                lifted = signature.inputs_to_lifted_tensor_constants[node.name]
                values[node] = _lifted(program, node, exported.constants[lifted])
                continue
            if node.name not in parameters:
                raise CompileError(
                    f"the captured graph has an input {node.name} that is neither a weight nor a token input"
                )
            fqn = canonical.get(parameters[node.name].removeprefix("net."), parameters[node.name].removeprefix("net."))
            value = node.meta["val"]
            if fqn in constants:
                recipe: Any = _constant(fqn, constants[fqn])
            else:
                recipe = Ckpt(fqn)
            if fqn not in program.weights:
                program.add_weight(fqn, Weight(tuple(value.shape), value.dtype, recipe))
            values[node] = program.weight_node(fqn)
        elif node.op == "call_function":
            converted = _convert_call(program, node, values, prefix)
            if converted is not None:
                values[node] = converted
        elif node.op == "output":
            names = [LOGITS, *(f"hidden_{index}" for index in hidden)]
            program.set_outputs({name: values[result] for name, result in zip(names, node.args[0], strict=True)})
        else:
            raise CompileError(f"the captured graph has a {node.op} node {node.name}, which is not supported")
    program.remove_dead()
    program.infer()
    _check_embeds(program)
    return program


def _check_embeds(program: Program) -> None:
    """Where a row is an embedding there is no token, so nothing but the embedding may read it."""
    if "input_embeds" not in program.inputs:
        return
    tokens, mask = (next(n for n in program.graph.nodes if n.name == name) for name in ("tokens", "is_embeds"))
    replaced = {user for view in mask.users for user in (view, *view.users)}
    seen, todo = set(), list(tokens.users)
    while todo:
        node = todo.pop()
        if node in seen or node in replaced:
            continue
        seen.add(node)
        if node.op == "output" or node.target is ops.attention:
            raise CompileError(
                explain(
                    "the model reads token ids elsewhere than in its input embedding",
                    where=where(next(iter(tokens.users))),
                    hint="compile it without input_embeds",
                )
            )
        todo += node.users


def _lifted(program: Program, node: fx.Node, value: torch.Tensor) -> fx.Node:
    """A tensor that the model's code makes from numbers, as a weight."""
    module, source = _origin(node, "")
    if value.is_meta:
        raise CompileError(explain("a tensor made from numbers has none", where=f"{module} {source}".strip()))
    name = program.fresh_name(node.name.removeprefix("c_net_"))
    program.add_weight(name, Weight(tuple(value.shape), value.dtype, _constant(name, value)))
    return program.weight_node(name)


def _convert_call(program: Program, node: fx.Node, values: dict[fx.Node, Any], prefix: str) -> fx.Node | None:
    val: Any = node.meta.get("val")
    if node.target in (aten._assert_scalar.default, aten._assert_tensor_metadata.default):
        return None
    if val is not None and not isinstance(val, (torch.Tensor, list, tuple)):
        values[node] = val  # token counts and comparisons of them: settled below, where they are used
        return None
    if node.target is aten.copy.default and _same_kind(node, node.args[1]):
        values[node] = values[node.args[1]]  # type: ignore[index]
        return None
    if node.target in _ARANGES and _is_every_token(node):
        values[node] = _positions(program, node, values)
        return None
    module, source = _origin(node, prefix)
    if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
        raise CompileError(explain(f"{node.target} cannot be part of a program", where=f"{module} {source}".strip()))
    args: list[Any] = list(node.args)
    names = [a.name for a in node.target._schema.arguments] if isinstance(node.target, torch._ops.OpOverload) else []
    for index, argument in enumerate(names[: len(args)]):
        if argument in ("size", "shape") and isinstance(args[index], (list, tuple)):
            assert isinstance(val, torch.Tensor)
            args[index] = _static_shape(val, node, module, source)
    given: Any = (tuple(args), dict(node.kwargs))
    mapped, kwargs = fx.node.map_arg(given, lambda a: _mapped(values, a, node, module, source))
    kwargs = {key: ("cpu" if key == "device" else value) for key, value in kwargs.items()}
    mapped = tuple("cpu" if isinstance(a, torch.device) else a for a in mapped)
    leaf = node.target in (aten.linear.default, aten.embedding.default)
    role = "" if leaf else str(node.target).split(".")[1] if "." in str(node.target) else "getitem"
    label = ".".join(part for part in (module, role) if part) or "value"
    return _place(program, node.target, mapped, kwargs, label, module, source)


_ALIASES = {
    aten.multiply.Tensor: aten.mul.Tensor,
    aten.divide.Tensor: aten.div.Tensor,
    aten.subtract.Tensor: aten.sub.Tensor,
}
"""Second names of operators, which torch's decompositions would replace."""
_ARANGES = {aten.arange.default, aten.arange.start, aten.arange.start_step}


def _same_kind(node: fx.Node, other: Any) -> bool:
    a, b = node.meta["val"], other.meta["val"]
    return a.shape == b.shape and a.dtype == b.dtype


def _is_every_token(node: fx.Node) -> bool:
    """Whether an ``arange`` counts the tokens from 0: of one sequence alone those are the positions."""
    args, tokens = arguments(node), next(n for n in node.graph.nodes if n.name == "tokens")
    starts = args.get("start", 0) == 0 and args.get("step", 1) == 1
    count, whole = node.meta["val"].shape[0], tokens.meta["val"].shape[0]
    return starts and isinstance(count, torch.SymInt) and count.node.expr == whole.node.expr


def _positions(program: Program, node: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
    """A model that counts tokens itself gets the positions in their sequences instead. Were the count an index of
    tokens, something would have to look tokens up by it, which check_tokens refuses."""
    given = next(n for n in node.graph.nodes if n.name == "positions")
    if given not in values:
        values[given] = program.add_input("positions", Input(("T",), torch.int64, "positions"))
    dtype = node.meta["val"].dtype
    if dtype == torch.int64:
        return values[given]
    module, source = _origin(node, "")
    return _place(program, aten.to.dtype, (values[given], dtype), {}, f"{module}.positions", module, source)


def _place(program: Program, target: Any, args: tuple, kwargs: dict, label: str, module: str, source: str) -> fx.Node:
    new = program.call(_ALIASES.get(target, target), *args, name=label, **kwargs)
    new.meta.update(module=module, source=source, made_by=())
    return new


def _mapped(values: dict[fx.Node, Any], argument: fx.Node, node: fx.Node, module: str, source: str) -> Any:
    value = values[argument]
    if isinstance(value, (fx.Node, int, float, bool)):
        return value
    raise CompileError(
        explain(
            f"{node.target} uses the number of tokens as a value; only shapes may depend on it",
            where=f"{module} {source}".strip(),
        )
    )


def _static_shape(val: torch.Tensor, node: fx.Node, module: str, source: str) -> list[int]:
    """A view's sizes from its result: fixed ones as ints, the one that depends on the tokens as -1."""
    sizes = [int(size) if isinstance(size, int) or size.node.expr.is_Integer else -1 for size in val.shape]
    if sizes.count(-1) > 1:
        raise CompileError(
            explain(
                f"{node.target} makes a tensor with two dimensions of token length", where=f"{module} {source}".strip()
            )
        )
    return sizes


def _constant(name: str, value: torch.Tensor) -> Const:
    if value.numel() > MAX_CONSTANT_VALUES:
        raise CompileError(f"buffer {name} holds {value.numel()} computed values; at most {MAX_CONSTANT_VALUES} can be "
                           "written into a program")  # fmt: skip
    return Const(tuple(value.shape), tuple(float(x) for x in value.double().flatten().tolist()))


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of a tied parameter -> the first of its names."""
    first: dict[int, str] = {}
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    return names


def _origin(node: fx.Node, prefix: str) -> tuple[str, str]:
    """Module path (without the base model's prefix) and "file:line" of a captured node."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    path = re.sub(r"^L\['self'\]\.?", "", path).removeprefix("net").lstrip(".")
    if prefix and (path == prefix or path.startswith(prefix + ".")):
        path = path[len(prefix) :].lstrip(".")
    source = ""
    for match in re.finditer(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or ""):
        if "/torch/" not in match.group(1) and not match.group(1).endswith("graphsrt/capture.py"):
            source = f"{match.group(1).rsplit('/', 1)[-1]}:{match.group(2)}"
    return path, source


def _number_attention(program: Program, config: Any) -> None:
    """Check that every layer attends through the interface. Where layers do so more than once (run again in a loop, or
    on halves of the values), each call gets a number, and so keys and values in the pool, of its own."""
    layers = getattr(config, "num_hidden_layers", None)
    nodes = program.calls(ops.attention)
    found = [arguments(node)["layer_id"] for node in nodes]
    is_repeated = len(set(found)) < len(found)
    expected = max(found, default=-1) + 1 if layers is None or is_repeated else layers
    if sorted(set(found)) != list(range(expected)) or not found:
        raise CompileError(
            explain(
                "attention does not go through transformers' attention interface in every layer",
                where=type(config).__name__,
                expected=f"{layers} attention operators, one for each of layers 0 to {expected - 1}",
                got=f"{len(found)} ({found[:8]}{'…' if len(found) > 8 else ''})",
                hint="such a model needs a reference model (docs/adding_a_model.md)",
            )
        )
    if is_repeated:
        for index, node in enumerate(nodes):
            node.kwargs = {**node.kwargs, "layer_id": index}
