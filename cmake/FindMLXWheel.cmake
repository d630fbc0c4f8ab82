# Finds MLX: MLX_DIR if it is given, else the wheel of the Python interpreter.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter ${KVPOOL_PYTHON_COMPONENTS})
if(NOT MLX_DIR)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('mlx.core').origin).parent / 'share/cmake/MLX')"
    OUTPUT_VARIABLE MLX_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_VARIABLE mlx_error RESULT_VARIABLE mlx_failed)
  if(mlx_failed)
    message(FATAL_ERROR "kvpool builds against MLX's wheel, and ${Python_EXECUTABLE} has none:\n"
      "${mlx_error}\nInstall it (pip install \"mlx[cpu]\"), or set MLX_DIR.")
  endif()
endif()
include(ImportMLX)
# Warnings in MLX's headers are not ours.
get_target_property(mlx_includes mlx INTERFACE_INCLUDE_DIRECTORIES)
set_target_properties(mlx PROPERTIES INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${mlx_includes}")
file(STRINGS "${MLX_INCLUDE_DIRS}/mlx/version.h" mlx_numbers REGEX "define MLX_VERSION_(MAJOR|MINOR|PATCH)")
string(REGEX REPLACE "[^0-9;]" "" mlx_numbers "${mlx_numbers}")
string(REPLACE ";" "." KVPOOL_MLX_VERSION "${mlx_numbers}")
message(STATUS "MLX ${KVPOOL_MLX_VERSION}: ${MLX_DIR}")
