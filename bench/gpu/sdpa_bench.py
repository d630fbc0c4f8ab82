"""PyTorch's scaled_dot_product_attention at the shapes of decode_bench, for comparison.

Times as there: CUDA events around a graph of 20 calls, the best of 10, rotating among caches of at least 256 MB.
"""

import torch
import torch.nn.functional as F


def time_one(batch, length, heads=32, kv_heads=8, dim=128):
    size = 2 * batch * kv_heads * length * dim * 2
    n = min(40, -(-(256 << 20) // size))
    caches = [
        [torch.randn(batch, kv_heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv"] for _ in range(n)
    ]
    q = torch.randn(batch, heads, 1, dim, device="cuda", dtype=torch.bfloat16)

    def go(k):
        keys, values = caches[k % n]
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for k in range(3):
                go(k)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for k in range(20):
                go(k)
        best = 1e9
        for k in range(11):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            if k:
                best = min(best, a.elapsed_time(b) / 20)
    rate = size / best * 1e-9
    print(f"torch-bf16 B {batch:2} x {length:6}          {best * 1e3:7.1f} us  {rate:6.2f} TB/s", flush=True)


print(f"PyTorch {torch.__version__}", flush=True)
for shape in [(1, 1024), (1, 8192), (1, 65536), (1, 196608), (8, 8192), (32, 8192)]:
    time_one(*shape)
