"""A wide-and-deep classifier, with gradients written by hand, for numpy and CuPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpuopt.autodiff import embedding_lookup
from gpuopt.backends import backend_for
from gpuopt.demo.digits import NUM_CLASSES, NUM_INTENSITIES, NUM_PIXELS
from gpuopt.device import Device
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.operators import value_of
from gpuopt.variables.variable import Variable

_NUM_HIDDEN = 48
# TensorFlow's combiner="sqrtn". Without this scale, the table outgrows the deep part under Ftrl and
# AdagradDA, which compute weights anew in each step: their mean accuracy over five folds of the
# training images falls from 97.5% to 95.5%.
_WIDE_SCALE = NUM_PIXELS**-0.5


class WideAndDeep:
    """Scores for ten classes: a sum of embeddings, plus a network with one hidden layer.

    The wide part looks up a row of scores for every (pixel, intensity) pair of an image and
    divides the sum of these rows by the square root of their number; its gradient is
    IndexedSlices. The deep part is a dense layer with tanh and a second dense layer (Cheng et al.
    2016, figure 1).

    Attributes:
        variables: The trained variables.
    """

    def __init__(
        self,
        device: Device,
        dtype: np.dtype[Any],
        seed: int,
        new_variable: Callable[..., Variable] = Variable,
    ) -> None:
        backend = backend_for(device)
        self._xp = backend.xp
        rng = np.random.default_rng(seed)

        def make_variable(name: str, *shape: int, scale: float) -> Variable:
            value = rng.normal(scale=scale, size=shape)
            return new_variable(value, name=name, dtype=dtype, device=device)

        table_height = NUM_PIXELS * NUM_INTENSITIES
        self._table = make_variable("embedding", table_height, NUM_CLASSES, scale=0.01)
        self._hidden_weights = make_variable(
            "hidden/weights", NUM_PIXELS, _NUM_HIDDEN, scale=NUM_PIXELS**-0.5
        )
        self._hidden_bias = make_variable("hidden/bias", _NUM_HIDDEN, scale=0.01)
        self._output_weights = make_variable(
            "output/weights", _NUM_HIDDEN, NUM_CLASSES, scale=_NUM_HIDDEN**-0.5
        )
        self._output_bias = make_variable("output/bias", NUM_CLASSES, scale=0.01)
        self.variables = [
            self._table,
            self._hidden_weights,
            self._hidden_bias,
            self._output_weights,
            self._output_bias,
        ]
        with backend.enter():
            self._first_row = self._xp.arange(NUM_PIXELS) * NUM_INTENSITIES

    def scores(self, images: Any) -> Any:
        """Returns [num_images, 10] scores of [num_images, 64] intensities."""
        return self._forward(images)[0]

    def loss(self, images: Any, labels: Any) -> Any:
        """Returns the mean cross-entropy, as `compute_gradients` differentiates it.

        Args:
            images: [batch_size, 64] intensities.
            labels: [batch_size] classes.
        """
        return self._cross_entropy(self._log_probabilities(self.scores(images)), labels)

    def loss_and_gradients(
        self, images: Any, labels: Any
    ) -> tuple[float, list[tuple[Any, Variable]]]:
        """Returns `loss` and its (gradient, variable) pairs, written by hand."""
        xp = self._xp
        scores, rows, pixels, hidden = self._forward(images)
        batch_size = len(labels)
        log_probabilities = self._log_probabilities(scores)
        loss = float(self._cross_entropy(log_probabilities, labels))

        d_scores = xp.exp(log_probabilities)
        d_scores[xp.arange(batch_size), labels] -= 1
        d_scores /= batch_size
        # Each pixel of an image adds its row to the scores, so each row receives their gradient.
        d_rows = xp.repeat(d_scores * _WIDE_SCALE, NUM_PIXELS, axis=0)
        d_hidden = (d_scores @ _as_real(self._output_weights).T) * (1 - hidden * hidden)
        gradients = [
            d_rows,
            pixels.T @ d_hidden,
            d_hidden.sum(axis=0),
            hidden.T @ d_scores,
            d_scores.sum(axis=0),
        ]
        dtype = self._table.dtype
        d_table, *dense = [gradient.astype(dtype, copy=False) for gradient in gradients]
        slices = IndexedSlices(d_table, rows.reshape(-1), self._table.shape)
        return loss, list(zip([slices, *dense], self.variables, strict=True))

    def _forward(self, images: Any) -> tuple[Any, Any, Any, Any]:
        rows = images + self._first_row
        wide = _as_real(embedding_lookup(self._table, rows)).sum(axis=1) * _WIDE_SCALE
        pixels = (images / (NUM_INTENSITIES - 1)).astype(wide.dtype)
        # numpy's functions take CuPy's arrays, and what is traced in a loss; CuPy's take no traces.
        hidden = np.tanh(pixels @ _as_real(self._hidden_weights) + _as_real(self._hidden_bias))
        deep = hidden @ _as_real(self._output_weights) + _as_real(self._output_bias)
        return wide + deep, rows, pixels, hidden

    def _log_probabilities(self, scores: Any) -> Any:
        scores = scores - scores.max(axis=1, keepdims=True)
        return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))

    def _cross_entropy(self, log_probabilities: Any, labels: Any) -> Any:
        return -log_probabilities[self._xp.arange(len(labels)), labels].mean()


def _as_real(array: Any) -> Any:
    """Returns the array to compute with: 16-bit weights are converted to float32."""
    array = value_of(array)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
