"""Checkpoints: slices, shards, damage, and the file in memory that rank processes share."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from graphsrt.errors import CheckpointError
from graphsrt.models.checkpoint import (
    PickleCheckpoint,
    SafetensorsCheckpoint,
    StateDictCheckpoint,
    open_checkpoint,
    open_spec,
)
from graphsrt.models.conversion import ConvertedCheckpoint
from graphsrt.models.memory_file import write_safetensors_memfd


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {
        "a": torch.randn(6, 4),
        "b": torch.randn(3, 5, 7).to(torch.bfloat16),
        "c": torch.arange(9),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }


def save_shards(folder, shards):
    weight_map = {}
    for number, shard in enumerate(shards):
        file = f"model-{number}.safetensors"
        save_file(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_read_slices_and_count_bytes(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(tensors) and "a" in checkpoint and "z" not in checkpoint
        header_bytes = checkpoint.files[0].header_bytes
        assert checkpoint.bytes_read == header_bytes
        for name, tensor in tensors.items():
            assert checkpoint.shape(name) == tuple(tensor.shape) and checkpoint.dtype(name) == tensor.dtype
            assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.bytes_read == header_bytes + sum(t.numel() * t.element_size() for t in tensors.values())
        checkpoint.bytes_read = 0
        block = checkpoint.read("b", (slice(1, 3), slice(None), slice(2, 4)))
        assert torch.equal(block, tensors["b"][1:3, :, 2:4])
        assert checkpoint.bytes_read == 2 * 5 * 7 * 2  # rows are read whole
        assert checkpoint.read("a", (slice(2, 2),)).shape == (0, 4)
        with pytest.raises(ValueError, match="step 1"):
            checkpoint.read("a", (slice(0, 6, 2),))
        with pytest.raises(ValueError, match="3 slices"):
            checkpoint.read("a", (slice(None),) * 3)
        with pytest.raises(CheckpointError, match="no tensor named nope"):
            checkpoint.read("nope")
        kept = checkpoint.read("a")
    assert torch.equal(kept, tensors["a"])  # still valid after close
    assert torch.equal(open_spec(json.loads(json.dumps(checkpoint.spec()))).read("c"), tensors["c"])


def test_shards(tmp_path, tensors):
    save_shards(tmp_path, [{"a": tensors["a"]}, {"b": tensors["b"], "c": tensors["c"]}])
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert sorted(checkpoint.names()) == ["a", "b", "c"]
    assert torch.equal(checkpoint.read("c", (slice(3, 5),)), tensors["c"][3:5])
    assert checkpoint.where("b").endswith("model-1.safetensors")
    assert [file.path for file in checkpoint.files if file._fd] == [checkpoint.where("c")]  # the other is not open


def test_index_of_a_missing_file(tmp_path, tensors):
    save_shards(tmp_path, [{"a": tensors["a"]}, {"b": tensors["b"]}])
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 checkpoint files are missing[\s\S]*model-1.safetensors"):
        open_checkpoint(tmp_path)


def test_index_of_a_missing_tensor(tmp_path, tensors):
    save_shards(tmp_path, [{"a": tensors["a"]}, {"b": tensors["b"], "c": tensors["c"]}])
    save_file({"b": tensors["b"]}, tmp_path / "model-1.safetensors")
    with pytest.raises(CheckpointError, match=r"does not hold[\s\S]*model-1.safetensors[\s\S]*expected: +c"):
        open_checkpoint(tmp_path)


def test_tensor_in_two_shards(tmp_path, tensors):
    save_shards(tmp_path, [{"a": tensors["a"]}, {"a": tensors["a"], "b": tensors["b"]}])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-0.safetensors", "b": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"tensor a is stored twice[\s\S]*model-0[\s\S]*model-1"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../x"}}', "{}"])
def test_bad_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def with_header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start, stop, **other):
    return {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop], **other}


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "0 bytes, and not even a header length"),
        (b"\x01\x02", "2 bytes, and not even a header length"),
        (struct.pack("<Q", 1 << 60) + b"{}", "a header of 1152921504606846976 bytes"),
        (struct.pack("<Q", 100) + b"{}", "a header of 100 bytes in a file of 10"),
        (with_header(b"not json"), "not JSON"),
        (with_header(b"\xff\xfe"), "not JSON"),
        (with_header(b"[" * 100_000), "not JSON"),
        (with_header([1]), "no JSON object"),
        (with_header({"a": 3}), "tensor a without dtype"),
        (with_header({"__metadata__": {"a": 3}}), "__metadata__"),
        (with_header({"a": entry(0, 16, shape=[-4])}, b"\0" * 16), r"tensor a with shape \[-4\]"),
        (with_header({"a": entry(0, 16, shape=[True, 4])}, b"\0" * 16), "tensor a with shape"),
        (with_header({"a": entry(16, 0)}, b"\0" * 16), "tensor a with shape"),
        (with_header({"a": entry(0, 16, data_offsets=[0, 16.0])}, b"\0" * 16), "tensor a with shape"),
        (with_header({"a": entry(0, 16), "b": entry(16, 32)}, b"\0" * 28), "tensor b up to byte 32 of 28"),
        (with_header({"a": entry(0, 16), "b": entry(8, 24)}, b"\0" * 24), "tensor b from byte 8, but tensor a .* 16"),
        (with_header({"a": entry(0, 16), "b": entry(0, 16)}, b"\0" * 16), "tensor b from byte 0, but tensor a .* 16"),
        (with_header({"a": entry(0, 16), "b": entry(20, 24)}, b"\0" * 24), "4 bytes between tensor a and tensor b"),
        (with_header({"a": entry(0, 16)}, b"\0" * 20), "4 bytes after tensor a"),
        (with_header({"a": entry(0, 16, shape=[5])}, b"\0" * 16), "tensor a, F32 .*, in 16 bytes: .* take 20"),
        (with_header({"a": entry(0, 16, dtype="BF16")}, b"\0" * 16), "tensor a, BF16 .*, in 16 bytes: .* take 8"),
        (
            with_header(b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 16)).encode(),) * 2), b"\0" * 16),
            "the name a twice",
        ),
    ],
)  # fmt: skip
def test_damaged_file(tmp_path, content, reason):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is not a sound safetensors file(?s:.*){reason}"):
        open_checkpoint(tmp_path)


def test_unknown_dtype(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(with_header({"a": entry(0, 16, dtype="F4")}, b"\0" * 16))
    with pytest.raises(CheckpointError, match=r"tensor a has a dtype that torch does not know(?s:.*)model.safetensors"):
        open_checkpoint(tmp_path)


def test_file_that_changes_after_its_header(tmp_path, tensors):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    checkpoint, spec = open_checkpoint(file), open_checkpoint(file).spec()
    save_file({**tensors, "a": torch.zeros(6, 8)}, file)
    with pytest.raises(CheckpointError, match="changed since its header was read"):
        checkpoint.read("a")
    with pytest.raises(CheckpointError, match=r"is not the one that the model was compiled from(?s:.*)model.safet"):
        open_spec(json.loads(json.dumps(spec)))
    # Cut short while it is open: no zeros, no bus error.
    checkpoint = open_checkpoint(file)
    checkpoint.read("scalar")
    os.truncate(file, 100)
    with pytest.raises(CheckpointError, match="ended at byte"):
        checkpoint.read("b")


def test_truncated_file(tmp_path, tensors):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a sound safetensors file"):
        open_checkpoint(file)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such checkpoint file"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_pickle_only_on_request(tmp_path, tensors):
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match="allow_pickle=True"):
            open_checkpoint(path)
        checkpoint = open_checkpoint(path, allow_pickle=True)
        assert isinstance(checkpoint, PickleCheckpoint)
        assert torch.equal(checkpoint.read("a", (slice(1, 2),)), tensors["a"][1:2])
    assert torch.equal(open_spec(checkpoint.spec()).read("b"), tensors["b"])
    torch.save({"a": print}, tmp_path / "pytorch_model.bin")  # an object that weights_only refuses
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        open_checkpoint(tmp_path, allow_pickle=True)


def test_state_dict_is_shared():
    weight = torch.randn(4, 3)
    checkpoint = StateDictCheckpoint({"embed": weight, "head": weight, "extra": object()})  # type: ignore[dict-item]
    assert checkpoint.names() == ["embed", "head"]
    assert checkpoint.read("head").data_ptr() == weight.data_ptr()
    assert torch.equal(checkpoint.read("head", (slice(1, 3), slice(0, 1))), weight[1:3, :1])
    assert checkpoint.bytes_read == 4 * (12 + 2)
    with pytest.raises(CheckpointError, match="write_safetensors_memfd"):
        checkpoint.spec()
    with pytest.raises(CheckpointError, match="meta device"):
        StateDictCheckpoint({"w": torch.empty(3, device="meta")})


def test_memfd_is_read_by_another_process(tensors):
    tensors["alias"] = tensors["a"]
    tensors["transposed"] = tensors["a"].t()  # the same memory, another tensor
    fd = write_safetensors_memfd(tensors)
    try:
        checkpoint = SafetensorsCheckpoint(f"/proc/self/fd/{fd}")
        assert sorted(checkpoint.names()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(name), tensor)
        # a and alias are stored once
        stored_bytes = sum(t.numel() * t.element_size() for n, t in tensors.items() if n != "alias")
        assert os.fstat(fd).st_size < stored_bytes + 2000
        code = (
            "import sys; from graphsrt.models.checkpoint import SafetensorsCheckpoint as C; "
            "print(C(sys.argv[1]).read('alias', (slice(2, 3),)).tolist())"
        )
        out = subprocess.run(
            [sys.executable, "-c", code, f"/proc/self/fd/{fd}"],
            pass_fds=[fd], capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(out.stdout) == tensors["a"][2:3].tolist()
    finally:
        os.close(fd)


def test_converted_slices_read_only_their_parts():
    torch.manual_seed(0)
    gates, ups = [torch.randn(3, 4) for _ in range(5)], [torch.randn(2, 4) for _ in range(5)]
    inner = StateDictCheckpoint(
        {f"g{i}": g for i, g in enumerate(gates)} | {f"u{i}": u for i, u in enumerate(ups)} | {"plain": torch.ones(2)}
    )
    g, u = [f"g{i}" for i in range(5)], [f"u{i}" for i in range(5)]
    view = ConvertedCheckpoint(
        inner,
        {
            "gate_up": ["cat", 1, [["stack", 0, g], ["stack", 0, u]]],
            "swapped": ["swap", 0, 1, "plain2"],
            "cut": ["cut", 0, 1, 3, "g0"],
        }
        | {"swapped": ["swap", 0, 2, ["stack", 0, u]]},
    )
    whole = torch.cat([torch.stack(gates), torch.stack(ups)], 1)
    assert set(view.names()) == {"plain", "gate_up", "swapped", "cut"} and view.shape("gate_up") == (5, 5, 4)
    for slices in (
        (),
        (slice(1, 3),),
        (slice(None), slice(2, 4), slice(1, 2)),
        (slice(4, 5), slice(3, 5)),
        (slice(2, 2),),
    ):
        assert torch.equal(view.read("gate_up", slices), whole[slices] if slices else whole)
    before = inner.bytes_read
    view.read("gate_up", (slice(1, 3), slice(3, 5)))
    assert inner.bytes_read - before == 2 * 2 * 4 * 4
    assert torch.equal(view.read("swapped", (slice(1, 3),)), torch.stack(ups).transpose(0, 2)[1:3])
    assert torch.equal(view.read("cut", (slice(1, 2),)), gates[0][2:3])
    ragged = ConvertedCheckpoint(inner, {"bad": ["stack", 0, ["g0", "u0"]]})
    with pytest.raises(CheckpointError, match="do not fit together"):
        ragged.shape("bad")
