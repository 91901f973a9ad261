"""The command line, through ``main``: what it prints, where, and how it ends when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BloomConfig,
    FalconConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from graphsrt import cli, ops
from graphsrt.passes import PIPELINE
from graphsrt.passes.runner import pass_name

SPOKEN = ["what", "is", "the", "capital", "of", "france", "user", "system", "say"]
WORDS = ["<eos>", *SPOKEN, *(f"w{i}" for i in range(38))]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}say{% endif %}"
)


class Result(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def graphsrt(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in this process."""
    for name in ("GRAPHSRT_DEBUG", "GRAPHSRT_DUMP", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: Any) -> Result:
        capfd.readouterr()
        status = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Result(status, out, err)

    return run


def config(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None,
        "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **changes})


def write_tokenizer(folder: Path, template: str | None = None) -> None:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def write_model(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(config(**changes)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint folder that a test may damage."""
    return write_model(tmp_path / "model")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder that tests only read."""
    return write_model(tmp_path_factory.mktemp("good"))


RUN = ("--backend", "eager", "-n", 4, "--no-summary", "-p", "what is the capital of france")


def fails(result: Result, *words: str, status: int = 1) -> str:
    """One message on stderr, nothing on stdout, no traceback."""
    assert result.status == status, result
    assert result.out == ""
    message = result.err.split("graphsrt: ", 1)[1]
    assert message.count("graphsrt: ") == 0
    assert "Traceback" not in result.err
    assert len(message.splitlines()) <= 8, message
    for word in words:
        assert word in message, message
    return message


# -- what it prints ---------------------------------------------------------------------------------------------------


def test_run_prints_text_and_then_the_pass_table(graphsrt: Run, good: Path) -> None:
    result = graphsrt("run", good, "--backend", "eager", "-n", 4, "-p", "what is the capital of france")
    assert result.status == 0, result.err
    text, _, table = result.out.partition("\n\n")
    assert len(text.split()) == 4 and all(word in WORDS for word in text.split())
    assert table.startswith("pass ")
    assert all(pass_name(p) in table for p in PIPELINE)
    assert "load" not in result.out


def test_several_prompts_are_printed_in_order_and_as_each_alone(graphsrt: Run, good: Path) -> None:
    one = graphsrt("run", good, *RUN[:-2], "-p", "say w3").out.strip()
    other = graphsrt("run", good, *RUN).out.strip()
    both = graphsrt("run", good, *RUN, "-p", "say w3")
    assert both.out == f"## {RUN[-1]}\n{other}\n\n## say w3\n{one}\n\n"


def test_chat_template_is_applied_unless_told_otherwise(graphsrt: Run, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "chat")
    write_tokenizer(folder, TEMPLATE)
    simulated = (*RUN[:-2], "--ranks", "simulated", "--tp", 2)
    by_template = graphsrt("run", folder, *simulated, "-p", "what", "--system", "is")
    assert by_template.status == 0, by_template.err
    written_out = graphsrt("run", folder, *simulated, "--no-chat", "-p", "system is user what say")
    plain = graphsrt("run", folder, *simulated, "--no-chat", "-p", "what")
    assert by_template.out == written_out.out != plain.out
    fails(graphsrt("run", folder, *simulated, "--no-chat", "--system", "is"), "a system message needs a chat template")


def test_ranks_in_processes_say_the_same_as_one(graphsrt: Run, good: Path) -> None:
    alone = graphsrt("run", good, *RUN)
    ranks = graphsrt("run", good, *RUN, "--tp", 2)
    assert alone.status == ranks.status == 0, ranks.err
    assert ranks.out == alone.out


def test_inspect_shows_a_config_without_weights(graphsrt: Run, tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    by_folder = graphsrt("inspect", tmp_path, "--tp", 2, "--layer", 1)
    by_file = graphsrt("inspect", tmp_path / "config.json", "--tp", 2, "--layer", 1)
    assert by_folder.status == by_file.status == 0, by_file.err
    folded = by_file.out.partition("# after")[2]
    assert folded == by_folder.out.partition("# after")[2]
    assert folded.count(" = all_reduce_add_rms_norm(") == 2
    assert "\x1b" not in by_file.out


def test_inspect_full_parses_back_and_json_holds_the_same(graphsrt: Run, good: Path) -> None:
    from graphsrt.program import Program

    shown = graphsrt("inspect", good, "--tp", 2, "--full", "--after", "shard_tensor_parallel").out
    assert str(Program.from_text(shown)) == shown
    described = json.loads(graphsrt("inspect", good, "--tp", 2, "--json").out)
    assert described["mesh"] == {"tp": 2}
    assert [report["name"] for report in described["passes"]] == [pass_name(p) for p in PIPELINE]
    final = Program.from_text(described["program"])
    assert ops.count_collectives(node.target for node in final.nodes) == (5, 0)


def test_inspect_diff_shows_one_pass(graphsrt: Run, good: Path) -> None:
    diff = graphsrt("inspect", good, "--diff", "fuse_silu_mul").out
    assert diff.startswith("--- before fuse_silu_mul\n+++ after fuse_silu_mul\n")
    assert "\n+" in diff and "silu_mul" in diff
    assert graphsrt("inspect", good, "--diff", "shard_tensor_parallel").out == "shard_tensor_parallel changed nothing\n"


def test_cache_lists_and_clears(graphsrt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSRT_CACHE", str(tmp_path))
    for kind in ("regions", "models"):
        (tmp_path / kind / "one").mkdir(parents=True)
        (tmp_path / kind / "one" / "file").write_bytes(b"x" * 1_500_000)
    (tmp_path / "mine.txt").write_text("not from here")
    assert "in all 3.0 MB" in graphsrt("cache").out
    assert "removed 1.5 MB" in graphsrt("cache", "regions", "--clear").out
    assert not (tmp_path / "regions").exists() and (tmp_path / "models").exists()
    assert graphsrt("cache", "--clear").status == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]
    assert "in all 0.0 MB" in graphsrt("cache").out
    fails(graphsrt("cache", "everything"), "models, programs, regions, kernels", status=2)


def test_help_is_quick(tmp_path: Path) -> None:
    code = "import sys; from graphsrt.cli import main; main(['--help']); main(['run', '--help'])\n"
    code += "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'too much is imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "inspect" in done.stdout and "--max-new-tokens" in done.stdout


def test_a_closed_pipe_is_no_error(good: Path) -> None:
    command = f"{sys.executable} -m graphsrt inspect {good} --full | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("program llama")
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


# -- how it ends when something is wrong ------------------------------------------------------------------------------


def test_unknown_command_is_answered_with_the_commands(graphsrt: Run) -> None:
    commands = "run, inspect, verify, explain, bisect, plan, coverage, quantize, bench, cache"
    fails(graphsrt("serv"), "'serv'", commands, status=2)
    fails(graphsrt("run", "x", "--frobnicate"), "--frobnicate", status=2)
    fails(graphsrt("run", "x", "--backend", "none"), "'inductor', 'eager'", status=2)
    fails(graphsrt("run"), "graphsrt run --help", status=2)
    fails(graphsrt("inspect", "x", "--diff", "normalize", "--full"), "--diff stands alone", status=2)
    assert graphsrt().status == 2


def test_tp_of_nothing(graphsrt: Run, good: Path) -> None:
    for command in ("run", "inspect", "verify"):
        fails(graphsrt(command, good, "--tp", 0), "tp is the number of ranks", "0")


def test_unknown_model_folder(graphsrt: Run, tmp_path: Path) -> None:
    for command in ("run", "inspect", "verify"):
        fails(graphsrt(command, tmp_path / "nowhere"), "nowhere", "no such")
    (tmp_path / "empty").mkdir()
    for command in ("run", "inspect"):
        fails(graphsrt(command, tmp_path / "empty"), "is not a model folder", "config.json")
    fails(graphsrt("inspect", tmp_path / "none.json"), "no such file")


def test_config_generates_nothing(graphsrt: Run, tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    fails(graphsrt("run", tmp_path / "config.json"), "has no weights", "graphsrt inspect")
    fails(graphsrt("run", tmp_path), str(tmp_path), "model.safetensors")


def test_prompt_longer_than_the_context(graphsrt: Run, good: Path) -> None:
    fails(graphsrt("run", good, *RUN[:-2], "-p", "w1 " * 70), "70", "64")
    fails(graphsrt("run", good, *RUN, "--context-length", 5), "context")


def test_pickle_checkpoint_is_refused_unless_asked_for(graphsrt: Run, model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    message = fails(graphsrt("run", model, *RUN), "pickle", "safetensors")
    assert "allow" in message
    assert graphsrt("run", model, *RUN, "--allow-pickle").status == 0


def test_truncated_safetensors(graphsrt: Run, model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    for length in (len(whole) - 100, 200, 3, 0):
        (model / "model.safetensors").write_bytes(whole[:length])
        fails(graphsrt("run", model, *RUN), "model.safetensors")


def test_missing_and_extra_tensors_are_named(graphsrt: Run, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.layers.1.mlp.extra.weight"] = lost
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    fails(graphsrt("run", model, *RUN), "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.extra.weight")


def test_unknown_rope(graphsrt: Run, model: Path) -> None:
    stored = json.loads((model / "config.json").read_text())
    stored.pop("rope_parameters", None)
    stored["rope_scaling"] = {"rope_type": "spiral", "factor": 2.0}
    (model / "config.json").write_text(json.dumps(stored))
    for command in ("run", "inspect", "verify"):
        fails(graphsrt(command, model), "spiral")


@pytest.mark.parametrize(
    "other",
    [
        BloomConfig(vocab_size=48, hidden_size=32, n_layer=2, n_head=4, seq_length=64),
        FalconConfig(vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False),
    ],
    ids=lambda c: c.model_type,
)
def test_attention_outside_the_interface(
    graphsrt: Run, tmp_path: Path, other: PretrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without their reference models, as an architecture is met that has none."""
    monkeypatch.setenv("GRAPHSRT_DISABLED_ARCHS", "BloomForCausalLM,FalconForCausalLM")
    other.save_pretrained(tmp_path)
    message = fails(graphsrt("inspect", tmp_path, "--context-length", 64), "attention")
    assert type(other).__name__.removesuffix("Config") in message


def test_unknown_architecture(graphsrt: Run, model: Path) -> None:
    stored = json.loads((model / "config.json").read_text()) | {"model_type": "nothing", "architectures": ["NothingLM"]}
    (model / "config.json").write_text(json.dumps(stored))
    for command in ("run", "inspect"):
        fails(graphsrt(command, model), "unknown architecture", "NothingLM")
    (model / "config.json").write_text("{")
    fails(graphsrt("run", model), "config.json cannot be read")


def test_options_out_of_range(graphsrt: Run, good: Path) -> None:
    fails(graphsrt("run", good, "-n", 0), "max_new_tokens")
    fails(graphsrt("run", good, "--temperature", -1), "temperature")
    fails(graphsrt("run", good, "--top-p", 0), "top_p")
    fails(graphsrt("run", good, "--page-size", 0), "page_size")
    fails(graphsrt("run", good, "--without", "fuse_all"), "'fuse_all'", "fuse_silu_mul")
    fails(graphsrt("inspect", good, "--after", "fuse_all"), "'fuse_all'", "fuse_silu_mul")
    fails(graphsrt("inspect", good, "--layer", 2), "layer 2")
    fails(graphsrt("inspect", good, "--rank", 1), "rank 1")
    fails(graphsrt("run", good, *RUN, "--without", "page_attention"), "page_attention")


def test_dump_folder_with_other_files_is_left_alone(graphsrt: Run, good: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    fails(graphsrt("inspect", good, "--dump", tmp_path), "thesis.txt", "nothing was removed")
    assert (tmp_path / "thesis.txt").exists()
    assert graphsrt("inspect", good, "--dump", tmp_path / "new").status == 0
    assert (tmp_path / "new" / "weights.txt").exists()


def test_debug_shows_the_traceback(graphsrt: Run, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = graphsrt("run", good, "--tp", 0, "--debug")
    assert shown.status == 1 and "Traceback" in shown.err and "tp is the number of ranks" in shown.err
    monkeypatch.setenv("GRAPHSRT_DEBUG", "1")
    assert "Traceback" in graphsrt("run", good, "--tp", 0).err


def test_verify_reports_every_stage(graphsrt: Run, tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    result = graphsrt("verify", tmp_path, "--tp", 2)
    assert result.status == 0, result
    assert all(pass_name(p) in result.out for p in PIPELINE)


def test_torchrun(good: Path) -> None:
    """Rank 0 alone prints, and the text is that of one process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "graphsrt", "run", str(good), *map(str, RUN)]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command[1:]]
    both = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=environment)
    assert both.returncode == 0, both.stderr
    assert both.stdout == alone.stdout != ""
