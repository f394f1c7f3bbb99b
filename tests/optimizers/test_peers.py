"""Optimizers of other libraries do what our page of optimizers says that they do."""

from __future__ import annotations

import peers
import pytest
from optimizer_page import forms, peer_defaults
from peers import CASES, Call, Case

pytestmark = pytest.mark.peers
FORMS = [
    pytest.param(form, theirs, id=f"{theirs} - {form.description}")
    for family in forms.FAMILIES
    for form in family.forms
    for theirs in form.theirs
]


@pytest.mark.parametrize("case", CASES, ids=[case.identifier for case in CASES])
def test_twenty_steps_end_where_a_peers_do(case: Case) -> None:
    ours, theirs = peers.our_weights(case.ours), peers.peers_weights(case.peer)
    assert peers.relative_distance(ours, theirs) < case.within


@pytest.mark.parametrize(("form", "theirs"), FORMS)
def test_a_peer_has_the_form_that_the_page_says_it_has(form: forms.Form, theirs: Call) -> None:
    found = peers.relative_distance(peers.peers_weights(theirs), forms.weights_of(form))
    assert found < form.within


@pytest.mark.parametrize("peer", peer_defaults.signatures())
def test_a_peers_defaults_are_those_of_the_page(peer: str) -> None:
    expected = peer_defaults.read_signature(peer)
    assert peer_defaults.signatures()[peer] == expected, f"run {peer_defaults.COMMAND}"
