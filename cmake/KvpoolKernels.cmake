# The kernels of each instruction set are files with flags of their own.
# GCC takes the undefined operands of its own AVX-512 header for a mistake. Sums of integer products
# run out of AVX2's registers where it puts off adding the products or adds them to each other first.
# Without contraction of a * b + c, every level decodes the same bits. Where loops do not begin with a
# cache line, some per cent of their speed depend on where the linker puts them.
set(KVPOOL_LEVEL_SOURCES src/kernels/levels_generic.cpp src/calibration/nearest_generic.cpp)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(avx2_sources
    src/calibration/nearest_avx2.cpp
    src/kernels/avx2/affine_keys.cpp
    src/kernels/avx2/affine_values.cpp
    src/kernels/avx2/channel_keys.cpp
    src/kernels/avx2/encode.cpp
    src/kernels/avx2/raw.cpp
    src/kernels/avx2/table.cpp
    src/kernels/avx2/vector.cpp)
  set_source_files_properties(${avx2_sources} PROPERTIES COMPILE_OPTIONS
    "-mavx2;-mfma;-mf16c;-ffp-contract=off")
  set_source_files_properties(
    src/kernels/avx2/affine_keys.cpp
    src/kernels/avx2/affine_values.cpp
    src/kernels/avx2/channel_keys.cpp
    PROPERTIES COMPILE_OPTIONS
    "$<$<CXX_COMPILER_ID:GNU>:-fno-tree-reassoc$<SEMICOLON>-fno-tree-ter>;-mavx2;-mfma;-mf16c;-ffp-contract=off")
  set(avx512_sources
    src/calibration/nearest_avx512.cpp
    src/kernels/avx512/affine_keys.cpp
    src/kernels/avx512/affine_values.cpp
    src/kernels/avx512/channel_keys.cpp
    src/kernels/avx512/decode.cpp
    src/kernels/avx512/raw.cpp
    src/kernels/avx512/table.cpp
    src/kernels/avx512/table_keys.cpp
    src/kernels/avx512/vector_keys.cpp
    src/kernels/avx512/vector_values.cpp
    src/kernels/avx512/wide_vector.cpp)
  set_source_files_properties(${avx512_sources} PROPERTIES COMPILE_OPTIONS
    "$<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized$<SEMICOLON>-Wno-maybe-uninitialized$<SEMICOLON>-falign-functions=64$<SEMICOLON>-falign-loops=64>;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512vbmi;-mavx512vnni;-mfma;-mf16c;-ffp-contract=off")
  set(KVPOOL_LEVEL_SOURCES src/kernels/levels_x86.cpp src/calibration/nearest_generic.cpp
    ${avx2_sources} ${avx512_sources})
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  set(neon_sources
    src/kernels/neon/decode.cpp
    src/kernels/neon/integer.cpp
    src/kernels/neon/raw.cpp
    src/kernels/neon/table.cpp)
  set_source_files_properties(${neon_sources} PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
  set(KVPOOL_LEVEL_SOURCES src/kernels/levels_arm64.cpp src/calibration/nearest_generic.cpp
    ${neon_sources})
endif()
# Nor do codebooks and spaces depend on the architecture.
set_source_files_properties(
  src/calibration/bit_allocation.cpp src/calibration/eigen.cpp src/calibration/k_means.cpp
  src/calibration/nearest_generic.cpp src/calibration/transform_fit.cpp
  src/codec/codec.cpp src/codec/space.cpp src/codec/vector_quantizer.cpp
  src/kernels/scalar/affine.cpp src/kernels/scalar/channel.cpp src/kernels/scalar/vector.cpp
  PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
