"""Calls of every numpy function that has a derivative, with every argument that it honours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_rng = np.random.default_rng(0)


@dataclass(frozen=True, eq=False)
class By:
    """An argument to differentiate by."""

    value: np.ndarray


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments of a call, some of them wrapped in `By`, also in lists.

    Attributes:
        then: Applied to the result, before it is differentiated.
        order: Up to which derivatives are checked.
        symmetric: The matrices stay symmetric, as the derivative takes for granted.
    """

    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    then: Callable[[Any], Any] = lambda result: result
    order: int = 2
    symmetric: bool = False


def call(*args: Any, **options: Any) -> Call:
    return Call(args, options)


def real(*shape: int) -> By:
    """Values from -2 to 2, apart from each other and from 0: no step crosses a bend."""
    size = int(np.prod(shape))
    values = _rng.permutation(size) + _rng.uniform(0.3, 0.7, size)
    return By(np.reshape(4 * values / size - 2, shape))


def positive(*shape: int) -> By:
    return By(_rng.uniform(0.5, 1.5, size=shape))


def fraction(*shape: int) -> By:
    return By(_rng.uniform(-0.8, 0.8, size=shape))


def given(*values: Any) -> By:
    return By(np.array(values, dtype=float))


def transposed(*shape: int) -> By:
    """An array whose axes lie in memory in reverse order."""
    return By(_rng.normal(size=shape[::-1]).T)


def definite(*shape: int) -> By:
    a = _rng.normal(size=shape)
    return By(a @ np.swapaxes(a, -1, -2) + 3 * np.eye(shape[-1]))


MASK = np.array([[True, False, True], [True, True, False]])
ROW = np.array([True, False, True])
IDS = np.array([0, 2, 0])
UNARY = {
    real: "negative absolute fabs exp exp2 expm1 sin cos sinh cosh tanh arctan arcsinh rad2deg "
    "degrees deg2rad radians square conjugate",
    positive: "log log2 log10 log1p sqrt reciprocal",
    fraction: "arcsin arccos arctanh tan",
}
BINARY = "add subtract multiply divide maximum minimum fmax fmin logaddexp logaddexp2 arctan2 hypot"

# By numpy's name of the function.
CASES: dict[str, list[Call]] = {
    **{name: [call(make(2, 3))] for make, names in UNARY.items() for name in names.split()},
    **{
        name: [call(real(2, 3), real(3)), call(real(2, 1), real(2, 3)), call(real(2, 3), 0.5)]
        for name in BINARY.split()
    },
    "arccosh": [call(By(np.array([1.5, 2.0, 3.0])))],
    "power": [
        call(real(2, 3), 3),
        call(real(2, 3), 0),
        call(2.0, real(2, 3)),
        call(0.0, positive(3)),
        call(positive(2, 3), real(3)),
        call(real(3), np.array([0, 1, 2])),
    ],
    "remainder": [call(real(2, 3), 0.7), call(positive(3), positive(3))],
    "matmul": [
        call(real(2, 3), real(3, 4)),
        call(real(3), real(3)),
        call(real(3), real(3, 2)),
        call(real(2, 3), real(3)),
        call(real(5, 2, 3), real(3, 4)),
        call(real(3), real(5, 3, 2)),
        call(real(5, 1, 2, 3), real(4, 3, 2)),
    ],
    "sinc": [Call((given(-0.5, 0.0, 0.3, 2.0),), order=1), call(real(3))],
    "nan_to_num": [
        call(real(2, 3), copy=True, nan=1.0, posinf=2.0, neginf=-2.0),
        call(real(2, 3), False),
    ],
    "where": [
        call(MASK, real(2, 3), real(3)),
        call(ROW, real(2, 3), 0.0),
        call(ROW, 1.0, real(2, 3)),
    ],
    "clip": [
        call(real(2, 3), -0.5, 0.5),
        call(real(2, 3), a_min=-0.5, a_max=None),
        call(real(2, 3), max=np.array([0.1, 0.2, 0.3])),
        call(real(3), min=0.0, max=0.5),
    ],
    "astype": [call(real(2, 3), np.float64, copy=False, device="cpu")],
    "copy": [call(real(2, 3), order="F", subok=True)],
    "real": [call(real(2, 3))],
    "imag": [Call((real(2, 3),), then=lambda y: y + 0.0)],
    "angle": [call(real(3)), call(real(3), deg=True)],
    "real_if_close": [call(real(3), tol=10)],
    # Reductions
    "sum": [
        call(real(2, 3)),
        call(real(2, 3, 4), axis=(0, -1)),
        call(real(2, 3), 1, np.float64, keepdims=True),
        call(real(2, 3), axis=0, initial=2.0, where=MASK),
        call(real(2, 3), where=ROW),
        call(real(2, 3), 1, None, None, True),
    ],
    "mean": [
        call(real(2, 3)),
        call(real(2, 3), -1, np.float64, keepdims=True),
        call(real(2, 3), axis=0, where=MASK),
        call(real(2, 3), where=ROW),
    ],
    "prod": [
        call(real(4)),
        call(real(4, 3), axis=1, dtype=np.float64),
        call(real(2, 3, 4), axis=(0, 2), keepdims=True),
        call(real(2, 3), 0, where=MASK, initial=3.0),
        call(given(2.0, 0.0, 3.0)),
        call(given(0.0, 0.0, 3.0, 4.0)),
        call(By(np.array([[2.0, 0.0], [3.0, 4.0], [5.0, 0.0]])), axis=1),
    ],
    "var": [
        call(real(4, 3)),
        call(real(4, 3), 0, np.float64, ddof=1, keepdims=True),
        call(real(2, 3), axis=1, where=MASK),
        call(real(4, 3), correction=1),
        call(real(4, 3), axis=0, mean=np.array([[0.5, 0.0, 1.0]])),
    ],
    "std": [
        call(real(4, 3)),
        call(real(4, 3), 0, np.float64, ddof=1, keepdims=True),
        call(real(2, 3), axis=1, where=MASK),
        call(real(4, 3), correction=1),
        call(real(4, 3), axis=0, mean=np.array([[0.5, 0.0, 1.0]])),
    ],
    **{
        name: [
            call(real(4, 3)),
            call(real(4, 3), axis=1, keepdims=True),
            call(real(4, 3), axis=(0, 1)),
            call(real(2, 3), axis=0, initial=0.01, where=MASK),
            call(real(2, 3), initial=beyond),
            # Elements that do not take part are equal to the extremum.
            call(given(2.0, 2.0, 2.0), where=np.array([True, False, False]), initial=start),
        ]
        for name, start, beyond in (
            ("max", 1.0, 9.0),
            ("amax", 1.0, 9.0),
            ("min", 9.0, -9.0),
            ("amin", 9.0, -9.0),
        )
    },
    "trace": [
        call(real(3, 4)),
        call(real(3, 4), 1, dtype=np.float64),
        call(real(3, 4), offset=-1),
        call(real(3, 2, 4), 1, axis1=2, axis2=0),
    ],
    "average": [
        call(real(2, 3)),
        call(real(2, 3), axis=1, weights=positive(3)),
        call(real(2, 3), weights=positive(2, 3), keepdims=True),
        call(real(2, 3), 0, positive(2), returned=True),
        call(real(2, 3, 4), axis=(2, 0), weights=positive(4, 2)),
    ],
    "cumsum": [
        call(real(2, 3)),
        call(real(2, 3), axis=0),
        call(real(2, 3), -1, np.float64),
    ],
    "diff": [
        call(real(2, 4)),
        call(real(5), n=3),
        call(real(5), 0),
        call(real(2), 2),
        call(real(4, 2), axis=0, prepend=0.5),
        call(real(2, 4), 2, prepend=np.ones((2, 2)), append=np.ones((2, 1))),
    ],
    "gradient": [
        call(real(6)),
        call(real(2)),
        call(real(3), edge_order=2),
        call(real(5), 0.5, edge_order=2),
        call(real(4, 5), 0.5, 2.0),
        call(real(4, 5), axis=1),
        call(real(4, 5), 3.0, axis=(1, 0)),
    ],
    # Shapes
    "reshape": [
        call(real(2, 3), (3, 2)),
        call(real(2, 3), -1, order="F"),
        call(real(2, 3), shape=(3, 2), order="C", copy=True),
        call(transposed(2, 3), 6, "A"),
        call(real(2, 3), 6, "A"),
    ],
    "ravel": [
        call(real(2, 3)),
        call(real(2, 3), order="F"),
        call(transposed(2, 3), "A"),
        call(transposed(2, 3, 2), "K"),
        call(By(np.moveaxis(_rng.normal(size=(2, 3, 4)), 0, 1)), "K"),
    ],
    "expand_dims": [call(real(2, 3), 1), call(real(3), axis=(0, 2))],
    "squeeze": [call(real(1, 3, 1)), call(real(1, 3, 1), axis=2)],
    "atleast_1d": [call(By(np.array(0.5))), call(real(2), By(np.array(0.5)))],
    "atleast_2d": [call(real(3)), call(real(3), real(2, 2))],
    "atleast_3d": [call(real(2, 3)), call(real(3), real(2, 2))],
    "transpose": [call(real(2, 3, 4)), call(real(2, 3, 4), axes=(2, 0, -2))],
    "swapaxes": [call(real(2, 3, 4), 0, 2), call(real(2, 3, 4), axis1=1, axis2=-1)],
    "moveaxis": [
        call(real(2, 3, 4), 0, 2),
        call(real(2, 3, 4), source=(0, 1), destination=(-1, 0)),
    ],
    "rollaxis": [
        call(real(2, 3, 4), 2),
        call(real(2, 3, 4), axis=0, start=2),
        call(real(2, 3, 4), -1, 1),
        call(real(2, 3, 4), 0, -1),
        call(real(2, 3, 4), 1, 3),
    ],
    "roll": [
        call(real(2, 3), 1),
        call(real(2, 3), -1, axis=1),
        call(real(2, 3), shift=(1, 2), axis=(0, 1)),
    ],
    "flipud": [call(real(2, 3))],
    "fliplr": [call(real(2, 3))],
    "rot90": [call(real(2, 3)), call(real(2, 3), 3), call(real(2, 3, 4), k=-1, axes=(2, 0))],
    "split": [
        call(real(4, 3), 2),
        call(real(4, 3), [1, 3]),
        call(real(2, 4), indices_or_sections=2, axis=1),
        call(real(5), [-1]),
    ],
    "array_split": [call(real(5, 2), 3), call(real(2, 5), indices_or_sections=2, axis=-1)],
    "vsplit": [call(real(4, 3), 2)],
    "hsplit": [call(real(2, 4), 2), call(real(4), [1])],
    "dsplit": [call(real(2, 3, 4), 2)],
    "triu": [call(real(3, 4)), call(real(3, 4), k=1)],
    "tril": [call(real(3, 4)), call(real(2, 3, 4), k=-1)],
    "repeat": [
        call(real(2, 3), 2),
        call(real(2, 3), 2, axis=1),
        call(real(3), repeats=[1, 2, 0]),
        call(real(2, 3), [1, 2, 0], -1),
        call(real(1, 3), 2, axis=0),
        call(real(2, 2), [1, 2, 0, 1]),
    ],
    "tile": [
        call(real(2, 3), 2),
        call(real(3), (2, 1)),
        call(real(2, 3), reps=(2, 1, 2)),
        call(real(2, 3, 2), (2,)),
    ],
    "broadcast_to": [
        call(real(2, 1), (5, 2, 3)),
        call(real(3), shape=(2, 3), subok=True),
        call(real(1), 4),
    ],
    "pad": [
        call(real(2, 3), 1),
        call(real(2, 3), ((1, 2), (0, 1)), "constant", constant_values=2.0),
        call(real(2, 3), (1, 2)),
        call(real(2, 3), pad_width=((1, 2),), mode="constant"),
        call(real(2, 3), {-1: (2, 1), 0: 1}),
    ],
    "full": [
        call((2, 3), By(np.array(0.5))),
        call((2, 3), real(3), dtype=np.float64, order="F", device="cpu"),
    ],
    "full_like": [
        call(np.ones((2, 3)), By(np.array(0.5))),
        call(real(2, 3), real(3), np.float64, "C", False, (4, 3), device="cpu"),
    ],
    "linspace": [
        call(By(np.array(0.5)), By(np.array(2.0))),
        call(By(np.array(0.5)), 3.0, 5, endpoint=False),
        call(0.0, real(3), num=4, axis=1, device="cpu"),
        call(real(2, 1), real(3), 3),
    ],
    # Products
    "dot": [
        call(real(*a), real(*b))
        for a in ((), (3,), (2, 3), (4, 2, 3))
        for b in ((), (3,), (3, 5), (4, 3, 5))
    ],
    "inner": [
        call(real(2, 3), real(4, 3)),
        call(real(3), real(2, 4, 3)),
        call(real(2, 3), By(np.array(2.0))),
    ],
    "tensordot": [
        call(real(2), real(3), 0),
        call(real(4, 2, 3), real(2, 3, 5), 2),
        call(real(4, 3), real(3, 5), axes=(-1, 0)),
        call(real(4, 2, 3), real(3, 4, 5), axes=([0, 2], [1, 0])),
    ],
    "outer": [call(real(2), real(3)), call(real(2, 2), real(3, 1)), call(real(2), 3.0)],
    "kron": [
        call(real(2, 3), real(3, 2)),
        call(real(2), real(2, 3)),
        call(real(2, 3), real(2)),
        call(real(2, 2, 2), real(3)),
    ],
    "cross": [
        call(real(4, 3), real(4, 3)),
        call(real(3), real(4, 3)),
        call(real(3, 4), real(4, 3), axisa=0, axisb=1, axisc=0),
        call(real(3, 4), real(3, 1), axis=0),
    ],
    "einsum": [
        call("bij,bjk->bik", real(2, 3, 4), real(2, 4, 2)),
        call("ij,kj", real(2, 3), real(4, 3)),
        call("ij, k -> k", real(2, 3), real(4), optimize=True),
        call("...ij,...jk->...ik", real(2, 3, 4), real(4, 2)),
        call("...i,i...", real(2, 3), real(3, 2)),
        call("i...->...", real(2, 3)),
        call("ij,ij->j", real(2, 1), real(2, 3)),
        call("ij,ij->i", real(2, 3), real(1, 3)),
    ],
    # Elements
    "take": [
        call(real(2, 3), IDS),
        call(real(2, 3), np.array([0, -1, 0]), axis=-1),
        call(real(2, 3), indices=[[0, 1], [1, 1]], axis=0),
        call(real(3), [40, -7], mode="clip"),
        call(real(2, 3), [40, -7], axis=1, mode="wrap"),
        call(real(2, 3), 1),
    ],
    "sort": [
        call(real(5)),
        call(real(4, 3), axis=0, kind="stable"),
        call(real(2, 3, 2), 1, stable=True),
        call(real(2, 3), axis=None),
    ],
    "partition": [
        call(real(9), 3),
        call(real(4, 5), kth=2, axis=0),
        call(real(2, 3), 1, axis=None, kind="introselect"),
    ],
    "diagonal": [
        call(real(3, 4)),
        call(real(2, 3, 4), 1, -1, -2),
        call(real(3, 2, 4), offset=-1, axis1=0, axis2=2),
        call(real(2, 3, 4), 1, 1, 2),
    ],
    "diag": [call(real(3)), call(real(3), k=-1), call(real(3, 4)), call(real(4, 3), k=1)],
    # Arrays made of arrays
    "concatenate": [
        call([real(2, 3), real(2, 1)], axis=-1),
        call([real(2, 3), np.ones((1, 3))]),
        call((real(2, 3), real(3)), axis=None),
    ],
    "stack": [call([real(2, 3), real(2, 3)], axis=-1), call([real(), 2.0, real()])],
    "vstack": [call([real(3), real(2, 3)])],
    "hstack": [call([real(3), real(2)]), call([real(2, 3), real(2, 1)])],
    "dstack": [call([real(3), real(3)]), call([real(2, 3), real(2, 3)])],
    "column_stack": [call([real(3), real(3, 2), np.ones(3)])],
    "append": [call(real(2, 3), real(2)), call(real(2, 3), real(1, 3), axis=0)],
    "select": [
        call([ROW, ~ROW], [real(2, 3), real(3)]),
        call([MASK, ROW], [real(2, 3), real(2, 3)], default=2.0),
    ],
    # Linear algebra
    "linalg.inv": [call(definite(3, 3)), call(definite(2, 3, 3))],
    "linalg.pinv": [
        call(real(2, 3)),
        call(real(3, 2), rcond=1e-6),
        call(real(2, 3, 2), rtol=1e-6),
    ],
    "linalg.det": [call(real(3, 3)), call(real(2, 3, 3))],
    "linalg.slogdet": [call(real(3, 3)), call(real(2, 3, 3))],
    "linalg.solve": [
        call(definite(3, 3), real(3)),
        call(definite(3, 3), real(3, 2)),
        call(definite(2, 3, 3), real(3)),
        call(definite(3, 3), real(2, 3, 2)),
        call(definite(2, 3, 3), real(1, 3, 2)),
    ],
    "linalg.cholesky": [
        Call((definite(3, 3),), symmetric=True),
        Call((definite(2, 3, 3),), symmetric=True),
        Call((definite(3, 3),), {"upper": True}, symmetric=True),
    ],
    "linalg.eigh": [call(definite(3, 3)), call(definite(2, 3, 3), UPLO="U")],
    "linalg.eig": [Call((definite(3, 3),), then=lambda y: [y[0], np.abs(y[1])], order=1)],
    "linalg.svd": [
        call(real(3, 3)),
        call(real(3, 2), full_matrices=False),
        call(real(2, 2, 3), False),
        call(real(3, 4), compute_uv=False),
    ],
    "linalg.norm": [
        call(real(3)),
        call(real(2, 3, 2)),
        call(real(2, 3), axis=0, keepdims=True),
        call(real(2, 3), "fro"),
        call(real(2, 3), "fro", (1, 0), True),
        call(real(2, 3), "nuc"),
        call(real(2, 3, 4), ord="nuc", axis=(2, 0)),
        call(real(3), 2),
        call(real(2, 3), 1, axis=1),
        call(real(3), 3),
        call(real(3), 0.5),
        call(real(2, 3), np.inf, axis=0),
        call(real(3), -np.inf),
    ],
    # Fourier transforms
    **{
        f"fft.{name}": [
            call(real(5)),
            call(real(2, 6), n=4),
            call(real(6, 2), 8, axis=0, norm="ortho"),
            call(real(6), norm="forward"),
            call(real(7), n=6, norm="backward"),
        ]
        for name in ("fft", "ifft", "rfft", "irfft")
    },
    **{
        f"fft.{name}2": [
            call(real(4, 5)),
            call(real(2, 3, 4), s=(5, 3), axes=(2, 0), norm="ortho"),
            call(real(3, 4), (2, 6), norm="forward"),
        ]
        for name in ("fft", "ifft", "rfft", "irfft")
    },
    **{
        f"fft.{name}n": [
            call(real(2, 3, 4)),
            call(real(2, 3, 4), s=(5, 3), axes=(2, 0), norm="ortho"),
            call(real(2, 5), axes=(0, 1), norm="forward"),
        ]
        for name in ("fft", "ifft", "rfft", "irfft")
    },
    "fft.fftshift": [call(real(5)), call(real(2, 5), axes=1)],
    "fft.ifftshift": [call(real(5)), call(real(2, 5), axes=1)],
}

_BUFFER = np.zeros(())
# Arguments that are refused, each with a value that is not the default.
REFUSED: dict[str, dict[str, Any]] = {
    "matmul": {"axes": [(0, 1)] * 3, "axis": 0, "keepdims": True},
    "reshape": {},
    "sum": {"out": _BUFFER},
    "mean": {"out": _BUFFER},
    "prod": {"out": _BUFFER},
    "var": {"out": _BUFFER},
    "std": {"out": _BUFFER},
    "max": {"out": _BUFFER},
    "amax": {"out": _BUFFER},
    "min": {"out": _BUFFER},
    "amin": {"out": _BUFFER},
    "trace": {"out": _BUFFER},
    "cumsum": {"out": np.zeros(6)},
    "clip": {"out": np.zeros((2, 3)), "where": MASK},
    "full": {"like": np.zeros(2)},
    "linspace": {"retstep": True, "dtype": np.float32},
    "dot": {"out": _BUFFER},
    "outer": {"out": np.zeros((2, 3))},
    "einsum": {"out": np.zeros((2, 3, 2)), "dtype": np.float64, "order": "F", "casting": "no"},
    "take": {"out": np.zeros(3)},
    "sort": {"order": "f", "descending": True},  # the latter from numpy 2.5 on
    "partition": {"order": "f"},
    "concatenate": {"out": np.zeros((2, 4)), "dtype": np.float64, "casting": "no"},
    "stack": {"out": np.zeros((2, 3, 2)), "dtype": np.float64, "casting": "no"},
    "vstack": {"dtype": np.float64, "casting": "no"},
    "hstack": {"dtype": np.float64, "casting": "no"},
    "pad": {"mode": "edge", "stat_length": 1, "end_values": 1, "reflect_type": "odd"},
    "linalg.pinv": {"hermitian": True},
    "linalg.svd": {"hermitian": True, "full_matrices": True},
    "linalg.norm": {"ord": 0},
    **{f"fft.{name}": {"out": np.zeros(3, complex)} for name in ("fft", "ifft", "rfft", "irfft")},
    **{f"fft.{name}2": {"out": _BUFFER} for name in ("fft", "ifft", "rfft", "irfft")},
    **{f"fft.{name}n": {"out": _BUFFER} for name in ("fft", "ifft", "rfft", "irfft")},
}
# The same for every ufunc.
REFUSED_OF_UFUNCS: dict[str, Any] = {
    "out": np.zeros((2, 3)),
    "where": MASK,
    "casting": "unsafe",
    "order": "F",
    "dtype": np.float32,
    "subok": False,
    "signature": "d->d",
}
