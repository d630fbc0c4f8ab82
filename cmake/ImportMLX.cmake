# The target mlx, from MLX_DIR.
# The CUDA wheel's own configuration asks for libraries that only its programs need.
file(READ "${MLX_DIR}/MLXConfig.cmake" mlx_config)
string(REGEX MATCH "if\\(ON\\)[ \n]*find_dependency\\(CUDAToolkit" KVPOOL_MLX_IS_CUDA "${mlx_config}")
if(KVPOOL_MLX_IS_CUDA)
  get_filename_component(mlx_prefix "${MLX_DIR}/../../.." ABSOLUTE)
  set(MLX_INCLUDE_DIRS "${mlx_prefix}/include")
  add_library(mlx SHARED IMPORTED)
  set_target_properties(mlx PROPERTIES
    IMPORTED_LOCATION "${mlx_prefix}/lib/libmlx.so"
    INTERFACE_INCLUDE_DIRECTORIES "${MLX_INCLUDE_DIRS}"
    INTERFACE_LINK_OPTIONS
      "$<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:LINKER:--unresolved-symbols=ignore-in-shared-libs>")
else()
  find_package(MLX CONFIG REQUIRED)
endif()
