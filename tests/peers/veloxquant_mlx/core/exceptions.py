from kvpool import BlockPoolExhaustedError, OwnerAlreadyActiveError

__all__ = ["BlockPoolExhaustedError", "OwnerAlreadyActiveError"]
