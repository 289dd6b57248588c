"""Acting on modules of an engine once they are imported, without importing them."""

from __future__ import annotations

import importlib.abc
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class ImportWatch(importlib.abc.MetaPathFinder):
    """Calls a function for each of some modules: at once for those that are imported, else later.

    Later is right behind the module's own code, before whoever imports it sees it: names that are
    imported by value from it are then what the function has put there.

    Args:
        actions: by the module's name.
    """

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self._actions = dict(actions)
        self._finding = threading.local()

    def start(self) -> None:
        """Look at what is imported, and from now on at each import."""
        sys.meta_path.insert(0, self)
        for name in list(self._actions):
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            if module is not None and not getattr(spec, "_initializing", False):
                self._act(module)

    def stop(self) -> None:
        """Look at no further import."""
        self._actions.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that tells us when it is done."""
        if fullname not in self._actions or getattr(self._finding, "name", "") == fullname:
            return None  # the second is another watch, which asks us for the same
        self._finding.name = fullname
        try:
            return self._found(fullname, path, target)
        finally:
            self._finding.name = ""

    def _found(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find and find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._listen(spec.loader, fullname)
                return spec
        return None

    def _listen(self, loader: Any, name: str) -> None:
        """Follow a loader's own ``exec_module``: the loader stays what it is to everybody else."""
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            if module.__name__ == name:
                vars(loader).pop("exec_module", None)
                self._act(module)

        loader.exec_module = exec_module

    def _act(self, module: ModuleType) -> None:
        action = self._actions.pop(module.__name__, None)
        if action is not None:
            action(module)
