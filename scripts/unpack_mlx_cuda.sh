#!/usr/bin/env bash
# Unpacks MLX's CUDA wheels into build/mlx-cuda, to build against where there is no GPU.
#   scripts/unpack_mlx_cuda.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-.venv/bin/python}
version=$("$python" -c 'import tomllib; print(next(d[5:] for d in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"] if d.startswith("mlx==")))')
target=build/mlx-cuda
[ -e "$target/.$version" ] && exit 0
rm -rf "$target"
mkdir -p "$target"
"$python" -m pip download --quiet --no-deps --dest "$target" "mlx==$version" "mlx-cuda-13==$version"
for wheel in "$target"/*.whl; do
  "$python" -m zipfile -e "$wheel" "$target"
  rm "$wheel"
done
touch "$target/.$version"
