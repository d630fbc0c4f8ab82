"""Makes caches of this package known to ``mlx_lm``, which restores them by their class name."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import sys
from types import ModuleType
from typing import Any

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
    """Finds the one module as the finders after this one do, and adds the classes once it has run."""

    def find_spec(self, name, path, target=None) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        later = list(itertools.dropwhile(lambda finder: finder is not self, sys.meta_path))[1:]
        specs = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads the one module as its own loader does, which may be that of other modules too, and adds the classes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _add_to(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
