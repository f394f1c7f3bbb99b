"""Our optimizers agree with the libraries that they say they agree with, and no further."""

from __future__ import annotations

import peers
import pytest
from peers import CASES, ROUNDING, Case

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("case", CASES, ids=[case.identifier for case in CASES])
def test_twenty_steps_end_as_far_from_a_peers_as_the_page_says(case: Case) -> None:
    found = peers.distance(case)
    if case.distance:
        assert found == pytest.approx(case.distance, rel=0.05)
    else:
        assert found < ROUNDING
