# The flags that every target of the project is built with.
add_library(kvpool_flags INTERFACE)
target_compile_options(kvpool_flags INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wshadow)
if(KVPOOL_SANITIZE)
  target_compile_options(kvpool_flags INTERFACE
    -fsanitize=${KVPOOL_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(kvpool_flags INTERFACE -fsanitize=${KVPOOL_SANITIZE})
endif()

if(KVPOOL_FUZZ)
  target_compile_options(kvpool_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# kvpool_library(NAME SOURCE...): a static library kvpool::NAME over include/ and src/.
function(kvpool_library name)
  add_library(${name} STATIC ${ARGN})
  add_library(kvpool::${name} ALIAS ${name})
  set_target_properties(${name} PROPERTIES
    OUTPUT_NAME $<IF:$<STREQUAL:${name},kvpool>,kvpool,kvpool_${name}>)
  target_include_directories(${name}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_link_libraries(${name} PRIVATE $<BUILD_INTERFACE:kvpool_flags>)
endfunction()
