"""The command ``kvpool``."""
