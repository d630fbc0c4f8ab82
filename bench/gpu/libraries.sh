# Sourced in the project's root: where programs in build/cuda find MLX, and MLX cuDNN, which PyTorch brings along.
nvidia=$(python3 -c 'import importlib.util as u; s = u.find_spec("nvidia"); print(s.submodule_search_locations[0] if s else "")')
export LD_LIBRARY_PATH=$PWD/build/mlx-cuda/mlx/lib:$(printf '%s:' "$nvidia"/*/lib)/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}
