"""The registry: who says which class is captured, in which order, and what one broken entry breaks."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BloomConfig,
    BloomForCausalLM,
    BltConfig,
    CpmAntConfig,
    DogeConfig,
    GitConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    T5Config,
)

import graphsrt
from graphsrt.errors import CompileError
from graphsrt.models import registry
from graphsrt.models.bloom import Bloom
from graphsrt.models.llama import Llama
from graphsrt.models.source import resolve
from tests.support import captures, references, tiny

SIZES: dict[str, Any] = {"vocab_size": 67, "hidden_size": 48, "n_layer": 1, "n_head": 4}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of somebody else with two models, one of them broken."""
    folder = tmp_path / "others_models"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        'MODELS = {"BloomForCausalLM": "others_models.good:Mine", "LlamaForCausalLM": "others_models.bad:Mine",\n'
        '          "MptForCausalLM": "others_models.good:number"}\n'
    )
    (folder / "good.py").write_text(
        "from graphsrt.models.bloom import Bloom\nclass Mine(Bloom):\n    pass\nnumber = 3\n"
    )
    (folder / "bad.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GRAPHSRT_EXTERNAL_MODELS", "others_models")
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "others_models"]:
        del sys.modules[name]


def captured(config: Any) -> str | None:
    kind = resolve(config).reference
    return None if kind is None else f"{kind.__module__}:{kind.__name__}"


def test_transformers_class_is_the_default() -> None:
    assert registry.lookup(GPT2Config()).__name__ == "GPT2LMHeadModel"
    assert registry.lookup(GPTNeoXConfig()).__name__ == "GPTNeoXForCausalLM"
    assert captured(GPT2Config()) is None and captured(LlamaConfig()) is None
    with pytest.raises(CompileError, match="encoder-decoder"):
        registry.lookup(T5Config())
    with pytest.raises(CompileError, match="both directions"):
        registry.lookup(BertConfig())


def test_lazy_and_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference is imported when it is asked for; one can be left out, and one to read be asked for."""
    monkeypatch.delitem(sys.modules, "graphsrt.models.mpt", raising=False)
    assert captured(BloomConfig(**SIZES)) == "graphsrt.models.bloom:Bloom"
    assert captured(BloomConfig(**SIZES, architectures=["BloomModel"])) == "graphsrt.models.bloom:Bloom"
    assert "graphsrt.models.mpt" not in sys.modules
    monkeypatch.setenv("GRAPHSRT_DISABLED_ARCHS", "MptForCausalLM, BloomForCausalLM")
    assert captured(BloomConfig(**SIZES)) is None
    monkeypatch.setenv("GRAPHSRT_REFERENCE_ARCHS", "LlamaForCausalLM")
    assert captured(LlamaConfig()) == "graphsrt.models.llama:Llama"
    with pytest.raises(CompileError, match="does not go through"):
        graphsrt.trace(BloomConfig(**SIZES), context_length=64)


def test_a_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes before our own; what is broken in it breaks only itself, and can be left out."""
    assert captured(BloomConfig(**SIZES)) == "others_models.good:Mine"
    assert captured(GPT2Config()) is None
    with pytest.raises(CompileError, match="registered for LlamaForCausalLM cannot be loaded") as caught:
        captured(LlamaConfig())
    message = str(caught.value)
    assert "others_models.bad:Mine in MODELS of others_models (GRAPHSRT_EXTERNAL_MODELS)" in message
    assert "ModuleNotFoundError" in message and "GRAPHSRT_DISABLED_ARCHS=LlamaForCausalLM" in message
    with pytest.raises(CompileError, match=r"got: +3"):
        registry.reference("MptForCausalLM")
    monkeypatch.setenv("GRAPHSRT_DISABLED_ARCHS", "LlamaForCausalLM")
    assert captured(LlamaConfig()) is None
    monkeypatch.setenv("GRAPHSRT_EXTERNAL_MODELS", "others_models,no_such_package")
    assert captured(BloomConfig(**SIZES)) == "others_models.good:Mine"
    with pytest.raises(CompileError, match="models of no_such_package cannot be loaded"):
        captured(GPT2Config())


def test_an_installed_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHSRT_EXTERNAL_MODELS")
    known = {
        "BloomForCausalLM": EntryPoint("BloomForCausalLM", "others_models.good:Mine", registry.GROUP),
        "LlamaForCausalLM": EntryPoint("LlamaForCausalLM", "others_models.bad:Mine", registry.GROUP),
    }
    monkeypatch.setattr(registry, "entry_points", lambda group, name: [known[name]] if name in known else [])
    assert captured(BloomConfig(**SIZES)) == "others_models.good:Mine"
    with pytest.raises(CompileError, match=r"others_models\.bad:Mine in the entry points graphsrt\.models"):
        captured(LlamaConfig())
    monkeypatch.setenv("GRAPHSRT_DISABLE_PLUGINS", "1")
    assert captured(BloomConfig(**SIZES)) == "graphsrt.models.bloom:Bloom" and captured(LlamaConfig()) is None


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("LlamaForCausalLM", Llama)
    assert captured(LlamaConfig()) == "graphsrt.models.llama:Llama"
    registry.register("BertLMHeadModel", "graphsrt.models.llama:Llama")  # whoever registers a class answers for it
    assert registry.lookup(BertConfig(architectures=["BertLMHeadModel"])).__name__ == "BertLMHeadModel"


class Louder(BloomForCausalLM):
    """A user's own class, of which a reference model knows nothing."""


def test_a_model_in_memory() -> None:
    """Replaced by the reference only while it is transformers' own throughout."""
    net = BloomForCausalLM(BloomConfig(**SIZES))
    assert resolve(net).reference is Bloom
    assert resolve(Louder(net.config)).reference is None
    net.transformer.h[0].mlp = nn.Sequential(nn.Identity())
    assert resolve(net).reference is Bloom  # a module of torch: the parameters tell
    with pytest.raises(CompileError, match="parameters of BloomForCausalLM and its reference model differ"):
        graphsrt.trace(net, context_length=64)

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return 2 * x + residual

    net.transformer.h[0].mlp = Doubled()
    assert resolve(net).reference is None


def test_a_plain_module_in_memory() -> None:
    """A user's own module (tokens [T], positions [T]) -> logits, with a config, is compiled as it is."""
    config = references.config("llama")
    torch.manual_seed(0)
    net = Llama(config).double().eval()
    tiny.randomize(net)
    ids = tiny.tokens(9)
    with torch.no_grad():
        want = net(torch.tensor(ids), torch.arange(9))
    with captures.shared(), graphsrt.compile(net, tp=4, ranks="simulated", context_length=64) as model:
        # twice the same formulas in float64; the rope tables' angles are float32 in both
        assert tiny.worst(model.logits(ids), want) < 1e-6
    with pytest.raises(ValueError, match="this is no model"):
        resolve(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_what_no_program_can_honour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with the reason itself, before capture; who registers a model of it knows better."""
    for config in (GitConfig(), CpmAntConfig(), DogeConfig(), BltConfig()):
        with pytest.raises(CompileError, match=r"can compile: (it|the values)") as caught:
            resolve(config)
        assert "by the order of tokens alone" in str(caught.value)
    monkeypatch.setattr(registry, "_registered", {"DogeForCausalLM": Llama})
    assert captured(DogeConfig()) == "graphsrt.models.llama:Llama"
