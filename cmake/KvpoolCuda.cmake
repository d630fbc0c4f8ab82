# The CUDA kernels and the backend that launches them, where MLX is the CUDA one and nvcc is there.
if(KVPOOL_CUDA STREQUAL "AUTO")
  set(build_cuda OFF)
  if(KVPOOL_MLX_IS_CUDA)
    if(NOT CMAKE_CUDA_COMPILER)
      unset(CMAKE_CUDA_COMPILER CACHE)  # Not found the last time.
    endif()
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(build_cuda ON)
    else()
      message(FATAL_ERROR "MLX here is the CUDA one, but there is no nvcc to build kvpool's CUDA kernels with. "
        "Install the CUDA toolkit, or name its compiler in CUDACXX; scripts/nvcc.sh gets one from PyPI:\n"
        "  CUDACXX=\"$(scripts/nvcc.sh python3)\" pip install --no-build-isolation --no-deps .\n"
        "Or build without, and paged caches run on MLX's own ops: KVPOOL_CUDA=OFF "
        "(pip install -C cmake.define.KVPOOL_CUDA=OFF ...).")
    endif()
  endif()
else()
  set(build_cuda "${KVPOOL_CUDA}")
  if(build_cuda AND NOT KVPOOL_MLX_IS_CUDA)
    message(FATAL_ERROR "KVPOOL_CUDA=ON needs MLX's CUDA wheel (pip install \"mlx[cuda13]\"); ${MLX_DIR} is another")
  endif()
endif()
message(STATUS "CUDA kernels: ${build_cuda}")
if(NOT build_cuda)
  target_sources(kvpool PRIVATE src/backend/no_cuda.cpp)
  return()
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has it.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
endif()

add_library(cuda_kernels STATIC
  src/kernels/cuda/attend.cu
  src/kernels/cuda/copy.cu
  src/kernels/cuda/decode.cu
  src/kernels/cuda/decode_int2.cu
  src/kernels/cuda/decode_int4.cu
  src/kernels/cuda/decode_int8.cu
  src/kernels/cuda/decode_kivi2.cu
  src/kernels/cuda/decode_kivi4.cu
  src/kernels/cuda/decode_raw.cu
  src/kernels/cuda/decode_vector_keys2.cu
  src/kernels/cuda/decode_vector_keys4.cu
  src/kernels/cuda/decode_vector_keys8.cu
  src/kernels/cuda/recode.cu
  src/kernels/cuda/tables.cu
  src/kernels/cuda/vectors.cu)
set_target_properties(cuda_kernels PROPERTIES
  OUTPUT_NAME kvpool_cuda_kernels CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON)
target_include_directories(cuda_kernels PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
target_compile_options(cuda_kernels PRIVATE --expt-relaxed-constexpr -Werror=all-warnings)
# libmlx has a CUDA runtime of its own; so have we.
target_link_libraries(cuda_kernels PUBLIC CUDA::cudart_static)

target_sources(kvpool PRIVATE
  src/backend/cuda/attend_op.cpp
  src/backend/cuda/block_ops.cpp
  src/backend/cuda/cuda_backend.cpp
  src/backend/cuda/cuda_op.cpp
  src/backend/cuda/device.cpp
  src/backend/cuda/quantizers.cpp
  src/backend/cuda/table_arena.cpp)
target_include_directories(kvpool SYSTEM PRIVATE
  ${PROJECT_SOURCE_DIR}/src/backend/cuda/include ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(kvpool PRIVATE cuda_kernels kvpool::kernels)
