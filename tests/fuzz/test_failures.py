"""Whoever sees a random program fail can repeat it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fuzzing import model, program
from fuzzing.settings import HOST

pytestmark = pytest.mark.internal


def test_a_failing_program_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = model.Momentum.rule

    def wrong(self: Any, w: Any, g: Any, *slots: Any, rate: float) -> None:
        rule(self, w, 2 * g, *slots, rate=rate)

    monkeypatch.setattr(model.Momentum, "rule", wrong)
    with pytest.raises(AssertionError, match=" is not ") as first:
        program.run(0, range(40), HOST)
    [note] = first.value.__notes__
    command = re.search("GPUOPT_FUZZ_SEED=0 GPUOPT_FUZZ_ONLY=([0-9,]+) make test ARGS", note)
    assert command is not None
    numbers = [int(number) for number in command[1].split(",")]
    assert "Momentum" in note.splitlines()[-3]
    with pytest.raises(AssertionError) as second:
        program.run(0, numbers, HOST)
    assert str(second.value) == str(first.value)
