#!/usr/bin/env bash
# Packs what bench/gpu/run.sh needs on a CUDA 13 machine that reaches no package registry and has no
# MLX: sources and MLX's CUDA wheels.
#   bench/gpu/pack.sh DEST        then copy DEST there and run DEST/run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

dest=${1:?usage: pack.sh DEST}
scripts/unpack_mlx_cuda.sh
mkdir -p "$dest"
tar -cJf "$dest/kvpool.tar.xz" CMakeLists.txt CMakePresets.json cmake include src examples bench
tar -C build -cJf "$dest/mlx-cuda.tar.xz" mlx-cuda
cp bench/gpu/run.sh "$dest/"
