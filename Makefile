# Every target does its own set-up and is quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find include src bindings cmake python -type f \
	-not -name '*.pyc' -not -path '*/__pycache__/*') CMakeLists.txt pyproject.toml

PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4

# Run once more on MLX's own ops.
PAGED_TESTS := $(addprefix tests/python/test_,paged_cache.py paged_mlx_lm.py kivi.py route.py \
	vecinfer_cache.py vecinfer_kv_cache.py)

# Where the other architecture's compiler and QEMU are Debian packages.
ARM64 := $(if $(and $(filter x86_64,$(shell uname -m)),$(shell command -v dpkg-query)),arm64)

.PHONY: demo test arm64 cuda fuzz build setup bench llama peers stubs clean

demo: build  ## The main job on the default model.
	@$(BIN)/kvpool info
	@$(BIN)/kvpool generate --format vecinfer2 --max-tokens 120 --prompt-file examples/prompt.txt

test: build $(ARM64)  ## Every test: C++, Python, installed package.
	cmake --preset dev
	cmake --build --preset dev
	ctest --preset dev -j$(shell nproc)
	$(PYTEST)
	KVPOOL_KERNELS=ops $(PYTEST) $(PAGED_TESTS)
	$(BIN)/python tests/install/run.py build/wheel build/install

arm64: $(VENV)/.ready  ## The kernels' tests for 64-bit ARM, by a cross compiler and QEMU.
	cmake --preset arm64
	cmake --build --preset arm64
	ctest --preset arm64 -j$(shell nproc)

cuda: $(VENV)/.ready  ## The CUDA kernels and what runs on them, compiled; no GPU is asked for.
	scripts/unpack_mlx_cuda.sh $(BIN)/python
	CUDACXX="$$(scripts/nvcc.sh $(BIN)/python)" cmake --preset cuda
	cmake --build --preset cuda --target cuda_test llama_decode

fuzz:  ## The fuzzers, an hour each; needs Clang.
	cmake --preset fuzz
	cmake --build --preset fuzz
	for target in decode levels validate; do build/fuzz/fuzz/fuzz_$$target -max_total_time=3600 || exit; done

build: build/.installed  ## kvpool in .venv.

build/.installed: $(VENV)/.ready $(SOURCES)
	@echo "==> building kvpool and installing it into $(VENV)"
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation \
	  --wheel-dir build/wheel .
	$(BIN)/python -m pip install --disable-pip-version-check build/wheel/kvpool-*.whl
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --force-reinstall \
	  --quiet build/wheel/kvpool-*.whl
	@touch $@

setup: $(VENV)/.ready  ## System packages and .venv.

$(VENV)/.ready: scripts/setup.sh requirements-dev.txt
	scripts/setup.sh $(PYTHON)
	@mkdir -p build && touch $@

bench: build  ## The tables of docs/performance.md, beside the Python peer and mlx_lm's cache; a missed target ends none.
	cmake --preset release
	cmake --build --preset release
	-$(BIN)/python bench/pool.py
	-$(BIN)/python bench/attention.py
	-build/release/bench/attention_bench all
	-$(BIN)/python bench/decode.py
	-$(BIN)/python bench/decode.py --dtype float16 --contexts 512,8192 --block-sizes 16 --rounds 5

llama: build  ## CPU attention beside llama.cpp's, which is compiled first.
	test -d build/llama || $(BIN)/python -m pip install --no-deps --target build/llama llama-cpp-python==0.3.36 diskcache
	PYTHONPATH=build/llama $(BIN)/python bench/beside_llama.py

peers: build  ## The Python peer's own tests of the same classes, on kvpool.
	$(BIN)/python tests/peers/run.py build/peers

stubs: build  ## python/kvpool/_core.pyi, from the installed extension.
	$(BIN)/python -m nanobind.stubgen -m kvpool._core -o python/kvpool/_core.pyi

clean:
	rm -rf build
