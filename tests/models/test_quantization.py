"""FP8 checkpoints: every producer's config and names, what is loaded, what it computes, and every fault by its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import graphsrt
from graphsrt import ops
from graphsrt.cli import main
from graphsrt.errors import CheckpointError, CompileError
from graphsrt.models.quantization import read_quantization, writers
from graphsrt.models.quantization.scheme import LinearScheme, Pattern, Quantization
from graphsrt.models.source import resolve
from graphsrt.passes import PIPELINE
from graphsrt.passes.runner import pass_name, run_phases
from graphsrt.quantize import quantize
from graphsrt.recipes import DequantFp8, evaluate
from graphsrt.verification import small_program, verify_stages
from tests.support import mixtures, tiny
from tests.support.captures import shared

BLOCK = 16  # of 48 and 41 channels; 128 would be larger than any matrix here
PROMPTS = [tiny.tokens(19, seed) for seed in (5, 6)]
CASES = [(layout, scheme) for layout, form in writers.LAYOUTS.items() for scheme in form.schemes]


@pytest.fixture(autouse=True)
def one_capture() -> Iterator[None]:
    with shared():
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    tiny.build("llama").float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Path]]:
    """Folder of a layout and a scheme, written once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(writers.SCHEMES, "fp8-block", LinearScheme("block", "block", BLOCK))
        made: dict[tuple[str, str], Path] = {}

        def write(layout: str, scheme: str) -> Path:
            if (layout, scheme) not in made:
                target = tmp_path_factory.mktemp("made") / f"{layout} {scheme}"
                made[layout, scheme] = quantize(plain, target, scheme, layout=layout, prompts=PROMPTS)
            return made[layout, scheme]

        yield write


@pytest.fixture
def copied(written: Callable[[str, str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of such a folder with its tensors and config changed."""

    def copy(layout: str, scheme: str, tensors: Callable[[dict], None] | None = None, **config: Any) -> Path:
        target = tmp_path / "copy"
        shutil.copytree(written(layout, scheme), target)
        if tensors is not None:
            held = load_file(target / "model.safetensors")
            tensors(held)
            save_file(held, target / "model.safetensors", metadata={"format": "pt"})
        text = json.loads((target / "config.json").read_text())
        text["quantization_config"] |= config
        (target / "config.json").write_text(json.dumps(text))
        return target

    return copy


# -- what is loaded ----------------------------------------------------------------------------------------------------


def meant(held: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """A stored matrix in float64, number for number."""
    numbers = held[f"{module}.weight"].double()
    (scale,) = [held[f"{module}.{n}"] for n in ("weight_scale", "weight_scale_inv") if f"{module}.{n}" in held]
    scale = scale.double()
    if scale.numel() == 1:
        return numbers * scale.reshape(())
    if scale.numel() == len(numbers):
        return numbers * scale.reshape(-1, 1)
    rows, columns = (torch.arange(n) // BLOCK for n in numbers.shape)
    return numbers * scale[rows][:, columns]


@pytest.mark.parametrize("layout, scheme", CASES)
def test_weights_are_the_checkpoints(written: Callable[[str, str], Path], layout: str, scheme: str) -> None:
    """Bitwise, of every producer's layout; all linears but the head multiply in FP8."""
    folder = written(layout, scheme)
    held = load_file(folder / "model.safetensors")
    source = resolve(folder)
    captured, checkpoint = graphsrt.trace(folder, stop_after="capture").program(), source.require_checkpoint()
    stored = {name: w for name, w in captured.weights.items() if isinstance(w.recipe, DequantFp8)}
    assert len(stored) == 2 * 7 and "lm_head.weight" not in stored
    for name, weight in stored.items():
        assert held[name].dtype == torch.float8_e4m3fn
        got = evaluate(weight.recipe, 0, checkpoint, torch.float64)
        assert torch.equal(got, meant(held, name.removesuffix(".weight"))), name


class _Rounded(torch.nn.Module):
    """A linear that rounds its input as a scheme says, in float64: the reference, with no code of ours."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: str, scale: torch.Tensor | None):
        super().__init__()
        self.weight, self.bias, self.scheme, self.scale = weight, bias, scheme, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        if self.scheme == "fp8":
            assert self.scale is not None
            scale = self.scale.double().reshape(())
        elif self.scheme == "fp8-dynamic":
            scale = (wide.abs().amax(-1, keepdim=True).float() / 448).double()
        else:
            padded = F.pad(wide.abs(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).amax(-1)
            scale = (padded.float() / 448).double().repeat_interleave(BLOCK, -1)[..., : x.shape[-1]]
        rounded = (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
        return F.linear(rounded, self.weight, self.bias)


def reference(held: dict[str, torch.Tensor], scheme: str) -> LlamaForCausalLM:
    net = tiny.build("llama")
    for name, module in list(net.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            path, _, leaf = name.rpartition(".")
            scale = next(
                (held[f"{name}.{n}"] for n in ("input_scale", "activation_scale") if f"{name}.{n}" in held), None
            )
            bias = held.get(f"{name}.bias")
            made = _Rounded(meant(held, name), None if bias is None else bias.double(), scheme, scale)
            setattr(net.get_submodule(path), leaf, made)
    state = {name: value for name, value in held.items() if name in dict(net.named_parameters())}
    net.load_state_dict({name: value.double() for name, value in state.items()}, strict=False)
    return net  # type: ignore[return-value]


@pytest.mark.parametrize("scheme, tp", [("fp8", 3), ("fp8-dynamic", 2), ("fp8-block", 3)])
def test_logits_are_those_of_the_scheme(written: Callable[[str, str], Path], scheme: str, tp: int) -> None:
    """transformers computes norms and rope in float32, which moves an input by 2**-24 of it: where that takes it over a
    border between two FP8 numbers, it moves by one step, 2**-3 of it. Of a few thousand inputs, none or a few do; a
    scale that is wrong, or of another row, moves all of them."""
    folder = written("compressed-tensors", scheme)
    want = tiny.eager_logits(reference(load_file(folder / "model.safetensors"), scheme), ids := tiny.tokens(13, seed=4))
    with graphsrt.compile(folder, tp=tp, ranks="simulated", backend="eager", dtype=torch.float64) as model:
        got = model.logits(ids)
        assert len(model.program().calls(ops.fp8_linear)) == 2 * 4, "merged: qkv, o, gate_up, down of two layers"
    plain_logits = tiny.eager_logits(tiny.build("llama"), ids)
    assert tiny.worst(got, want) <= 1e-5
    assert tiny.worst(plain_logits, want) > 1e-3, "the test would see it if nothing were rounded"


@pytest.mark.parametrize("scheme", ["fp8", "fp8-dynamic", "fp8-block"])
@pytest.mark.parametrize("tp", [1, 2])
def test_fused_and_unfused(written: Callable[[str, str], Path], scheme: str, tp: int) -> None:
    """Through the engine, rounding in the norm and in the gate gives the bits of rounding after them."""
    folder, ids = written("compressed-tensors", scheme), tiny.tokens(13, seed=4)
    fusions = [name for name in map(pass_name, PIPELINE) if name.startswith("fuse_")]
    how: dict[str, Any] = {"tp": tp, "ranks": "simulated", "backend": "eager", "dtype": torch.float32}
    params = graphsrt.SamplingParams(max_new_tokens=5, ignore_eos=True)
    found = []
    for without in ([], fusions):
        with graphsrt.compile(folder, max_tokens_per_step=5, without=without, **how) as model:
            fired = {report.name for report in model.program().history if report.fired}
            rounds = {"fuse_rms_norm_quant"} | ({"fuse_silu_mul_quant"} if scheme == "fp8" or tp == 1 else set())
            assert fired & set(fusions) == set() if without else rounds <= fired
            found.append((model.logits(ids), model.generate([ids, ids[:3]], params)))
    (fused, tokens), (plain, others) = found
    assert torch.equal(fused, plain)
    assert [result.token_ids for result in tokens] == [result.token_ids for result in others]


def test_experts_are_multiplied_while_they_are_read(tmp_path: Path) -> None:
    """One matrix for each expert, stored in FP8: a rank's part of the stack of what they mean."""
    net = mixtures.model("qwen3_moe")
    net.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    want = dict(held)
    for name, value in list(held.items()):
        if ".experts." in name:
            scale = value.float().abs().amax(1, keepdim=True) / 448
            held[name] = (value.float() / scale).to(torch.float8_e4m3fn)
            held[f"{name}_scale"] = scale
            want[name] = held[name].double() * scale.double()
    assert len(held) > len(want)
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    rows = writers.LAYOUTS["compressed-tensors"].config(writers.SCHEMES["fp8-dynamic"], ignore, False)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": rows}))
    source = resolve(tmp_path)
    view = source.require_checkpoint()
    name = "model.layers.1.mlp.experts.down_proj"
    parts = [want[f"model.layers.1.mlp.experts.{i}.down_proj.weight"] for i in range(view.shape(name)[0])]
    assert torch.equal(view.read(name).double(), torch.stack(parts).float().double())
    assert torch.equal(view.read(name, (slice(1, 2), slice(3, 5), slice(1, 4))), view.read(name)[1:2, 3:5, 1:4])


# -- faults ------------------------------------------------------------------------------------------------------------

Q = "model.layers.1.self_attn.q_proj"


def _drop(name: str) -> Callable[[dict], None]:
    return lambda held: held.pop(name)


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], None]:
    def apply(held: dict[str, torch.Tensor]) -> None:
        held[name] = change(held[name]).clone()

    return apply


def _rename(name: str, other: str) -> Callable[[dict], None]:
    def apply(held: dict[str, torch.Tensor]) -> None:
        held[other] = held.pop(name)

    return apply


def _also(name: str, other: str) -> Callable[[dict], None]:
    def apply(held: dict[str, torch.Tensor]) -> None:
        held[other] = held[name].clone()

    return apply


@pytest.mark.parametrize(
    "scheme, change, words",
    [
        ("fp8-dynamic", _drop(f"{Q}.weight_scale"), f"{Q}.weight_scale is missing; scales there: none"),
        ("fp8", _drop(f"{Q}.input_scale"), f"{Q}.input_scale is missing; scales there: {Q}.weight_scale"),
        ("fp8", _rename(f"{Q}.weight_scale", f"{Q}.scales"), f"{Q}.weight_scale is missing; .*{Q}.scales"),
        ("fp8", _also(f"{Q}.weight_scale", f"{Q}.weight_scale_inv"), f"{Q}.weight_scale is stored 2 times"),
        ("fp8-dynamic", _set(f"{Q}.weight_scale", lambda s: s[:-1]), r"expected one number for each of \[64, 1\]"),
        ("fp8-block", _set(f"{Q}.weight_scale", lambda s: s.reshape(-1)), r"expected one number for each of \[4, 3\]"),
        ("fp8", _set(f"{Q}.weight_scale", lambda s: s * 0), f"{Q}.weight_scale is 0.0, expected a positive number"),
        ("fp8", _set(f"{Q}.input_scale", lambda s: s * float("nan")), f"{Q}.input_scale is nan"),
        ("fp8", _set(f"{Q}.weight", lambda w: w.float()), f"{Q}.weight is stored as torch.float32, expected"),
        ("fp8", _set("lm_head.weight", lambda w: w.to(torch.float8_e4m3fn)), "lm_head.weight is .* to be plain"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit(
    copied: Callable[..., Path], scheme: str, change: Callable[[dict], None], words: str
) -> None:
    folder = copied("compressed-tensors", scheme, change)
    with pytest.raises(CheckpointError, match=words):
        resolve(folder)


def test_all_faults_are_listed_together(copied: Callable[..., Path]) -> None:
    def change(held: dict[str, torch.Tensor]) -> None:
        del held[f"{Q}.weight_scale"], held["model.layers.0.mlp.down_proj.input_scale"]

    with pytest.raises(CheckpointError) as error:
        resolve(copied("compressed-tensors", "fp8", change))
    assert f"{Q}.weight_scale" in str(error.value) and "layers.0.mlp.down_proj.input_scale" in str(error.value)


def test_a_scale_that_nothing_needs(copied: Callable[..., Path]) -> None:
    """Inputs are scaled token by token, so a static scale of theirs has no meaning: it is told, not ignored."""

    def change(held: dict[str, torch.Tensor]) -> None:
        held[f"{Q}.input_scale"] = torch.ones(1)

    folder = copied("compressed-tensors", "fp8-dynamic", change)
    with pytest.raises(CheckpointError, match=f"no parameter and no skip rule knows them:\n.*{Q}.input_scale"):
        graphsrt.compile(folder, ranks="simulated", backend="eager")


def test_other_input_scales_are_not_merged(copied: Callable[..., Path]) -> None:
    """q rounds its input by another scale than k and v: it stays by itself, and says why."""
    folder = copied("compressed-tensors", "fp8", _set(f"{Q}.input_scale", lambda s: s * 2))
    traced = graphsrt.trace(folder)
    (report,) = [r for r in traced.program().history if r.name == "merge_qkv"]
    assert report.fired == 1 and "round their input differently" in report.near_misses[0].reason
    assert len(traced.program().calls(ops.fp8_linear)) == 4 + 6


# -- configs -----------------------------------------------------------------------------------------------------------


def _group(weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {"targets": ["Linear"], "weights": number | weights, "input_activations": inputs and number | inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group | more}}


CHANNEL, TOKEN = {"strategy": "channel"}, {"strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    "config, words",
    [
        ({"quant_method": "awq", "bits": 4}, "quantization method awq is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt with quant_algo NVFP4"),
        ({"quantization": {"quant_algo": "FP8"}, "quant_method": "modelopt_x"}, "method modelopt_x"),
        (
            _group({"num_bits": 4, "type": "int", "strategy": "group"}, None, format="pack-quantized"),
            r"with int4 weights \(pack-quantized\)",
        ),
        (_group({"strategy": "group"}, TOKEN), "scales of weights by group"),
        (_group(CHANNEL, {"strategy": "tensor", "dynamic": True}), "dynamic scales of inputs by tensor"),
        (_group(CHANNEL, {"num_bits": 8, "type": "int"} | TOKEN), "int8 inputs"),
        (_group(CHANNEL, TOKEN, output_activations={"num_bits": 8}), "quantised outputs"),
        (_group({"strategy": "block", "block_structure": [64, 128]}, TOKEN), r"blocks of \[64, 128\]"),
        (_group(CHANNEL, TOKEN) | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme int8"),
        (_group(CHANNEL, TOKEN) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity format sparse-24"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "numbers of format e5m2"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}, "rounded to ue8m0"),
        ({"quant_method": "fp8", "activation_scheme": "block"}, "activation_scheme block"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(plain: Path, tmp_path: Path, config: dict, words: str) -> None:
    """Before any weight is read: the folder has none."""
    text = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(CompileError, match=words):
        resolve(tmp_path)


@pytest.mark.parametrize(
    "config, scheme, kv_cache",
    [
        (_group({"strategy": "tensor"}, {"strategy": "tensor"}), LinearScheme("tensor", "static"), False),
        (_group(CHANNEL, TOKEN), LinearScheme("row", "token"), False),
        (_group(CHANNEL, None), LinearScheme("row", "plain"), False),
        (_group({"strategy": "block", "block_structure": "128x128"}, {"strategy": "group", "group_size": 128,
                "dynamic": True}), LinearScheme("block", "block"), False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
         LinearScheme("tensor", "static"), True),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
         LinearScheme("block", "block"), False),
        ({"quant_method": "fp8", "activation_scheme": "static"}, LinearScheme("tensor", "static"), False),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 9.5}, LinearScheme("row", "token", largest=9.5), False),
    ],
)  # fmt: skip
def test_producers_say_the_same_in_their_own_words(config: dict, scheme: LinearScheme, kv_cache: bool) -> None:
    found = read_quantization(LlamaConfig(quantization_config=config))
    assert found is not None
    assert found.scheme_of("model.layers.0.mlp.up_proj") == scheme and found.kv_cache == kv_cache
    if config["quant_method"] in ("fp8", "fbgemm_fp8"):
        assert found.scheme_of("lm_head") is None, "plain unless the config says otherwise"


def test_a_file_of_modelopt_beside_the_config(written: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(written("modelopt", "fp8"), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    quant = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quant}))
    source = resolve(folder)
    assert source.quantization is not None and source.quantization.kv_cache
    assert source.stored is not None and len(source.stored) == 14


@pytest.mark.parametrize(
    "ignore, style, module, plain",
    [
        ("lm_head", "exact", "lm_head", True),
        ("model.layers.1", "exact", "model.layers.1.mlp.up_proj", False),
        ("re:.*mlp.*", "exact", "model.layers.1.mlp.up_proj", True),
        ("re:.*gate$", "exact", "model.layers.1.mlp.gate_proj", False),
        ("Linear", "exact", "model.layers.1.mlp.up_proj", True),
        ("model.layers.0.self_attn*", "glob", "model.layers.0.self_attn.o_proj", True),
        ("model.layers.1", "path", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "path", "model.layers.10.mlp.up_proj", False),
        ("o_proj", "path", "model.layers.1.self_attn.o_proj", True),
        ("model.layers.0.self_attn.qkv_proj", "exact", "model.layers.0.self_attn.k_proj", True),  # the merged name
        ("re:.*gate_up_proj", "exact", "model.layers.0.mlp.up_proj", True),
        ("re:.*(q|k|v)_proj", "exact", "model.layers.0.self_attn.qkv_proj", True),  # the parts, of one matrix
    ],
)
def test_ignore_lists(ignore: str, style: Any, module: str, plain: bool) -> None:
    everything = ((Pattern("re:.*", "exact"),), LinearScheme("row", "token"))
    found = Quantization("test", (everything,), (Pattern(ignore, style),)).scheme_of(module)
    assert (found is None) == plain


def test_a_part_of_one_matrix_is_on_the_ignore_list() -> None:
    everything = ((Pattern("re:.*", "exact"),), LinearScheme("row", "token"))
    found = Quantization("test", (everything,), (Pattern("re:.*q_proj", "exact"),))
    assert found.scheme_of("x.q_proj") is None and found.scheme_of("x.k_proj") is not None
    found = Quantization("test", (everything,), (Pattern("x.q_proj", "exact"),))
    with pytest.raises(CompileError, match=r"x\.qkv_proj is one matrix, and only a part of it is on the ignore list"):
        found.scheme_of("x.qkv_proj")


def test_a_config_without_weights() -> None:
    """The program of a config is that of its checkpoint, and every stage of its miniature is right at tp 3."""
    block = writers.LAYOUTS["fp8"].config(writers.SCHEMES["fp8-block"], ["lm_head"], False)
    config = tiny.config("llama", 9, 3, layers=1)
    config.quantization_config = block
    stages = run_phases(small_program(config, 3), PIPELINE).everything()
    for some in (stages, [stages[0], stages[-1]]):  # the last alone is compared with what was rounded as well
        report = verify_stages(some)
        assert report.ok, report
    traced = graphsrt.trace(config, tp=3)
    assert len(traced.program().calls(ops.fp8_linear)) == 4
    assert config.quantization_config == block, "the caller's config is left as it is"


# -- the command -------------------------------------------------------------------------------------------------------


def test_command(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    command = ["quantize", str(plain), "--out", str(target), "--scheme", "fp8-dynamic", "--ignore", "re:.*down_proj"]
    assert main(command) == 0
    assert str(target) in capsys.readouterr().out
    held = load_file(target / "model.safetensors")
    assert held["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert held["model.layers.0.mlp.down_proj.weight"].dtype == torch.float32
    assert resolve(target).quantization is not None
    assert main(command) == 1 and "is not empty" in capsys.readouterr().err
    assert main(["quantize", str(target), "--out", str(tmp_path / "again")]) == 1
    assert "cannot be quantised" in capsys.readouterr().err
    assert main([*command[:5], "int4"]) == 1 and "no such scheme" in capsys.readouterr().err


def test_shards(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of several files, each with scales beside their numbers, is read as one file is."""
    monkeypatch.setattr("graphsrt.quantize.SHARD_BYTES", 20_000)
    several = quantize(plain, tmp_path / "several", "fp8-dynamic")
    assert len(list(several.glob("model-*-of-*.safetensors"))) > 2
    index = json.loads((several / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[f"{Q}.weight"] == index[f"{Q}.weight_scale"]
    source = resolve(several)
    assert source.stored is not None and len(source.stored) == 14
