"""A pytest plugin that hides installed packages: those that GPUOPT_HIDDEN names, with commas."""

import os
import sys
from importlib.machinery import PathFinder

HIDDEN = os.environ.get("GPUOPT_HIDDEN", "").split(",")


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        return None if fullname in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
