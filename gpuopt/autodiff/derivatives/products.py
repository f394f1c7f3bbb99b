"""Derivatives of products of vectors, matrices and tensors."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np

from gpuopt.autodiff.derivatives.broadcasting import Vjp, inverse_order, shape_of, summed_to
from gpuopt.autodiff.derivatives.registry import derivative, derivative_by_position


def _matmul_vjp(argnum: int) -> Callable[..., Vjp]:
    def make(ans: Any, x1: Any, x2: Any) -> Vjp:
        mine, other = (x1, x2) if argnum == 0 else (x2, x1)
        is_row, is_column = np.ndim(x1) == 1, np.ndim(x2) == 1

        def vjp(g: Any) -> Any:
            if is_row:
                g = np.expand_dims(g, -1 if is_column else -2)
            if is_column:
                g = np.expand_dims(g, -1)
            factor = np.swapaxes(_as_matrix(other, is_row if argnum else is_column, argnum), -1, -2)
            product = np.matmul(factor, g) if argnum else np.matmul(g, factor)
            if is_column if argnum else is_row:
                product = np.squeeze(product, -1 if argnum else -2)
            return product

        return summed_to(mine, vjp)

    return make


def _as_matrix(x: Any, is_vector: bool, argnum: int) -> Any:
    """Makes the first factor's vector a row, and the second's a column."""
    x = np.asarray(x) if isinstance(x, list | tuple) else x
    return np.expand_dims(x, 0 if argnum else 1) if is_vector else x


def _dot_vjp(argnum: int) -> Callable[..., Vjp]:
    def make(ans: Any, a: Any, b: Any) -> Vjp:
        ndim_a, ndim_b = np.ndim(a), np.ndim(b)
        if ndim_a == 0 or ndim_b == 0:
            return _product_vjp(argnum)(ans, a, b)
        return _tensordot_vjp(argnum)(ans, a, b, ([ndim_a - 1], [max(0, ndim_b - 2)]))

    return make


def _inner_vjp(argnum: int) -> Callable[..., Vjp]:
    def make(ans: Any, a: Any, b: Any) -> Vjp:
        if np.ndim(a) == 0 or np.ndim(b) == 0:
            return _product_vjp(argnum)(ans, a, b)
        return _tensordot_vjp(argnum)(ans, a, b, ([-1], [-1]))

    return make


def _product_vjp(argnum: int) -> Callable[..., Vjp]:
    """Of a product with a number."""

    def make(ans: Any, a: Any, b: Any) -> Vjp:
        mine, other = (a, b) if argnum == 0 else (b, a)
        return summed_to(mine, lambda g: g * other)

    return make


def _tensordot_vjp(argnum: int) -> Callable[..., Vjp]:
    def make(ans: Any, a: Any, b: Any, axes: Any = 2) -> Vjp:
        ndim_a, ndim_b = np.ndim(a), np.ndim(b)
        if np.ndim(axes) == 0:
            summed_a, summed_b = list(range(ndim_a - axes, ndim_a)), list(range(axes))
        else:
            summed_a, summed_b = _axis_list(axes[0], ndim_a), _axis_list(axes[1], ndim_b)
        free_a = [i for i in range(ndim_a) if i not in summed_a]
        free_b = [i for i in range(ndim_b) if i not in summed_b]

        def by_a(g: Any) -> Any:
            of_g = list(range(len(free_a), len(free_a) + len(free_b)))
            product = np.tensordot(g, b, axes=(of_g, free_b))
            order = free_a + [i for _, i in sorted(zip(summed_b, summed_a, strict=True))]
            return np.transpose(product, inverse_order(order))

        def by_b(g: Any) -> Any:
            product = np.tensordot(g, a, axes=(list(range(len(free_a))), free_a))
            order = free_b + [i for _, i in sorted(zip(summed_a, summed_b, strict=True))]
            return np.transpose(product, inverse_order(order))

        return summed_to(a, by_a) if argnum == 0 else summed_to(b, by_b)

    return make


def _axis_list(axes: Any, ndim: int) -> list[int]:
    return [int(axis) % ndim for axis in (axes if np.ndim(axes) else [axes])]


def _outer_vjp(argnum: int) -> Callable[..., Vjp]:
    def make(ans: Any, a: Any, b: Any) -> Vjp:
        mine, other = (a, b) if argnum == 0 else (b, a)
        shape = shape_of(mine)

        def vjp(g: Any) -> Any:
            if np.ndim(other) == 0:
                return np.reshape(g * other, shape)
            flat = np.ravel(other)
            return np.reshape(np.dot(g, flat) if argnum == 0 else np.dot(flat, g), shape)

        return summed_to(mine, vjp)

    return make


def _kron_vjp(argnum: int) -> Callable[..., Vjp]:
    def make(ans: Any, a: Any, b: Any) -> Vjp:
        mine, other = (a, b) if argnum == 0 else (b, a)
        ndim = max(np.ndim(a), np.ndim(b))
        sizes_a, sizes_b = (
            (1,) * (ndim - np.ndim(factor)) + tuple(np.shape(factor)) for factor in (a, b)
        )
        interleaved = [n for pair in zip(sizes_a, sizes_b, strict=True) for n in pair]
        # The axes of `other` in the interleaved result.
        summed = list(range(1 - argnum, 2 * ndim, 2))

        def vjp(g: Any) -> Any:
            factor = np.reshape(other, sizes_b if argnum == 0 else sizes_a)
            product = np.tensordot(np.reshape(g, interleaved), factor, (summed, list(range(ndim))))
            return np.reshape(product, shape_of(mine))

        return summed_to(mine, vjp)

    return make


def _cross_vjp(argnum: int) -> Callable[..., Vjp]:
    def make(
        ans: Any,
        a: Any,
        b: Any,
        axisa: int = -1,
        axisb: int = -1,
        axisc: int = -1,
        axis: int | None = None,
    ) -> Vjp:
        if axis is not None:
            axisa = axisb = axisc = axis
        if np.shape(a)[axisa] != 3 or np.shape(b)[axisb] != 3:
            raise NotImplementedError("the derivative of numpy.cross needs vectors of length 3")
        mine, own_axis = (a, axisa) if argnum == 0 else (b, axisb)
        to_own = summed_to(np.moveaxis(mine, own_axis, -1))

        def vjp(g: Any) -> Any:
            g = np.moveaxis(g, axisc, -1)
            if argnum == 0:
                product = np.cross(np.moveaxis(b, axisb, -1), g)
            else:
                product = np.cross(g, np.moveaxis(a, axisa, -1))
            return np.moveaxis(to_own(product), -1, own_axis)

        return vjp

    return make


for _function, _make in (
    (anp.matmul, _matmul_vjp),
    (anp.dot, _dot_vjp),
    (anp.inner, _inner_vjp),
    (anp.tensordot, _tensordot_vjp),
    (anp.outer, _outer_vjp),
    (anp.kron, _kron_vjp),
    (anp.cross, _cross_vjp),
):
    derivative(_function, _make(0), _make(1))


def _einsum_vjp(position: int, ans: Any, operands: Sequence[Any], options: Any) -> Vjp:
    if not isinstance(operands[0], str):
        raise NotImplementedError(
            "the derivative of numpy.einsum needs subscripts as text, as in "
            "einsum('ij,jk->ik', a, b)"
        )
    arrays = list(operands[1:])
    letters, output = _subscripts(operands[0], [np.ndim(array) for array in arrays])
    mine = arrays.pop(position - 1)
    wanted = letters.pop(position - 1)
    if len(set(wanted)) != len(wanted):
        raise NotImplementedError(
            f"the derivative of numpy.einsum by {wanted!r}, which repeats an index; use "
            "numpy.diagonal"
        )
    known = set("".join([output, *letters]))
    reached = "".join(letter for letter in wanted if letter in known)
    subscripts = f"{','.join([output, *letters])}->{reached}"
    shape = shape_of(mine)

    def vjp(g: Any) -> Any:
        product = np.einsum(subscripts, g, *arrays)
        sizes = dict(zip(reached, product.shape, strict=True))
        product = np.reshape(product, [sizes.get(letter, 1) for letter in wanted])
        stretched = tuple(map(max, product.shape, shape))
        return product if stretched == product.shape else np.broadcast_to(product, stretched)

    return summed_to(mine, vjp)


def _subscripts(text: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """Returns the letters of each operand and of the result, with '...' written out."""
    inputs, arrow, output = text.replace(" ", "").partition("->")
    operands = inputs.split(",")
    free = iter(letter for letter in string.ascii_letters if letter not in text)
    missing = [
        ndim - len(letters) + 3 if "..." in letters else 0
        for letters, ndim in zip(operands, ndims, strict=True)
    ]
    rest = "".join(next(free) for _ in range(max(missing)))
    if not arrow:
        joined = "".join(operands).replace(".", "")
        output = "..." * ("..." in inputs) + "".join(
            sorted(letter for letter in set(joined) if joined.count(letter) == 1)
        )
    letters = [
        operand.replace("...", rest[len(rest) - count :])
        for operand, count in zip(operands, missing, strict=True)
    ]
    return letters, output.replace("...", rest)


derivative_by_position(anp.einsum, _einsum_vjp, "optimize")
