"""Prints how long NVRTC takes for the kernels of one rule, each compiled alone as on first use."""

from __future__ import annotations

import time

from every_kernel import kernels_of_dense_update, kernels_of_sparse_update
from every_optimizer import update_rules
from nvrtc import ARCHITECTURES, compile_together

from gpuopt.backends.cuda.kernel import Kernel


def seconds(kernels: list[Kernel]) -> float:
    begin = time.perf_counter()
    for kernel in kernels:
        compile_together([kernel], ARCHITECTURES[0])
    return time.perf_counter() - begin


def main() -> None:
    rules = update_rules()
    seconds(kernels_of_dense_update(rules[0], "float32"))  # loads NVRTC
    print(f"{'rule':28} dense    sparse   seconds, float32, {ARCHITECTURES[0]}")
    for rule in rules:
        dense = seconds(kernels_of_dense_update(rule, "float32"))
        sparse = seconds(kernels_of_sparse_update(rule, "float32"))
        print(f"{rule.name:28} {dense:5.2f}    {sparse:6.2f}", flush=True)


if __name__ == "__main__":
    main()
