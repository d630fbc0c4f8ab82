from kvpool import AllocationStats, Block, BlockPoolAllocator, PoolConfig

__all__ = ["AllocationStats", "Block", "BlockPoolAllocator", "PoolConfig"]
