"""Models from files: GGUF of the Llama family and mlx_lm folders, checked before they are loaded."""

from .convert import convert
from .errors import ModelError
from .info import ModelInfo
from .load import inspect, load

__all__ = ["ModelError", "ModelInfo", "convert", "inspect", "load"]
