"""The demo's picture can be read: names stand beside their curves, or above their panels."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.text import Text

from gpuopt.demo.report import save_curves
from gpuopt.demo.settings import NAMES
from gpuopt.demo.train import Result
from gpuopt.device import Device


def curves(name: str, number: int) -> Result:
    accuracies = [(50, 0.5, 0.4), (100, 0.99, 0.97 + number / 1000)]
    return Result(Device.cpu, name, [1 / (step + 1) for step in range(100)], accuracies, 1.0, 0.5)


def texts_of(figure: Figure) -> list[Text]:
    return [each for each in figure.findobj(Text) if each.get_text()]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The pictures that are saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def savefig(figure: Figure, *args: Any, **kwargs: Any) -> None:
        save(figure, *args, **kwargs)
        saved.append(figure)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def test_curves_are_named_at_their_ends_and_no_name_covers_another(
    figures: list[Figure], tmp_path: Path
) -> None:
    names = [f"Optimizer{number}" for number in range(6)]
    results = [curves(name, number) for number, name in enumerate(names)]
    assert save_curves(results, tmp_path / "curves.png")
    [figure] = figures
    for axes in figure.axes:
        labels = [each for each in axes.texts if each.get_text() in names]
        assert sorted(each.get_text() for each in labels) == names
        boxes = sorted((each.get_window_extent() for each in labels), key=lambda box: box.y0)
        assert all(lower.y1 <= upper.y0 for lower, upper in pairwise(boxes))
        assert min(box.x0 for box in boxes) > axes.get_window_extent().x1
    assert figure.axes[1].get_ylim()[0] == 0.9
    assert any("100 steps on cpu" in each.get_text() for each in texts_of(figure))


def test_many_curves_have_a_panel_each(figures: list[Figure], tmp_path: Path) -> None:
    longest = sorted(NAMES, key=len)[-14:]
    names = NAMES if os.environ.get("GPUOPT_FULL") else longest
    assert save_curves([curves(name, 0) for name in names], tmp_path / "curves.png")
    [figure] = figures
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == names
    boxes = [axes.title.get_window_extent() for axes in shown]
    assert not any(one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[at + 1 :])
