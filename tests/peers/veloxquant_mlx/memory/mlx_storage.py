from kvpool import MLXBlockStorage

__all__ = ["MLXBlockStorage"]
