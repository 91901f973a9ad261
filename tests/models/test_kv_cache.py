"""An FP8 cache: scales from the checkpoint or a file, what is attended to, and every fault by its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.models.llama.modeling_llama import eager_attention_forward

import graphsrt
from graphsrt.errors import CheckpointError, CompileError
from graphsrt.lowering.kernels.radix_attention import kv_write, radix_attention
from graphsrt.models.source import resolve
from graphsrt.quantize import quantize
from tests.support import latent, tiny
from tests.support.captures import shared

FP8 = torch.float8_e4m3fn
PROMPTS = [tiny.tokens(19, seed) for seed in (5, 6)]


@pytest.fixture(autouse=True)
def one_capture() -> Iterator[None]:
    with shared():
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    tiny.build("llama").float().save_pretrained(folder)
    return folder


def file_of(path: Path, layers: int = 2) -> tuple[Path, dict[int, tuple[float, float]]]:
    scales = {layer: (0.011 + 0.004 * layer, 0.007 + 0.002 * layer) for layer in range(layers)}
    path.write_text(json.dumps({str(layer): list(pair) for layer, pair in scales.items()}))
    return path, scales


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(FP8).to(x.dtype) * scale


def reference(scales: dict[int, tuple[float, float]], ids: list[int]) -> torch.Tensor:
    """transformers' own attention to keys and values that were rounded."""

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **how: Any) -> Any:
        ks, vs = (float(torch.tensor(scale)) for scale in scales[module.layer_idx])  # as float32 holds them
        return eager_attention_forward(module, q, rounded(k, ks), rounded(v, vs), mask, **how)

    AttentionInterface.register("rounded", attend)
    net: LlamaForCausalLM = tiny.build("llama").float().double()  # type: ignore[assignment]  (weights as stored)
    net.config._attn_implementation = "rounded"
    length = len(ids)
    mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        return net(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_and_chunks(plain: Path, tmp_path: Path, tp: int) -> None:
    """A prompt in chunks and token by token reads what earlier steps stored; a file gives the scales."""
    file, scales = file_of(tmp_path / "scales.json")
    ids = tiny.tokens(17, seed=4)
    how: dict[str, Any] = {"tp": tp, "ranks": "simulated", "backend": "eager", "dtype": torch.float64}
    with graphsrt.compile(plain, kv_dtype="fp8", kv_scales=file, max_tokens_per_step=5, **how) as model:
        program = model.program()
        assert program.inputs["kv_pool"].dtype == FP8
        got = model.logits(ids)
    want = reference(scales, ids)
    # transformers computes norms and rope in float32: a number near a border of FP8 may fall to its other side
    assert tiny.worst(got, want) <= 1e-5
    assert tiny.worst(tiny.eager_logits(tiny.build("llama"), ids), want) > 1e-3, (
        "rounding would show if it were not done"
    )


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_scales_of_the_checkpoint(plain: Path, tmp_path: Path, layout: str) -> None:
    """Each producer's names; without an FP8 cache they are left aside."""
    folder = quantize(plain, tmp_path / "out", "fp8", layout=layout, kv_cache=True, prompts=PROMPTS)
    held = load_file(folder / "model.safetensors")
    names = [name for name in held if name.endswith(("k_scale", "v_scale"))]
    assert len(names) == 4
    how: dict[str, Any] = {"ranks": "simulated", "backend": "eager"}
    with graphsrt.compile(folder, kv_dtype=FP8, **how) as model:
        loaded = [w for n, w in model.program().weights.items() if n == "layers.1.k_scale"]
        assert len(loaded) == 1 and torch.isfinite(model.logits(PROMPTS[0])).all()
    with graphsrt.compile(folder, **how) as model:
        assert model.program().inputs["kv_pool"].dtype == torch.float32

    def without(change: Any) -> Path:
        copy = dict(held)
        change(copy)
        save_file(copy, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    with pytest.raises(CheckpointError, match=rf"{names[0]} is 0.0, expected a positive number"):
        resolve(without(lambda copy: copy.update({names[0]: copy[names[0]] * 0})))
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint.*\n.*k_scale|v_scale"):
        graphsrt.compile(without(lambda copy: copy.pop(names[0])), kv_dtype="fp8", **how)


@pytest.mark.parametrize(
    "text, words",
    [
        ({"0": [0.1, 0.2]}, "none for layers 1"),
        ({"0": [0.1, 0.2], "1": [0.1, 0.0]}, r"layer 1: \(0.1, 0.0\)"),
        ({"0": [0.1, 0.2], "1": [0.1]}, "cannot be read"),
        ({"kv_cache": {"scaling_factor": {"0": {"0": 1.0}, "1": {"0": 1.0}}}}, "scales of 2 ranks"),
    ],
)
def test_files_that_do_not_fit(plain: Path, tmp_path: Path, text: dict, words: str) -> None:
    (tmp_path / "scales.json").write_text(json.dumps(text))
    with pytest.raises(CheckpointError, match=words):
        graphsrt.trace(plain, kv_dtype="fp8", kv_scales=tmp_path / "scales.json")


def test_a_file_of_another_engine(plain: Path, tmp_path: Path) -> None:
    held = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.25, "1": 0.5}}}}
    (tmp_path / "scales.json").write_text(json.dumps(held))
    program = graphsrt.trace(plain, kv_dtype="fp8", kv_scales=tmp_path / "scales.json").program()
    assert "layers.1.v_scale: f32[1, 1] = const([1, 1], [0.5])" in str(program)


def test_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="needs scales of keys and values, and the checkpoint has none"):
        graphsrt.trace(plain, kv_dtype="fp8")
    with pytest.raises(ValueError, match="scales of keys and values are for an FP8 cache"):
        graphsrt.trace(plain, kv_scales=tmp_path / "scales.json")


def test_latents(tmp_path: Path) -> None:
    config = latent.config("deepseek_v3")
    file, _ = file_of(tmp_path / "scales.json", config.num_hidden_layers)
    with pytest.raises(CompileError, match="latents are not cached in FP8"):
        graphsrt.trace(config, kv_dtype="fp8", kv_scales=file)


def test_operator() -> None:
    """What is written, and that scales and pool belong together."""
    pool = torch.zeros(1, 2, 5, 1, 4).to(FP8)
    k, v = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(0)).bfloat16().chunk(2)
    scale = torch.tensor([[0.01]])
    slot = torch.tensor([3])
    kv_write(k, v, pool, slot, 0, k_scale=scale, v_scale=2 * scale)
    assert torch.equal(pool[0, 0, 3].float(), (k[0].float() / 0.01).clamp(-448, 448).to(FP8).float())
    assert torch.equal(pool[0, 1, 3].float(), (v[0].float() / 0.02).clamp(-448, 448).to(FP8).float())
    rest = (torch.tensor([[3]], dtype=torch.int32), torch.tensor([0]), torch.tensor([1]), torch.tensor([0, 1]), slot)
    out = radix_attention(k, None, None, pool, *rest, layer_id=0, scale=0.5, k_scale=scale, v_scale=2 * scale)
    assert torch.equal(out, (pool[0, 1, 3].float() * 0.02).bfloat16()[None])  # one token sees itself alone
    with pytest.raises(ValueError, match="do not go together"):
        radix_attention(k, None, None, pool, *rest, layer_id=0, scale=0.5)
    with pytest.raises(ValueError, match="do not go together"):
        kv_write(k, v, pool.float(), slot, 0, k_scale=scale, v_scale=scale)
