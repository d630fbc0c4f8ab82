kvpool_test(storage_test kvpool::kvpool
  storage/block_storage_errors_test.cpp
  storage/block_storage_formats_test.cpp
  storage/block_storage_life_test.cpp
  storage/block_storage_order_test.cpp
  storage/buffer_pool_limits_test.cpp
  storage/buffer_pool_test.cpp
  storage/buffer_pool_threads_test.cpp)
