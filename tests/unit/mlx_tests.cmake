kvpool_test(storage_test kvpool::kvpool
  kernels/bit_pack_test.cpp
  storage/block_storage_errors_test.cpp
  storage/block_storage_formats_test.cpp
  storage/block_storage_life_test.cpp
  storage/block_storage_order_test.cpp
  storage/block_storage_threads_test.cpp
  storage/buffer_pool_limits_test.cpp
  storage/buffer_pool_test.cpp
  storage/buffer_pool_threads_test.cpp)
target_include_directories(storage_test PRIVATE ${PROJECT_SOURCE_DIR}/src)

kvpool_test(cache_test kvpool::kvpool
  cache/kv_cache_builder_test.cpp
  cache/pool_backed_kv_cache_test.cpp
  cache/pooled_kv_cache_test.cpp
  cache/standalone_kv_cache_test.cpp
  cache/vecinfer_kv_cache_test.cpp)
target_include_directories(cache_test PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)

kvpool_test(paged_test kvpool::kvpool
  backend/backends_test.cpp
  backend/parts_test.cpp
  backend/cross_product_test.cpp
  backend/shelf_test.cpp
  cache/paged_forks_test.cpp
  cache/paged_kv_cache_test.cpp
  cache/paged_not_finite_test.cpp
  cache/paged_recover_test.cpp
  cache/vecinfer_cache_test.cpp
  calibration/sensitivity_test.cpp
  codec/vecinfer_codebooks_test.cpp
  sequence/aliasing_test.cpp)
target_include_directories(paged_test PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
kvpool_test_cases(paged_test ops.
  "PagedCache.*:PagedAliasing.*:*/VecInferCache.*-*AttentionIs*" KVPOOL_KERNELS=ops)

if(KVPOOL_BUILD_EXAMPLES)
  kvpool_test(examples_test llama_example examples/llama_test.cpp)
  add_test(NAME llama_decode COMMAND llama_decode --shape tiny --tokens 4 --cache stock,raw,int8)
endif()

if(TARGET cuda_kernels)
  kvpool_test(cuda_test kvpool::kvpool backend/cuda_test.cpp)
  target_include_directories(cuda_test PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
endif()
