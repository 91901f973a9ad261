"""A second start gives what the first one gave, without tracing; whatever a program depends on makes another key."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import graphsrt
from graphsrt import api, program_cache
from graphsrt.lowering.decompose import decompose
from graphsrt.lowering.regions import cut, distinct_regions
from graphsrt.models.smollm2 import model_folder
from graphsrt.models.tokenizer import LateTokenizer, inner_text, load_tokenizer
from graphsrt.printer import print_program
from graphsrt.runtime.phases import Phases
from tests.support import captures, tiny

PARAMS = graphsrt.SamplingParams(max_new_tokens=5, temperature=0.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with a tokenizer, and an empty cache of programs."""
    monkeypatch.setenv("GRAPHSRT_CACHE", str(tmp_path / "cache"))
    made = tmp_path / "model"
    tokenizer = tiny.tokenizer()
    tiny.model("llama", layers=1, vocab_size=len(tokenizer), eos_token_id=5).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def start(folder: Path, **options: Any) -> graphsrt.CompiledModel:
    return graphsrt.compile(folder, **{"backend": "eager", "dtype": torch.float64, **options})


def place(folder: Path, **options: Any) -> Path:
    """Where ``compile(folder, **options)`` keeps its programs."""
    with patch.object(program_cache, "find", side_effect=_Found) as asked, pytest.raises(_Found):
        start(folder, **options)
    return asked.call_args.args[0]


class _Found(Exception):
    pass


def plain(model: graphsrt.CompiledModel, **which: Any) -> str:
    """A program's text without the times in its history."""
    return print_program(model.program(**which), history=False)


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"tp": 2, "ranks": "simulated"}, {"capture_hidden": [-1]}], ids=str)
def test_warm_is_as_cold(folder: Path, options: dict[str, Any]) -> None:
    ids = tiny.tokens(7)
    with start(folder, **options) as cold:
        texts = [str(cold.program()), str(cold.program(phase="prefill"))]
        summary, logits, said = cold.summary(), cold.logits(ids), cold.generate("one", PARAMS)[0]
        earlier = [plain(cold, after="normalize"), cold.diff("merge_qkv"), *cold.stages.names]
        recipes = [str(weight.recipe) for weight in cold.stages.after("merge_qkv").weights.values()]
    with patch("graphsrt.capture.capture", side_effect=AssertionError("traced")), start(folder, **options) as warm:
        assert [str(warm.program()), str(warm.program(phase="prefill"))] == texts
        assert warm.summary() == summary
        assert torch.equal(warm.logits(ids), logits)
        again = warm.generate("one", PARAMS)[0]
        assert (again.text, again.token_ids) == (said.text, said.token_ids)
        with pytest.raises(ValueError, match="no such phase"):
            warm.program(phase="both")
        with pytest.raises(AssertionError, match="traced"):
            warm.program(after="normalize")
    assert [plain(warm, after="normalize"), warm.diff("merge_qkv"), *warm.stages.names] == earlier
    assert [str(weight.recipe) for weight in warm.stages.after("merge_qkv").weights.values()] == recipes
    assert warm.source.context_length == tiny.CONTEXT


FAMILIES = ["llama", "gemma2", "phi3", "olmo2", "mixtral", "gpt_neox"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_run_the_same_regions(family: str, tp: int) -> None:
    """Shapes and strides that are read from text are those that were inferred: the regions compiled are the same."""
    phases = Phases(captures.traced(family, tp=tp).program())
    (read,) = Phases.from_texts(phases.texts("cpu"), "here").all()
    wanted = distinct_regions(cut(decompose(phases.decode, "cpu")))
    assert [region.text for region in distinct_regions(cut(read))] == [region.text for region in wanted]
    with pytest.raises(graphsrt.CompileError, match="cannot be changed"):
        read.infer()


# -- the key -----------------------------------------------------------------------------------------------------------


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def touch_weights(folder: Path) -> None:
    """The same header with another tensor in it: only the file's time tells."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    "change", [edit("config.json", rms_norm_eps=0.5), edit("generation_config.json", eos_token_id=6), touch_weights]
)
def test_another_model_is_another_key(folder: Path, change: Callable[[Path], None]) -> None:
    before = place(folder)
    assert place(folder) == before
    change(folder)
    assert place(folder) != before


OPTIONS: list[dict[str, Any]] = [
    {"tp": 2}, {"dtype": "bf16"}, {"kv_dtype": "float32"}, {"without": ["merge_qkv"]}, {"stop_after": "fuse_silu_mul"},
    {"experts": "ep"}, {"strict": True}, {"context_length": 32}, {"capture_hidden": [0]}, {"input_embeds": True},
    {"max_tokens_per_step": 100},
]  # fmt: skip


def test_another_option_is_another_key(folder: Path) -> None:
    found = [place(folder, **options) for options in [{}, *OPTIONS]]
    assert len(set(found)) == len(found)


def test_every_option_of_trace_is_in_the_key(folder: Path) -> None:
    with patch.object(program_cache, "place_of", side_effect=_Found) as asked, pytest.raises(_Found):
        start(folder)
    assert set(asked.call_args.args[1]) == set(inspect.signature(api.trace).parameters) - {"model", "limits"}


def test_operators_that_were_defined_do_not_matter(folder: Path) -> None:
    before = place(folder)
    assert importlib.import_module("examples.squared_relu")
    assert "GRAPHSRT_OPERATORS" in os.environ  # for the processes that this one starts
    assert place(folder) == before


def test_another_source_is_another_key(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = place(folder)
    package = tmp_path / "package"
    package.mkdir()
    (package / "passes.py").write_text("x = 1")
    first = program_cache._source_hash(package)
    (package / "passes.py").write_text("x = 2")
    assert program_cache._source_hash(package) != first
    monkeypatch.setattr(program_cache, "_own_source", lambda: first)
    assert place(folder) != before


def test_an_installed_pass_is_in_the_key(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = place(folder)
    (tmp_path / "added_pass.py").write_text("def added(program): return 0")
    (info := tmp_path / "added-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[graphsrt.passes]\nadded = added_pass:added\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = place(folder)
    (tmp_path / "added_pass.py").write_text("def added(program): return 1")
    assert len({before, installed, place(folder)}) == 3
    assert "added_pass" not in sys.modules


@pytest.mark.parametrize(
    "options",
    [{"passes": graphsrt.PIPELINE}, {"dump": "dump"}, {"allow_pickle": True}],
    ids=lambda given: next(iter(given)),
)
def test_not_kept(folder: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start(folder, **options).close()
    assert not (tmp_path / "cache" / "programs").exists()


def test_a_folder_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(graphsrt.CheckpointError, match="not a model folder"):
        graphsrt.compile(tmp_path)


# -- entries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data.replace(b"eps=", b"epz=")])
def test_damaged(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    start(folder).close()
    found = place(folder)
    entry = found / "entry"
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    with pytest.warns(UserWarning, match="is damaged: the model is traced again"):
        start(folder).close()
    again = program_cache.find(found)
    assert again is not None and again.running[0].text.count("eps=") == whole.count(b"eps=") // 2
    assert [file.name for file in found.iterdir()] == ["entry"]


def test_a_full_disk_is_a_warning(folder: Path) -> None:
    with patch("os.replace", side_effect=OSError("no space left")), pytest.warns(UserWarning, match="cannot be kept"):
        start(folder).close()


# -- what is imported --------------------------------------------------------------------------------------------------

WARM = """
import sys
import graphsrt
with graphsrt.compile(sys.argv[1], backend=sys.argv[2], dtype="float32", tp=int(sys.argv[3])) as model:
    said = model.generate([[3, 4, 5], "one"], graphsrt.SamplingParams(max_new_tokens=3, temperature=0.0))
    print([result.text for result in said], model.summary().count("fuse_add_rms_norm"))
print(sorted(sys.modules.keys() & set(sys.argv[4:])))
"""
NEVER = [
    "transformers", "transformers.models.llama.modeling_llama", "graphsrt.capture", "graphsrt.passes",
    "graphsrt.models.source", "torch._inductor", "torch._inductor.compile_fx", "torch._dynamo", "sympy",
]  # fmt: skip


@pytest.mark.parametrize("backend, tp", [("eager", 1), ("eager", 2), ("inductor", 1)])
def test_imports(folder: Path, backend: str, tp: int) -> None:
    """torch by itself imports none of these: a warm start has none of them, text in and text out included."""

    def run() -> list[str]:
        command = [sys.executable, "-c", WARM, str(folder), backend, str(tp), *NEVER]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    cold, warm = run(), run()
    assert warm[0] == cold[0] and warm[1] == "[]" and "graphsrt.capture" in cold[1]


# -- tokenizers --------------------------------------------------------------------------------------------------------

TEXTS = ["", "Hello", " a  b\n\n", "<|im_start|>user\nHi<|im_end|>", "naïve 中文 🙂", "don't , stop !", "x" * 500]


@pytest.mark.parametrize("of", ["smollm2", "tiny"])
def test_inner_tokenizer_answers_as_the_whole(of: str, tmp_path: Path) -> None:
    whole = load_tokenizer(of, model_folder()) if of == "smollm2" else tiny.tokenizer()
    late = LateTokenizer(inner_text(whole), lambda: whole)
    assert late._inner is not None
    for text in TEXTS:
        ids = whole(text)["input_ids"]
        assert late(text)["input_ids"] == ids
        for start_ in range(0, len(ids), 3):  # also from within a character
            for special in (True, False):
                cut_ids = ids[start_ : start_ + 5]
                assert late.decode(cut_ids, skip_special_tokens=special) == whole.decode(
                    cut_ids, skip_special_tokens=special
                )
    assert late.whole is whole


def test_a_tokenizer_that_does_more_is_used_whole() -> None:
    class Own(type(tiny.tokenizer())):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs).upper()

    inner = tiny.tokenizer()
    own = Own(tokenizer_object=inner.backend_tokenizer, eos_token="<eos>")
    assert inner_text(own) is None
    late = LateTokenizer(inner_text(own), lambda: own)
    assert late.decode(late("one")["input_ids"], skip_special_tokens=True) == "ONE"
