"""autograd's `scipy.special`, without the rest of its scipy, whose import takes 3 seconds."""

from __future__ import annotations

import sys
from types import ModuleType

import autograd

if "autograd.scipy" not in sys.modules:
    package = ModuleType("autograd.scipy")
    package.__path__ = [f"{autograd.__path__[0]}/scipy"]
    sys.modules["autograd.scipy"] = package

from autograd.scipy.special import logsumexp as logsumexp
