"""Makes caches of this package known to ``mlx_lm``, which restores them by their class name."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

_MODULE = "mlx_lm.models.cache"
_classes: list[type] = []


def register(cls: type) -> None:
    """Puts ``cls`` among the classes that ``mlx_lm``'s ``load_prompt_cache`` finds by name.

    At once if ``mlx_lm.models.cache`` is imported, else when it will be: importing kvpool imports
    no part of mlx_lm.
    """
    if not _classes:
        sys.meta_path.insert(0, _Finder())
    _classes.append(cls)
    if _MODULE in sys.modules:
        _add_to(sys.modules[_MODULE])


def _add_to(module: ModuleType) -> None:
    for cls in _classes:
        setattr(module, cls.__name__, cls)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module as everyone would, and adds the classes once it has run."""

    def find_spec(self, name, path, target=None) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _add_to(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
