# The kernels of the target's instruction sets: each level is files with flags of their own.
set(KVPOOL_LEVEL_SOURCES src/kernels/levels_generic.cpp)
