"""The sizes of real models, and the rows that a batch looks up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

Shapes = Sequence[tuple[int, ...]]

# By default, what `draw_lookups` draws.
TABLE = (1_000_000, 64)
LOOKUPS = 8192
_ZIPF_EXPONENT = 1.05


def list_resnet50_shapes() -> Iterator[tuple[int, ...]]:
    """Yields the shapes of ResNet-50 with batch normalisation (He et al. 2015, table 1)."""

    def convolution(out: int, into: int, size: int) -> Iterator[tuple[int, ...]]:
        yield out, into, size, size
        yield from [(out,), (out,)]

    yield from convolution(64, 3, 7)
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(width, into, 1)
            yield from convolution(width, width, 3)
            yield from convolution(4 * width, width, 1)
            if block == 0:
                yield from convolution(4 * width, into, 1)
            into = 4 * width
    yield from [(1000, 2048), (1000,)]


def list_gpt2_shapes() -> Iterator[tuple[int, ...]]:
    """Yields the shapes of GPT-2 with 124 M parameters (Radford et al. 2019, table 2).

    The output layer shares its weights with the embedding.
    """
    width, layers = 768, 12
    yield from [(50257, width), (1024, width)]
    for _ in range(layers):
        yield from [(width,), (width,)]
        yield from [(width, 3 * width), (3 * width,), (width, width), (width,)]
        yield from [(width,), (width,)]
        yield from [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    yield from [(width,), (width,)]


def list_llama_layer_shapes() -> Iterator[tuple[int, ...]]:
    """Yields the shapes of one layer of Llama 2 7B (Touvron et al. 2023)."""
    width, inner = 4096, 11008
    yield from [(width, width)] * 4
    yield from [(inner, width), (inner, width), (width, inner)]
    yield from [(width,), (width,)]


def list_dlrm_tables() -> Shapes:
    """Returns the sizes of DLRM's tables for the Kaggle data (Naumov et al. 2019).

    No table is higher than 1,000,000 rows, as with DLRM's `--max-ind-range`.
    """
    heights = (
        *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
        *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
    )
    return [(min(height, 1_000_000), 16) for height in heights]


def shrink(shapes: Iterable[tuple[int, ...]], divisor: int) -> Shapes:
    """Divides each side by a number; it is 1 at least."""
    return [tuple(max(1, side // divisor) for side in shape) for shape in shapes]


def draw_lookups(
    table: tuple[int, int] = TABLE, num_lookups: int = LOOKUPS
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rows, values) of a batch's lookups: few rows occur often, most of them once.

    Row frequencies follow Zipf's law; frequent rows are at random places in the table.
    """
    rng = np.random.default_rng(0)
    height, width = table
    frequency = np.arange(1, height + 1) ** -_ZIPF_EXPONENT
    ranks = rng.choice(height, num_lookups, p=frequency / frequency.sum())
    return rng.permutation(height)[ranks], rng.standard_normal((num_lookups, width), np.float32)
