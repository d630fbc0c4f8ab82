#!/usr/bin/env bash
# What bounds the kernels, by Nsight Compute's counters, of the programs in build/cuda:
#   bench/gpu/profile.sh [FORMAT...]      at 196608 tokens; bf16, int4, kivi2, vecinfer2 if none is named
# Then, each alone, MLX's own attention there, and the kernels of a decode step through MLX at 1024.
set -euo pipefail
cd "$(dirname "$0")/../.."
source bench/gpu/libraries.sh
tokens=196608 heads=8

# ncu's table as lines: the kernel's name, then NAME=VALUE of each metric, between tabs.
rows() {
  awk -F'","' '
    /^"ID"/ { for (i = 1; i <= NF; ++i) name[i] = $i; units = 1; next }
    units == 1 { units = 2; next }
    units == 2 {
      line = ""
      for (i = 1; i <= NF; ++i) {
        gsub(/[,"]/, "", $i); gsub(/"/, "", name[i])
        if (name[i] == "Kernel Name") kernel = $i
        if (name[i] ~ /__/) line = line "\t" name[i] "=" $i
      }
      print kernel line
    }'
}
count() { ncu --csv --page raw --print-units base --clock-control none "$@"; }

metrics=(gpu__time_duration.sum dram__bytes_read.sum smsp__inst_executed.sum
  smsp__inst_issued.avg.per_cycle_active sm__cycles_active.avg sm__cycles_active.min sm__cycles_active.max
  sm__cycles_elapsed.max l1tex__data_pipe_lsu_wavefronts_mem_shared.sum
  l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active)
echo "== the decode kernel at 1 x $tokens"
for format in "${@:-bf16 int4 kivi2 vecinfer2}"; do
  for name in $format; do
    count --metrics "$(IFS=,; echo "${metrics[*]}")" -k regex:decode_kernel --launch-skip 1 --launch-count 1 \
      build/cuda/bench/gpu/decode_bench one "$name" 1 $tokens | rows | awk -F'\t' -v name="$name" \
      -v tiles=$((heads * tokens / 16)) '{
        for (i = 2; i <= NF; ++i) { split($i, f, "="); x[f[1]] = f[2] }
        all = x["sm__cycles_elapsed.max"]; shared = "l1tex__data_pipe_lsu_wavefronts_mem_shared."
        printf "%-10s %.1f us, %.2f TB/s from memory; multiprocessors busy for %.2f of the time (%.2f to %.2f); ", \
          name, x["gpu__time_duration.sum"] / 1e3, x["dram__bytes_read.sum"] / x["gpu__time_duration.sum"] / 1e3, \
          x["sm__cycles_active.avg"] / all, x["sm__cycles_active.min"] / all, x["sm__cycles_active.max"] / all
        printf "%.0f instructions a tile, %.2f a cycle while busy; %.0f wavefronts a tile of shared memory, %.0f %%\n", \
          x["smsp__inst_executed.sum"] / tiles, x["smsp__inst_issued.avg.per_cycle_active"], \
          x[shared "sum"] / tiles, x[shared "avg.pct_of_peak_sustained_active"]
      }'
  done
done

# CACHE TOKENS NCU_OPTION...: what runs in each layer: times launched, mean us.
layers() {
  local cache=$1 tokens=$2
  shift 2
  count --cache-control none --metrics gpu__time_duration.sum "$@" \
    build/cuda/bench/gpu/paged_bench "$cache" "1x$tokens" 4 | rows | awk -F'\t' '{
      for (i = 2; i <= NF; ++i) { split($i, f, "="); if (f[1] == "gpu__time_duration.sum") ns = f[2] }
      name = substr($1, 1, 60); n[name]++; sum[name] += ns
    } END { for (name in n) if (n[name] >= 96) printf "%6d %8.1f  %s\n", n[name], sum[name] / n[name] / 1e3, name }'
}
echo "== MLX's own attention at 1 x $tokens"
layers stock $tokens -k regex:'sdpa|lean_reduction'
echo "== kernels of a step through MLX at 1 x 1024"
for cache in stock raw int4 vecinfer2; do
  echo "$cache"
  layers $cache 1024
done
