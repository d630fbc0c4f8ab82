"""The peer's module names, so that its tests run on kvpool."""
