"""A rule's numpy calls, recorded once and replayed on chunks without allocating memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any
from weakref import WeakSet

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cpu.forms.recording import Recording, record
from gpuopt.backends.cpu.forms.scalar_of_groups import GroupsDiffer, ScalarOfGroups
from gpuopt.rules.update_rule import UpdateRule

Chunk = np.ndarray[Any, Any]


class RecordedRule:
    """A rule whose results go to scratch arrays instead of new memory.

    The recorded calls are replayed on each chunk, one by one, so that each rounds as in the rule. A
    scratch array is used again when its value is no longer needed.

    Attributes:
        recording: What the rule does.
        scratch_dtypes: The types of the scratch arrays that `apply` wants.
    """

    most_elements = 256 * 1024
    update_chunks = None
    scalars_address = 0

    def __init__(self, recording: Recording, constants: Sequence[Any]) -> None:
        """Keeps what is replayed.

        Args:
            recording: The calls.
            constants: The recording's, with an array for each `ScalarOfGroups`: of one number, or
                of one for each element of a chunk.
        """
        self.recording = recording
        self._calls, self.scratch_dtypes = recording.plan
        self._constants = constants

    def apply(self, written: Sequence[Chunk], grad: Chunk | None, scratch: Sequence[Chunk]) -> None:
        arrays = [*written, *([] if grad is None else [grad]), *scratch, *self._constants]
        # This thread holds the interpreter's lock between the calls, so little is done there.
        for function, arguments_in, options in self._calls:
            function(*arguments_in(arrays), **options)


def recorded_rules(
    rule: UpdateRule, real: np.dtype[Any], scalars: Sequence[Scalars], *, zero_grad: bool = False
) -> Sequence[RecordedRule]:
    """Returns the recorded form of a rule, for the scalars of each group.

    They come from a cache if they were recorded before.

    Args:
        rule: What to compute.
        real: The type of all chunks.
        scalars: The rule's scalars, of that type: those of each group.
        zero_grad: The gradient is zero everywhere, and not given to `apply`.

    Raises:
        TypeError: the rule is not arithmetic on elements, or writes to the gradient.
    """
    values = np.array([[each[name] for name in rule.scalars] for each in scalars], real)
    return _recorded(rule, real, values.tobytes(), len(scalars), zero_grad)


_accepted: WeakSet[UpdateRule] = WeakSet()


def refuse_unless_recorded(
    rule: UpdateRule, real: type[np.floating[Any]], scalars: Sequence[Scalars]
) -> None:
    """Records a rule when it is first applied, to a variable of any size.

    So a rule that cannot be recorded, as large variables need, is refused for small ones, too. A
    rule with sums or with slots of rows is never recorded: numpy runs it, for any size.

    Raises:
        TypeError: the rule is not arithmetic on elements, or writes to the gradient.
    """
    if rule not in _accepted:
        if not rule.computed:
            recorded_rules(rule, np.dtype(real), scalars[:1])
        _accepted.add(rule)


# Room for several optimizers whose scalars do not change, beside one whose scalars change in each
# step and push the oldest recordings out.
@lru_cache(maxsize=256)
def _recorded(
    rule: UpdateRule, real: np.dtype[Any], scalars: bytes, num_groups: int, zero_grad: bool
) -> Sequence[RecordedRule]:
    values = np.frombuffer(scalars, real).reshape(num_groups, len(rule.scalars))
    bits = values.view(f"u{real.itemsize}")
    are_equal = (bits == bits[0]).all(axis=0)
    named = {
        name: values[0, at] if are_equal[at] else ScalarOfGroups(values[:, at])
        for at, name in enumerate(rule.scalars)
    }
    try:
        recording = record(rule, real, named, zero_grad=zero_grad)
    except GroupsDiffer:
        one_by_one = [_recorded(rule, real, own.tobytes(), 1, zero_grad) for own in values]
        return [form for [form] in one_by_one]
    return [_form(recording, itemgetter((group, ...))) for group in range(num_groups)]


def form_of_parts(
    forms: Sequence[object], groups: Sequence[int], lengths: Sequence[int] | Chunk
) -> RecordedRule | None:
    """Returns a form that updates parts of several groups as one chunk, or None if there is none.

    There is one if the groups' forms are recorded, and make the same calls.

    Args:
        forms: The form of each group.
        groups: The number of each part's group.
        lengths: How many elements each part has.
    """
    recorded = [form for form in map(forms.__getitem__, groups) if isinstance(form, RecordedRule)]
    if len({id(form.recording) for form in recorded}) != 1:
        return None
    return _form(recorded[0].recording, lambda values: values.take(groups).repeat(lengths))


def _form(recording: Recording, choose: Callable[[Chunk], Chunk]) -> RecordedRule:
    constants = [
        choose(each.values) if isinstance(each, ScalarOfGroups) else each
        for each in recording.constants
    ]
    return RecordedRule(recording, constants)
