"""A wide-and-deep classifier, and its gradients by hand, on numpy or any module like it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.array_operators import value_of
from gpuopt.autodiff import embedding_lookup
from gpuopt.backends import backend_for
from gpuopt.demo.digits import NUM_CLASSES, NUM_INTENSITIES, NUM_PIXELS
from gpuopt.device import Device
from gpuopt.indexed_slices import IndexedSlices
from gpuopt.variable import Variable

_NUM_HIDDEN = 48
# TensorFlow's combiner="sqrtn". Without it the table outgrows the deep part under Ftrl and
# AdagradDA, which rebuild their weights: their mean over five folds of the training images falls
# from 97.5% to 95.5%.
_WIDE_SCALE = NUM_PIXELS**-0.5


class WideAndDeep:
    """Scores of ten classes: a sum of embeddings, plus a hidden layer.

    The wide part looks up a row of scores for every (pixel, intensity) pair of an image and adds
    them up, over the root of their number; its gradient is IndexedSlices. The deep part is a dense
    layer with tanh and another on top (Cheng et al. 2016, figure 1).

    Attributes:
        variables: What is trained.
    """

    def __init__(self, device: Device, dtype: np.dtype[Any], seed: int) -> None:
        backend = backend_for(device)
        self._xp = backend.xp
        rng = np.random.default_rng(seed)

        def variable(name: str, *shape: int, scale: float) -> Variable:
            value = rng.normal(scale=scale, size=shape)
            return Variable(value, name=name, dtype=dtype, device=device)

        table_height = NUM_PIXELS * NUM_INTENSITIES
        self._table = variable("embedding", table_height, NUM_CLASSES, scale=0.01)
        self._hidden_kernel = variable(
            "hidden/kernel", NUM_PIXELS, _NUM_HIDDEN, scale=NUM_PIXELS**-0.5
        )
        self._hidden_bias = variable("hidden/bias", _NUM_HIDDEN, scale=0.01)
        self._output_kernel = variable(
            "output/kernel", _NUM_HIDDEN, NUM_CLASSES, scale=_NUM_HIDDEN**-0.5
        )
        self._output_bias = variable("output/bias", NUM_CLASSES, scale=0.01)
        self.variables = [
            self._table,
            self._hidden_kernel,
            self._hidden_bias,
            self._output_kernel,
            self._output_bias,
        ]
        with backend.active():
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
        d_hidden = (d_scores @ _real(self._output_kernel).T) * (1 - hidden * hidden)
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
        wide = _real(embedding_lookup(self._table, rows)).sum(axis=1) * _WIDE_SCALE
        pixels = (images / (NUM_INTENSITIES - 1)).astype(wide.dtype)
        hidden = self._xp.tanh(pixels @ _real(self._hidden_kernel) + _real(self._hidden_bias))
        deep = hidden @ _real(self._output_kernel) + _real(self._output_bias)
        return wide + deep, rows, pixels, hidden

    def _log_probabilities(self, scores: Any) -> Any:
        scores = scores - scores.max(axis=1, keepdims=True)
        return scores - self._xp.log(self._xp.exp(scores).sum(axis=1, keepdims=True))

    def _cross_entropy(self, log_probabilities: Any, labels: Any) -> Any:
        return -log_probabilities[self._xp.arange(len(labels)), labels].mean()


def _real(array: Any) -> Any:
    """What to compute with: 16-bit weights are stored so, but computed with in float32."""
    array = value_of(array)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
