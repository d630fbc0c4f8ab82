#!/usr/bin/env bash
# Prints where nvcc is: this machine's, else that of PyPI's wheels, unpacked into build/nvcc.
#   scripts/nvcc.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."

for nvcc in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
  [ ! -x "$nvcc" ] || { echo "$nvcc"; exit; }
done

python=${1:-.venv/bin/python}
target=build/nvcc
version=13.0.88
toolkit=$PWD/$target/nvidia/cu13
if [ ! -e "$target/.$version" ]; then
  rm -rf "$target"
  mkdir -p "$target"
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$target" \
    nvidia-{cuda-nvcc,cuda-crt,nvvm}==$version nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
  for wheel in "$target"/*.whl; do
    "$python" -m zipfile -e "$wheel" "$target"
    rm "$wheel"
  done
  chmod +x "$toolkit"/bin/* "$toolkit"/nvvm/bin/*
  # As a toolkit has them.
  ln -s lib "$toolkit/lib64"
  ln -s libcudart.so.13 "$toolkit/lib/libcudart.so"
  touch "$target/.$version"
fi
echo "$toolkit/bin/nvcc"
