kvpool_test(storage_test kvpool::kvpool
  storage/buffer_pool_limits_test.cpp
  storage/buffer_pool_test.cpp
  storage/buffer_pool_threads_test.cpp)
