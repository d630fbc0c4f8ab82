#!/usr/bin/env bash
# Installs what is missing for building and testing: Debian packages, then .venv.
#   setup.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}

say() { printf '==> %s\n' "$*"; }

missing_packages() {
  local wanted=(g++ cmake ninja-build libgtest-dev libgmock-dev librapidcheck-dev libbenchmark-dev)
  wanted+=(libopenblas0-pthread)
  "$python" -c 'import ensurepip, venv' 2>/dev/null || wanted+=(python3-venv)
  "$python" -c 'import os, sysconfig as s; os.stat(s.get_paths()["include"] + "/Python.h")' \
    2>/dev/null || wanted+=(python3-dev)
  [ "$(uname -m)" != x86_64 ] || wanted+=(g++-aarch64-linux-gnu qemu-user-static googletest)
  local package
  for package in "${wanted[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok' || echo "$package"
  done
}

if command -v dpkg-query >/dev/null; then
  mapfile -t missing < <(missing_packages)
  if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  fi
else
  say "not Debian: needs a C++20 compiler, CMake 3.24, Ninja, GoogleTest, RapidCheck, Google Benchmark"
fi

if [ ! -x .venv/bin/python ]; then
  say "making .venv"
  "$python" -m venv .venv
fi
say "installing Python packages"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
