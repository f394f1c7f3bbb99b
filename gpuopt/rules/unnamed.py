"""Declarations of a rule's effect on rows without a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Movement:
    """A movement of rows without a gradient, by `step * average / (sqrt(square) + epsilon)`.

    Attributes:
        step, epsilon: Names of scalars.
        average, square: Names of slots, which decay before the row moves.
    """

    step: str
    average: str
    square: str
    epsilon: str


@dataclass(frozen=True)
class Unnamed:
    """A rule's effect on elements whose gradient is 0.

    Attributes:
        decays: The scalars by which slots are multiplied, by the slots' names.
        movement: How the variable moves; None if it stays.
    """

    decays: Mapping[str, str] = field(hash=False)
    movement: Movement | None = None

    def cpp_type(self, functor: str, slots: tuple[str, ...], scalars: tuple[str, ...]) -> str:
        """Returns the same declaration as a type of kernels/shared/catch_up.cuh.

        Args:
            functor: The rule's.
            slots: The rule's.
            scalars: The rule's.
        """
        movement, places = self.movement, [0, 0, 0]
        if movement is not None:
            places = [slots.index(each) for each in (movement.average, movement.square)]
            places.append(scalars.index(movement.step))
        moves = str(movement is not None).lower()
        return f"gpuopt::Unnamed<{functor}, {moves}, {', '.join(map(str, places))}>"

    def check(self, name: str, slots: tuple[str, ...], scalars: tuple[str, ...]) -> None:
        """Raises ValueError if it does not fit a rule.

        Args:
            name: The rule's.
            slots: The rule's.
            scalars: The rule's.
        """
        named_slots, named_scalars = {*self.decays}, {*self.decays.values()}
        movement = self.movement
        if movement is not None:
            if not {movement.average, movement.square} <= named_slots:
                raise ValueError(f"{name}: the slots of {movement} must be among those that decay")
            named_scalars |= {movement.step, movement.epsilon}
        if not (named_slots <= {*slots} and named_scalars <= {*scalars}):
            raise ValueError(
                f"{name}: {self} must be of its slots, {slots}, and of its scalars, {scalars}"
            )
