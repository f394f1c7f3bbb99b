"""The rules of loss scales, as their documentation says them."""

from __future__ import annotations

import numpy as np


class HostRule:
    """A manager's rule.

    Args:
        kind: "fixed", "exponential" or "dynamic", with the arguments of `managers`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.scale = np.float32({"fixed": 1024, "exponential": 8, "dynamic": 4}[kind])
        self.good = self.bad = 0

    def step(self, is_finite: bool) -> None:
        every, up, patience = {"exponential": (2, 3.0, 2), "dynamic": (3, 2.5, 1)}.get(
            self.kind, (10**9, 1.0, 10**9)
        )
        if is_finite:
            self.good += 1
            if self.good == every:
                self.good = self.bad = 0
                self.scale = np.float32(self.scale * np.float32(up))
            return
        self.good = 0
        self.bad += 1
        if self.bad == patience:
            self.bad = 0
            smaller = {
                "exponential": self.scale * np.float32(0.7),
                "dynamic": self.scale / np.float32(2.5),
            }[self.kind]
            self.scale = max(np.float32(1), np.float32(smaller))
