"""The pipeline: the passes in order. A pass's own docstring says what it needs and what it leaves."""

from collections.abc import Callable

from graphsrt.passes.fuse_add_layer_norm import fuse_add_layer_norm
from graphsrt.passes.fuse_add_rms_norm import fuse_add_rms_norm
from graphsrt.passes.fuse_all_reduce_add_layer_norm import fuse_all_reduce_add_layer_norm
from graphsrt.passes.fuse_all_reduce_add_rms_norm import fuse_all_reduce_add_rms_norm
from graphsrt.passes.fuse_qk_norm_rope import fuse_qk_norm_rope
from graphsrt.passes.fuse_rms_norm_quant import fuse_rms_norm_quant
from graphsrt.passes.fuse_rope_kv_write import fuse_rope_kv_write
from graphsrt.passes.fuse_silu_mul import fuse_silu_mul
from graphsrt.passes.fuse_silu_mul_quant import fuse_silu_mul_quant
from graphsrt.passes.merge_gate_up import merge_gate_up
from graphsrt.passes.merge_qkv import merge_qkv
from graphsrt.passes.normalize import normalize
from graphsrt.passes.page_attention import page_attention
from graphsrt.passes.quantize_linears import quantize_linears
from graphsrt.passes.quantize_weights import quantize_weights
from graphsrt.passes.recognize_gated_mlp import recognize_gated_mlp
from graphsrt.passes.recognize_l2_norm import recognize_l2_norm
from graphsrt.passes.recognize_latent_attention import recognize_latent_attention
from graphsrt.passes.recognize_rms_norm import recognize_rms_norm
from graphsrt.passes.recognize_rope import recognize_rope
from graphsrt.passes.runner import insert
from graphsrt.passes.scatter_logits import scatter_logits
from graphsrt.passes.scatter_residual import scatter_residual
from graphsrt.passes.select_logit_rows import select_logit_rows
from graphsrt.passes.shard_tensor_parallel import shard_tensor_parallel
from graphsrt.passes.split_attention import split_attention
from graphsrt.passes.split_linears import split_linears

PIPELINE: list[Callable[..., int]] = [
    normalize,
    recognize_rms_norm,
    recognize_l2_norm,
    recognize_rope,
    recognize_latent_attention,
    recognize_gated_mlp,
    split_attention,
    split_linears,
    shard_tensor_parallel,
    merge_qkv,
    merge_gate_up,
    quantize_linears,
    quantize_weights,
    page_attention,
    select_logit_rows,
    scatter_logits,
    scatter_residual,
    fuse_add_rms_norm,
    fuse_add_layer_norm,
    fuse_all_reduce_add_rms_norm,
    fuse_all_reduce_add_layer_norm,
    fuse_qk_norm_rope,
    fuse_rope_kv_write,
    fuse_silu_mul,
    fuse_rms_norm_quant,
    fuse_silu_mul_quant,
]

__all__ = ["PIPELINE", "insert"]
