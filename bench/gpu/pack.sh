#!/usr/bin/env bash
# Builds for CUDA and packs, for a machine with a GPU and CUDA 13 that need have neither compiler nor MLX:
#   bench/gpu/pack.sh [ARCHIVE]     kvpool-gpu.tar.xz if none is named; then, there,
#   tar -xJf kvpool-gpu.tar.xz && bench/gpu/run.sh
set -euo pipefail
archive=$(realpath "${1:-kvpool-gpu.tar.xz}")
cd "$(dirname "$0")/../.."

make cuda
programs=(unit/cuda_test unit/paged_test)
programs=("${programs[@]/#/build/cuda/tests/}" build/cuda/examples/llama_decode build/cuda/bench/gpu/{decode,paged}_bench)
cmake --build --preset cuda --target "${programs[@]##*/}"
# MLX compiles some of its kernels where they run, with the headers in cccl.
mlx=build/mlx-cuda
echo "==> packing $archive"
XZ_OPT="-T0 -4" tar -cJf "$archive" bench/gpu "${programs[@]}" $mlx/mlx/lib/libmlx.so $mlx/mlx/include/cccl $mlx/mlx_cuda_13.libs
