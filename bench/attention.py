"""Speed of the CPU attention kernel: decode and prefill, beside ceilings measured in the same run.

    python bench/attention.py [--dtype float32|bfloat16] [--heads 8] [--kv-heads 2] [--head-size 128] [--threads N]

Decode reads every cached K and V once, so GB/s counts those bytes; its ceiling is a plain sum over a buffer larger
than the caches. Prefill's GFLOP/s counts 4 * D per visible (query, key) pair and head; its ceiling is a 1024³ matmul
in float32 (the kernel computes in float32). Slots are whole pages of 16 in random order. The best of many repeats is
printed: this measures the kernel, not what else the machine does; if it does much else, --threads 1 is steadier.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from graphsrt.lowering.kernels.radix_attention import radix_attention

PAGE = 16


def best_seconds(f: Callable[[], object], budget_s: float = 1.0) -> float:
    f()
    best, end = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end:
        start = time.perf_counter()
        f()
        best = min(best, time.perf_counter() - start)
    return best


def read_ceiling() -> float:
    """GB/s of a read-only pass over 512 MiB."""
    buffer = torch.ones(1 << 27)
    return buffer.numel() * 4 / best_seconds(buffer.sum) / 1e9


def matmul_ceiling() -> float:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / best_seconds(lambda: a @ b) / 1e9


def attention_seconds(batch: int, context: int, extend: int, args: argparse.Namespace) -> float:
    """Layers are visited in turn, so that the pool of a layer has left the caches when its turn comes again."""
    dtype = getattr(torch, args.dtype)
    pages = -(-context // PAGE)
    slots = (torch.randperm(batch * pages)[:, None] * PAGE + torch.arange(PAGE)).reshape(batch, -1)[:, :context]
    pool_bytes = 2 * batch * pages * PAGE * args.kv_heads * args.head_size * dtype.itemsize
    layers = max(2, min(64, (128 << 20) // pool_bytes))
    pool = torch.randn(layers, 2, batch * pages * PAGE, args.kv_heads, args.head_size).to(dtype)
    q = torch.randn(batch * extend, args.heads, args.head_size).to(dtype)
    k, v = (torch.randn(batch * extend, args.kv_heads, args.head_size).to(dtype) for _ in range(2))
    step: tuple[torch.Tensor, ...] = (
        q,
        k,
        v,
        pool,
        slots.int().contiguous(),
        torch.arange(batch),
        torch.full((batch,), context),
    )
    step += (torch.arange(batch + 1) * extend, slots[:, context - extend :].reshape(-1).contiguous())
    turn = 0

    def call() -> None:
        nonlocal turn
        turn = (turn + 1) % layers
        radix_attention(*step, layer_id=turn, scale=args.head_size**-0.5)

    return best_seconds(call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    read, flops = read_ceiling(), matmul_ceiling()
    print(f"{args.dtype}, H={args.heads} K={args.kv_heads} D={args.head_size}, {torch.get_num_threads()} threads")
    print(f"ceilings: read {read:.1f} GB/s, float32 matmul {flops:.0f} GFLOP/s")
    itemsize = getattr(torch, args.dtype).itemsize
    for batch, context, extend in [(1, 16, 1), (1, 512, 1), (8, 512, 1), (1, 4096, 1), (8, 4096, 1), (1, 512, 512)]:
        seconds = attention_seconds(batch, context, extend, args)
        pairs = batch * extend * (2 * context - extend + 1) / 2
        rate_flops = 4 * pairs * args.heads * args.head_size / seconds / 1e9
        rate_bytes = 2 * batch * context * args.kv_heads * args.head_size * itemsize / seconds / 1e9
        kind = "decode" if extend == 1 else "prefill"
        line = f"{kind:8} batch {batch} context {context:5}: {seconds * 1e6:9.1f} us"
        if extend == 1:
            line += f"  {rate_bytes:6.1f} GB/s ({rate_bytes / read:4.0%} of read)"
        print(line + f"  {rate_flops:6.1f} GFLOP/s ({rate_flops / flops:4.0%} of matmul)")


if __name__ == "__main__":
    main()
