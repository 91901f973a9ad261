"""One model over two machines: two network namespaces that a virtual cable connects, each with an agent of its own.

Where namespaces may not be made, two agents on one machine: they differ as nodes, not in addresses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphsrt.runtime.network import interface_towards
from tests.support import tiny

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = (f"gsrt{os.getpid()}a", f"gsrt{os.getpid()}b")
ADDRESSES = ("10.203.77.1", "10.203.77.2")
PORT = 29541


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def machines() -> Iterator[list[tuple[list[str], str]]]:
    """For each: the words that run a command on it, and its network interface."""
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", NAMES[0]], capture_output=True).returncode:
        yield [([], "lo"), ([], "lo")]
        return
    try:
        ip("netns", "add", NAMES[1])
        ip("link", "add", "cable0", "netns", NAMES[0], "type", "veth", "peer", "name", "cable1", "netns", NAMES[1])
        for number, (name, address) in enumerate(zip(NAMES, ADDRESSES)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"cable{number}")
            ip("-n", name, "link", "set", f"cable{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [(["ip", "netns", "exec", name], f"cable{number}") for number, name in enumerate(NAMES)]
    finally:
        for name in NAMES:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
        assert not any(Path("/run/netns", name).exists() for name in NAMES)


def test_two_machines(machines, tmp_path):
    net = tiny.build("llama", heads=8, kv_heads=4, hidden_size=256, intermediate_size=768, vocab_size=512).float()
    net.save_pretrained(tmp_path / "model")
    prompt = tiny.tokens(9)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import json, os, sys
        from dataclasses import asdict
        import graphsrt
        params = graphsrt.SamplingParams(max_new_tokens=5, ignore_eos=True)
        with graphsrt.compile({str(tmp_path / "model")!r}, backend="eager", context_length=64) as model:
            told = {{
                "logits": model.logits({prompt}).tolist(),
                "tokens": model.generate({prompt}, params)[0].token_ids,
                "reports": [asdict(report) for report in model.load_reports],
                "interface": os.environ["GLOO_SOCKET_IFNAME"],
                "ranks": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")],
            }}
        open(sys.argv[1] + "/" + os.environ["RANK"] + ".json", "w").write(json.dumps(told))
        """)
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    env.pop("GLOO_SOCKET_IFNAME", None)
    agents = []
    master = ADDRESSES[0] if machines[0][0] else "127.0.0.1"
    for rank, (prefix, _) in enumerate(machines):
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank)]
        command += ["--nproc-per-node", "1", "--master-addr", master, "--master-port", str(PORT)]
        log = (tmp_path / f"{rank}.log").open("w")
        agents.append(subprocess.Popen([*command, str(script), str(tmp_path)], env=env, stdout=log, stderr=log))
    try:
        statuses = [agent.wait(120) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert statuses == [0, 0], "\n".join((tmp_path / f"{rank}.log").read_text()[-3000:] for rank in range(2))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert [first["ranks"], second["ranks"]] == [["0", "0", "2"], ["1", "0", "2"]]
    assert [first["interface"], second["interface"]] == [interface for _, interface in machines]
    # every rank gets the same results, and they are transformers': float32 sums in another order
    assert first["tokens"] == second["tokens"] and first["logits"] == second["logits"]
    assert tiny.worst(torch.tensor(first["logits"]), tiny.eager_logits(net, prompt)) < 1e-5
    assert first["reports"] == second["reports"]
    for rank, report in enumerate(first["reports"]):
        assert report["node_ranks"] == [rank]
        assert report["node_bytes_read"] == report["bytes_read"] <= 1.05 * report["checkpoint_bytes"]
        assert report["weight_bytes"] < 0.6 * report["checkpoint_bytes"] < report["bytes_read"]


def test_interface_towards():
    assert interface_towards("127.0.0.1") in ("lo", "lo0")
    assert interface_towards("no such host.invalid") is None
