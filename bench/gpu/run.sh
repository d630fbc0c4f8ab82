#!/usr/bin/env bash
# The rows of docs/gpu.md, on a machine with an H200, CUDA 13 and, for comparison, PyTorch:
#   bench/gpu/run.sh [PART...]                the first five parts if none is named; plot.py draws what they print
# Parts, each of five minutes at most:
#   kernels   decode attention alone, and PyTorch's; then append and attend through MLX, its own and ours
#   one       Llama-3.1-8B's shape, decode of one request at four lengths, each cache three times
#   many      of 8 and 32 requests, likewise
#   long      of 8 requests of 192k tokens, and of as many as fit; what does not fit says so
#   prompt    a prompt, and steps that seal
#   tests     the tests of the CUDA kernels, and the CPU's of paged caches on the GPU
#   sanitize  each kind of kernel under memcheck, racecheck and synccheck
# It takes what is in build/cuda, in a checkout or where an archive of pack.sh's was unpacked.
set -euo pipefail
cd "$(dirname "$0")/../.."
source bench/gpu/libraries.sh
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

tests() {
  echo "== tests"
  shards 5 $built/tests/unit/cuda_test
  MLX_ENABLE_TF32=0 shards 3 $built/tests/unit/paged_test
}
shards() {  # COUNT PROGRAM: its cases in so many processes; what failed, and how many passed.
  local logs shard failed=0 pids=()
  logs=$(mktemp -d)
  for ((shard = 0; shard < $1; ++shard)); do
    GTEST_TOTAL_SHARDS=$1 GTEST_SHARD_INDEX=$shard "$2" >"$logs/$shard" 2>&1 &
    pids+=($!)
  done
  for shard in "${pids[@]}"; do wait "$shard" || failed=1; done
  grep -hE "Failure|FAILED|SKIPPED" -A2 "$logs"/* || true
  awk -v name="${2##*/}" '/PASSED/ { n += $4 } END { print name ": " n + 0 " passed" }' "$logs"/*
  return $failed
}
sanitize() {
  local one='D128_128_block_32' seen
  local cases="*ForksAndTrims*$one*:*AnImage*$one*:*CudaTables*-*codes_of*:*float32*"
  for tool in memcheck racecheck synccheck; do
    echo "== $tool"
    compute-sanitizer --tool $tool $built/bench/gpu/decode_bench small | tail -1
    seen=$cases
    [ $tool = racecheck ] || seen="*$one*:*CudaTables*-*ATable*:*WhoeverIs*:*float32*"
    compute-sanitizer --tool $tool $built/tests/unit/cuda_test --gtest_filter="$seen" | grep -E "FAILED|PASSED|SUMMARY"
  done
}

figures=(kernels one many long prompt)
parts=("${figures[@]}" tests sanitize)
for part in "${@:-${figures[@]}}"; do
  [[ " ${parts[*]} " == *" $part "* ]] || { echo "run.sh: no part $part; there are ${parts[*]}" >&2; exit 2; }
done
for part in "${@:-${figures[@]}}"; do $part; done
