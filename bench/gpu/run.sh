#!/usr/bin/env bash
# The rows of docs/gpu.md, on a machine with an H200, CUDA 13 and, for comparison, PyTorch:
#   bench/gpu/run.sh [PART...]                all parts if none is named; plot.py draws what it prints
# Parts, each of five minutes at most:
#   kernels   decode attention alone, and PyTorch's; then append and attend through MLX, its own and ours
#   one       Llama-3.1-8B's shape, decode of one request at four lengths, each cache three times
#   many      of 8 and 32 requests, likewise
#   long      of 8 requests of 192k tokens, and of as many as fit; what does not fit says so
#   prompt    a prompt, and steps that seal
# In a folder that pack.sh filled it unpacks and builds first; in a checkout it takes build/cuda.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

if [ -e "$here/kvpool.tar.xz" ]; then
  root=$here/kvpool
  if [ ! -e "$root/build/cuda/examples/llama_decode" ]; then
    mkdir -p "$root/build"
    tar -C "$root" -xJf "$here/kvpool.tar.xz"
    tar -C "$root/build" -xJf "$here/mlx-cuda.tar.xz"
    cmake -S "$root" -B "$root/build/cuda" -G Ninja -DCMAKE_BUILD_TYPE=Release -DKVPOOL_CUDA=ON \
      -DMLX_DIR="$root/build/mlx-cuda/mlx/share/cmake/MLX" -DKVPOOL_BUILD_EXAMPLES=ON
    cmake --build "$root/build/cuda" --target llama_decode paged_bench decode_bench
  fi
else
  root=$(cd "$here/../.." && pwd)
fi
cd "$root"
nvidia=$(python3 -c 'import importlib.util as u; s = u.find_spec("nvidia"); print(s.submodule_search_locations[0] if s else "")')
export LD_LIBRARY_PATH=$(printf '%s:' "$nvidia"/*/lib)/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}
built=build/cuda
caches=stock,raw,int8,int4,kivi2,vecinfer4,vecinfer2

decode() {  # BATCH TOKENS CHUNK CACHES
  $built/examples/llama_decode --shape llama-3.1-8b --batch "$1" --fill "$2" --chunk "$3" \
    --prompt 1 --tokens 66 --cache "$4"
}
decode_thrice() {  # "BATCH TOKENS"...
  for shape in "$@"; do
    set -- $shape
    echo "batch $1, $2 tokens"
    decode "$1" "$2" 2048 $caches,$caches,$caches
  done
}

kernels() {
  echo "== kernels alone, us and share of 4.8 TB/s"
  $built/bench/gpu/decode_bench check | tail -1
  $built/bench/gpu/decode_bench time
  python3 bench/gpu/sdpa_bench.py
  echo "== append and attend through MLX"
  $built/bench/gpu/paged_bench stock,raw,int8,int4,kivi2,vecinfer4,vecinfer2 \
    1x1024,1x8192,1x65536,1x196608,8x8192,32x8192
}
one() {
  echo "== Llama-3.1-8B's shape, decode; each cache three times"
  decode_thrice "1 1024" "1 8192" "1 65536" "1 196608"
}
many() {
  echo "== Llama-3.1-8B's shape, decode; each cache three times"
  decode_thrice "8 8192" "32 8192" "8 65536"
}
long() {
  echo "== requests of 196608 tokens"
  echo "batch 8, 196608 tokens"
  for cache in vecinfer2 kivi2 vecinfer4 int4 int8 raw stock; do decode 8 196608 512 $cache || true; done
  for shape in "stock 4" "stock 5" "vecinfer2 24" "vecinfer2 36"; do
    set -- $shape
    echo "batch $2, 196608 tokens"
    decode "$2" 196608 512 "$1" || true
  done
}
prompt() {
  echo "== prompt of 8192 tokens"
  $built/examples/llama_decode --shape llama-3.1-8b --prompt 8192 --tokens 20 --cache $caches
  for tokens in 8192 196608; do
    echo "== steps after $tokens tokens, two of which seal"
    $built/examples/llama_decode --shape llama-3.1-8b --fill $tokens --prompt 1 --tokens 66 \
      --steps 1 --cache int4,vecinfer2
  done
}

parts=(kernels one many long prompt)
for part in "${@:-${parts[@]}}"; do
  [[ " ${parts[*]} " == *" $part "* ]] || { echo "run.sh: no part $part; there are ${parts[*]}" >&2; exit 2; }
done
for part in "${@:-${parts[@]}}"; do $part; done
