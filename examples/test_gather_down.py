import torch
from torch.nn.functional import linear
from transformers import LlamaConfig

import graphsrt
from examples.gather_down import gather_down
from graphsrt import ops
from graphsrt.passes import PIPELINE, insert, shard_tensor_parallel
from graphsrt.testing import check, trace

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=48, max_position_embeddings=64,
)  # fmt: skip


def mlp(x, gate, up, down, bias):
    return linear(ops.glu(linear(x, gate), linear(x, up), act="silu"), down, bias)


def sharded(width: int, tp: int):
    weights = {"gate": (width, 34), "up": (width, 34), "down": (34, width), "bias": (34,)}
    return trace(mlp, tp=tp, inputs={"x": ("T", 34)}, weights=weights, passes=[shard_tensor_parallel])


def test_fires():
    done = check(gather_down, sharded(48, 2), fires=1)
    assert 'all_reduce(linear_2, axis="tp")' in done.before
    assert 'f64[T, 48] R = graphsrt.all_gather(glu, dim=1, axis="tp", size=2)' in done.after
    assert "linear_2: f64[T, 34] R = aten.linear(glu.all_gather, down, bias)" in done.after
    assert 'down: f64[34, 48] R = ckpt("down")' in str(done.program)


def test_gives_what_one_rank_gives():
    from graphsrt.testing import RandomSource, check_ranks, checkpoint_shapes

    one, many = sharded(48, 1), sharded(48, 4)
    gather_down(many)
    # Products of a quarter of the columns may be computed in other blocks, and round their last bits otherwise.
    check_ranks(one, many, tolerance=4 * torch.finfo(torch.float64).eps, source=RandomSource(checkpoint_shapes(one)))


def test_near_miss():
    program = sharded(46, 4)
    check(gather_down, program, fires=0, near_miss="its 46 channels lie as 48(46)/4 on the ranks")


def test_in_the_pipeline():
    """Placements are checked after each pass, and every value is compared on simulated ranks."""
    pipeline = insert(PIPELINE, gather_down)
    program = graphsrt.trace(CONFIG, tp=2, dtype=torch.float32, passes=pipeline).program()
    reports = {report.name: report for report in program.history}
    assert reports["gather_down"].fired == 2 and reports["fuse_silu_mul"].fired == 2
    sums, gathers = ops.count_collectives(node.target for node in program.nodes)
    assert (sums, gathers) == (3, 2)  # a sum for each layer's attention and for the embedding, a gather for each MLP
    graphsrt.verify(CONFIG, tp=2, passes=pipeline[: pipeline.index(gather_down) + 1]).raise_if_bad()
