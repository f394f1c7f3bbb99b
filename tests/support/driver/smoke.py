"""Tries a CuPy on the driver: arrays, kernels, streams, a matrix product, and steps of gpuopt."""

from __future__ import annotations

import numpy as np

import driver


def main() -> None:
    import cupy

    import gpuopt

    array = cupy.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_allclose((array @ array.T).get(), array.get() @ array.get().T)
    np.testing.assert_allclose(cupy.exp(-array).sum(axis=1).get(), np.exp(-array.get()).sum(axis=1))
    np.testing.assert_array_equal(cupy.sort(-array, axis=1).get(), np.sort(-array.get(), axis=1))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert (array * 2).get(stream=stream)[0, 1] == 2
    gradient = np.linspace(-1, 1, 20, dtype=np.float32).reshape(10, 2)
    rows = np.array([1, 3, 1])
    results = []
    for device in ("gpu:0", "cpu"):
        found = []
        for optimizer in (
            gpuopt.AdamOptimizer(0.1),
            gpuopt.LazyAdamOptimizer(0.1, groups=[gpuopt.ParameterGroup("b", learning_rate=0.2)]),
            gpuopt.LAMBOptimizer(0.1),
            gpuopt.TorchAdamWOptimizer(0.1, cautious=True),
            gpuopt.AdamOptimizer(0.1, slot_dtype="bfloat16"),
        ):
            dense = gpuopt.Variable(gradient, name="a", device=device)
            table = gpuopt.Variable(gradient, name="b", device=device)
            for _ in range(3):
                slices = gpuopt.IndexedSlices(gradient[rows], rows)
                optimizer.apply_gradients([(gradient, dense), (slices, table)])
            found += [dense.numpy(), table.numpy()]
            del dense, table
        results.append(found)
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert not driver.take_reports()
    version = cupy.cuda.runtime.runtimeGetVersion()
    print(f"CuPy {cupy.__version__} for CUDA {version // 1000} works")


if __name__ == "__main__":
    main()
