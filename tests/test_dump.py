"""The dump folder: complete, never destructive, and a failing pass can be run again from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphsrt.dump import MARKER, DumpFolder, find_pass, pass_reference, pass_table, rerun, weights_text
from graphsrt.errors import CompileError
from graphsrt.passes.normalize import normalize
from graphsrt.passes.recognize_rms_norm import recognize_rms_norm
from graphsrt.printer import print_program
from graphsrt.program import Input, NearMiss, PassReport, Program, Weight, aten
from graphsrt.recipes import Ckpt

PASSES = '''
import torch
from graphsrt.errors import CompileError
from graphsrt.program import aten

def shout(program, *, axis, scale=1.0, dtype=None):
    """Fails as long as the program has a neg."""
    assert isinstance(scale, float) and dtype is torch.bfloat16
    if program.calls(aten.neg.default):
        raise CompileError(f"no neg over {axis}, please ({scale})")
    return 0
'''


def example() -> Program:
    p = Program("toy", mesh={"tp": 2})
    x = p.add_input("x", Input(("T", 4), torch.bfloat16, "tokens"))
    w = p.add_weight("w", Weight((6, 4), torch.bfloat16, Ckpt("w")))
    y = p.call(aten.clone.default, p.call(aten.linear.default, x, w, name="up"), name="copy")
    p.graph.output(p.call(aten.neg.default, y, name="neg"))
    p.infer()
    return p


def run_again(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "graphsrt.dump", str(folder)]
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, environment.pop("PYTHONPATH", "")])
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, **environment}, timeout=120
    )


def test_stages_diffs_and_tables(tmp_path):
    p = example()
    dump = DumpFolder(tmp_path / "dump")
    assert dump.stage(0, "capture", p)
    assert not dump.stage(1, "nothing", p.copy())
    captured = str(p)
    normalize(p)
    p.history = [
        PassReport("normalize", 1, None, 3, 2, 1.25, [], ["a note"]),
        PassReport("fuse", 0, 2, 2, 2, 0.5, [NearMiss("neg", "m", "has another user")]),
    ]
    assert dump.stage(2, "normalize", p)
    dump.finish(p, p.history)
    files = {f.name for f in (tmp_path / "dump").iterdir()}
    texts = {"00_capture.txt", "02_normalize.txt", "02_normalize.diff"}
    assert files == {MARKER, *texts, "weights.txt", "near_misses.txt", "summary.txt"}
    read = {name: (tmp_path / "dump" / name).read_text() for name in files}
    assert read["00_capture.txt"] == captured
    assert str(Program.from_text(read["02_normalize.txt"])) == str(p)
    assert "--- 00_capture\n+++ 02_normalize\n" in read["02_normalize.diff"]
    assert "-  copy: bf16[T, 6] = aten.clone(up)\n" in read["02_normalize.diff"]
    assert "history" not in read["02_normalize.diff"]
    assert '48  w: bf16[6, 4] = ckpt("w")' in read["weights.txt"] and "48  in all" in read["weights.txt"]
    assert read["weights.txt"] == weights_text(p)
    assert read["near_misses.txt"] == "fuse: neg (m): has another user\n"
    assert "48 weight bytes per rank" in read["summary.txt"] and pass_table(p.history) in read["summary.txt"]
    assert "    a note\n" in read["summary.txt"]


def test_a_second_dump_clears_the_first(tmp_path):
    dump = DumpFolder(tmp_path)
    dump.stage(0, "capture", example())
    dump.failure("normalize", {}, example(), CompileError("x"))
    DumpFolder(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == [MARKER]


def test_a_folder_with_foreign_files_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"no dump wrote; nothing was removed(.|\n)*thesis.txt"):
        DumpFolder(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.txt"]

    dump = DumpFolder(tmp_path / "dump")
    dump.stage(0, "capture", example())
    (tmp_path / "dump" / "sub").mkdir()
    (tmp_path / "dump" / "sub" / "notes.md").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.md"):
        DumpFolder(tmp_path / "dump")
    assert (tmp_path / "dump" / "00_capture.txt").exists()

    with pytest.raises(ValueError, match="is a file"):
        DumpFolder(tmp_path / "thesis.txt")


def test_a_marker_cannot_point_outside_of_its_folder(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / MARKER).write_text(f"../thesis.txt\n{tmp_path / 'thesis.txt'}\n")
    DumpFolder(folder)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_failing_pass_runs_again_in_another_process(tmp_path):
    (tmp_path / "my_passes.py").write_text(PASSES)
    dump = DumpFolder(tmp_path / "dump")
    before = example()
    error = CompileError("no neg over tp, please (0.5)")
    kwargs = {"axis": "tp", "scale": 0.5, "dtype": torch.bfloat16}
    failure = dump.failure("my_passes:shout", kwargs, before, error)
    assert (failure / "before.txt").read_text() == str(before)
    options = json.loads((failure / "options.json").read_text())
    assert options["pass"] == "my_passes:shout" and options["mesh"] == {"tp": 2} and "torch" in options["versions"]
    assert options["error"] == "CompileError: no neg over tp, please (0.5)"

    again = run_again(failure, PYTHONPATH=str(tmp_path))
    assert again.returncode == 1
    assert again.stderr.strip().splitlines() == [options["error"], "  pass:     shout"]
    lost = run_again(failure)
    assert lost.returncode == 1 and "the pass my_passes:shout cannot be found" in lost.stderr
    assert "Traceback" not in lost.stderr

    fixed = print_program(before).replace("aten.neg(", "aten.abs(")
    (failure / "before.txt").write_text(fixed)
    fine = run_again(failure, PYTHONPATH=str(tmp_path))
    assert (fine.returncode, fine.stdout) == (0, ""), fine.stderr


def test_built_in_passes_and_files_are_found_by_name(tmp_path):
    assert pass_reference(normalize) == "normalize" and find_pass("normalize") is normalize
    assert pass_reference(recognize_rms_norm) == "recognize_rms_norm"
    assert find_pass("recognize_rms_norm") is recognize_rms_norm
    script = tmp_path / "script_of_passes.py"
    script.write_text(PASSES)
    shout = find_pass(f"{script}:shout")
    assert pass_reference(shout) == f"{script}:shout"
    for lost in ("no_such_pass", "no.such.module:f", "graphsrt.dump:nothing", f"{tmp_path}/nowhere.py:f"):
        with pytest.raises(CompileError, match="cannot be found"):
            find_pass(lost)


def test_rerun_of_what_is_no_failure(tmp_path, capsys):
    from graphsrt.dump import main

    with pytest.raises(ValueError, match=r"no before.txt and no options.json"):
        rerun(tmp_path)
    assert main([]) == 2 and main(["--help"]) == 0 and main([str(tmp_path)]) == 1
    dump = DumpFolder(tmp_path / "dump")
    failure = dump.failure("normalize", {}, example(), RuntimeError("was mended since"))
    assert main([str(failure)]) == 0
    assert "-  copy:" in capsys.readouterr().out
    failure = dump.failure("normalize", {"hook": object()}, str(example()), RuntimeError("x"))
    with pytest.raises(CompileError, match="the argument hook of the pass cannot be made again"):
        rerun(failure)
