"""docs/optimizers.md and its pictures show every exported optimizer as it is."""

from __future__ import annotations

import gallery
import numpy as np
import peers
import pytest
import surfaces
import tables
from optimizer_page import entries, exports, forms, measured, peer_defaults
from optimizer_page.forms import Form

from gpuopt.demo.settings import NAMES, TUNED

pytestmark = pytest.mark.contract

PICTURES = [*(surface.name for surface in surfaces.SURFACES), gallery.DIGITS]
FORMS = [
    pytest.param(form, id=str(form.ours))
    for family in forms.FAMILIES
    for form in family.forms
    if form.ours
]


def test_entries_are_of_exported_optimizers_and_peers_whose_defaults_are_known() -> None:
    exported = {optimizer.__name__ for optimizer in exports.optimizers()}
    assert set(entries.ENTRIES) == exported, (
        f"{entries.WHERE} has an Entry(...) for each: its panel in the pictures, and the "
        "optimizers of torch, optax, Keras or TensorFlow that it corresponds to; "
        f"then run {peer_defaults.COMMAND} (make test-peers makes its environment), "
        f"{tables.COMMAND} and {gallery.COMMAND}"
    )
    known = set(peer_defaults.all_signatures())
    assert set(entries.every_peer()) == known, f"run {peer_defaults.COMMAND}"


def test_defaults_of_an_optimizer_of_tensorflows_are_tensorflows(
    subtests: pytest.Subtests,
) -> None:
    for optimizer in exports.optimizers():
        arguments = exports.own_arguments(optimizer)
        ours = {each.name: peer_defaults.as_toml(each.default) for each in arguments}
        for peer in entries.ENTRIES[optimizer.__name__].peers:
            if peer.startswith("tf."):
                with subtests.test(peer):
                    theirs = peer_defaults.all_signatures()[peer]
                    assert {argument: ours.get(argument) for argument in theirs} == theirs


def test_what_is_kept_and_written_is_counted_by_parameters_and_rows() -> None:
    found = measured.Measured(
        {"m": (24, 4), "v": (6, 4)},
        ("step",),
        (),
        {"": (1, 4), "m": (1, 4), "v": (0, 1, 2, 3, 4, 5)},
    )
    assert measured.bytes_of_state(found) == "4 and 4 a row"
    assert measured.reach(found) == "the gradient's rows of `w`, `m`; every row of `v`"
    nothing = measured.Measured({}, (), (), {"": (1, 4)})
    assert measured.bytes_of_state(nothing) == "0"
    assert measured.reach(nothing) == "the gradient's rows"


@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_has_the_form_that_the_page_says_it_has(form: Form) -> None:
    ours = peers.our_weights(form.ours)
    assert peers.relative_distance(ours, forms.weights_of(form)) < form.within


def test_forms_of_one_name_are_not_the_same() -> None:
    for family in forms.FAMILIES:
        for first in family.forms:
            apart = [forms.between(first, second) for second in family.forms if second != first]
            assert min(apart) > 1e4 * peers.ROUNDING, family.question


# The pictures.


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_is_light_and_shows_every_optimizer(picture: str) -> None:
    file = gallery.IMAGES / f"{picture}.svg"
    assert file.stat().st_size < 100_000
    assert sorted(gallery.said_in(file)) == sorted(NAMES), f"run {gallery.COMMAND}"


def test_every_optimizer_has_a_small_picture_of_the_paths_in_the_large_ones() -> None:
    files = {file.stem: file for file in gallery.PATHS.iterdir()}
    assert sorted(files) == sorted(NAMES), f"run {gallery.COMMAND}"
    for surface in surfaces.SURFACES:
        said = gallery.said_in(gallery.IMAGES / f"{surface.name}.svg")
        for name, file in files.items():
            assert file.stat().st_size < 25_000
            assert (name, said[name]) in gallery.all_said_in(file), f"run {gallery.COMMAND}"


@pytest.mark.parametrize("surface", surfaces.SURFACES, ids=lambda surface: surface.name)
def test_paths_end_where_the_picture_says(surface: surfaces.Surface) -> None:
    said = gallery.said_in(gallery.IMAGES / f"{surface.name}.svg")
    for name, (rate, end) in said.items():
        path = surfaces.path_of(surface, name, rate)
        assert surface.shows(path), name
        assert path[-1] == pytest.approx(end, abs=1e-3), f"{name}: run {gallery.COMMAND}"


def test_the_curves_of_the_demo_are_those_of_the_tuned_rates() -> None:
    assert set(TUNED) == set(NAMES), "run python -m gpuopt.demo.tune for the others"
    said = gallery.said_in(gallery.IMAGES / f"{gallery.DIGITS}.svg")
    rates = {name: rate for name, (rate, _) in said.items()}
    assert rates == TUNED, f"run {gallery.COMMAND}"


@pytest.mark.parametrize("surface", surfaces.SURFACES, ids=lambda surface: surface.name)
def test_slopes_of_surfaces_are_those_of_their_values(surface: surfaces.Surface) -> None:
    x, y = surface.start
    width = 1e-6
    ahead = np.array([surface.value(x + width, y), surface.value(x, y + width)])
    behind = np.array([surface.value(x - width, y), surface.value(x, y - width)])
    slope = surface.slope(np.array([x, y]))
    assert (ahead - behind) / (2 * width) == pytest.approx(slope, rel=1e-6)
    assert surface.slope(np.array(surface.minimum)) == pytest.approx([0, 0])


def test_curves_that_cover_each_other_share_a_line() -> None:
    points = np.stack([np.linspace(0, 100, 5), np.linspace(0, 1, 5)], axis=1)
    near, far = points.copy(), points.copy()
    near[2, 1] += 0.004
    far[2, 1] += 0.02  # much for y, though little beside x
    first, second, third = (
        gallery.Curve(name, 0.1, drawn, (1.0,))
        for name, drawn in (("Adam", points), ("LazyAdam", near), ("AdamW", far))
    )
    assert gallery.by_family([first, second, third]) == {entries.ADAM: [[first, second], [third]]}
