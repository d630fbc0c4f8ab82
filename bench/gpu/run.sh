#!/usr/bin/env bash
# The rows of docs/gpu.md, on a machine with an H200, CUDA 13 and, for comparison, PyTorch:
#   bench/gpu/run.sh                          plot.py draws what it prints
# In a folder that pack.sh filled it unpacks and builds first; in a checkout it takes build/cuda.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

if [ -e "$here/kvpool.tar.xz" ]; then
  root=$here/kvpool
  mkdir -p "$root/build"
  tar -C "$root" -xJf "$here/kvpool.tar.xz"
  tar -C "$root/build" -xJf "$here/mlx-cuda.tar.xz"
  cmake -S "$root" -B "$root/build/cuda" -G Ninja -DCMAKE_BUILD_TYPE=Release -DKVPOOL_CUDA=ON \
    -DMLX_DIR="$root/build/mlx-cuda/mlx/share/cmake/MLX" -DKVPOOL_BUILD_EXAMPLES=ON
  cmake --build "$root/build/cuda" --target llama_decode paged_bench
else
  root=$(cd "$here/../.." && pwd)
fi
cd "$root"
nvidia=$(python3 -c 'import importlib.util as u; s = u.find_spec("nvidia"); print(s.submodule_search_locations[0] if s else "")')
export LD_LIBRARY_PATH=$(printf '%s:' "$nvidia"/*/lib)/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}

echo "== kernels alone, us and share of 4.8 TB/s"
nvcc -std=c++20 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a --split-compile=0 \
  -Isrc -Iinclude src/kernels/cuda/decode*.cu bench/gpu/decode_bench.cu -o build/decode_bench
build/decode_bench check | tail -1
build/decode_bench time
python3 bench/gpu/sdpa_bench.py

echo "== append and attend through MLX"
build/cuda/bench/gpu/paged_bench stock,raw,int8,int4,kivi2,vecinfer2 1x1024,1x8192,1x65536,1x196608,8x8192

echo "== Llama-3.1-8B's shape, decode; each cache three times"
caches=stock,raw,int8,int4,kivi2,vecinfer4,vecinfer2
for shape in "1 1024" "1 8192" "1 65536" "1 196608" "8 8192" "32 8192" "8 65536"; do
  set -- $shape
  echo "batch $1, $2 tokens"
  build/cuda/examples/llama_decode --shape llama-3.1-8b --batch "$1" --fill "$2" --chunk 2048 \
    --prompt 1 --tokens 66 --cache $caches,$caches,$caches
done
echo "as many requests of 196608 tokens as fit"
for shape in "stock 4" "vecinfer2 24" "vecinfer2 36"; do
  set -- $shape
  build/cuda/examples/llama_decode --shape llama-3.1-8b --batch "$2" --fill 196608 --chunk 512 \
    --prompt 1 --tokens 66 --cache "$1"
done
echo "prompt of 8192 tokens"
build/cuda/examples/llama_decode --shape llama-3.1-8b --prompt 8192 --tokens 20 --cache stock,raw,int4,vecinfer2
