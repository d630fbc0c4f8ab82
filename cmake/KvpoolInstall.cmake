# cmake --install: headers, libraries and a package that find_package(kvpool) finds.
include(CMakePackageConfigHelpers)

install(DIRECTORY include/kvpool DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS pool EXPORT kvpool_pool_targets)
install(EXPORT kvpool_pool_targets NAMESPACE kvpool::
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvpool FILE kvpool_pool_targets.cmake)
if(KVPOOL_WITH_MLX)
  install(TARGETS kernels kvpool EXPORT kvpool_targets)
  if(TARGET cuda_kernels)
    install(TARGETS cuda_kernels EXPORT kvpool_targets)
  endif()
  install(EXPORT kvpool_targets NAMESPACE kvpool::
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvpool FILE kvpool_targets.cmake)
endif()
configure_package_config_file(cmake/kvpoolConfig.cmake.in kvpoolConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvpool)
write_basic_package_version_file(kvpoolConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  cmake/ImportMLX.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/kvpoolConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/kvpoolConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvpool)
