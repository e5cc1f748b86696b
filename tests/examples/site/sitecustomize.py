"""Repair a torchvision that was built for another torch, when it is imported.

Its compiled operators are missing then, and ``import torchvision`` fails, also inside lightning and
transformers. Examples are copied by people with a matching torchvision, so they import it as usual.
Their tests put this folder on PYTHONPATH. Where torchvision can be imported, this does nothing.
"""

import importlib.abc
import importlib.machinery
import sys


class _Repair(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torchvision":
            return None
        self.spec = importlib.machinery.PathFinder.find_spec(name, path)
        if self.spec is None:
            return None
        where = self.spec.submodule_search_locations
        spec = importlib.machinery.ModuleSpec(name, self, origin=self.spec.origin, is_package=True)
        spec.submodule_search_locations, spec.has_location = where, True
        return spec

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        try:
            self.spec.loader.exec_module(module)
        except RuntimeError as error:
            if "torchvision::nms does not exist" not in str(error):
                raise
            from torch.library import Library

            self.library = Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor d, Tensor s, float t) -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]
            self.spec.loader.exec_module(module)


sys.meta_path.insert(0, _Repair())
