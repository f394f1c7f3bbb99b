"""Parameter groups: variables of an optimizer with hyperparameters of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack
from weakref import WeakKeyDictionary, WeakSet

from gpuopt.optimizers.base.declared import Hyperparameter
from gpuopt.optimizers.base.names import OfGroup
from gpuopt.variables.copied import Copied, Copy, describe_lost, found_again, to_copy
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable, as_variable, global_variables

# The most names of variables that an error lists.
_MOST_NAMES = 8


class ParameterGroup:
    """Other hyperparameters for some variables of an optimizer, given by `groups=[...]`.

        AdamWOptimizer(0.01, groups=[ParameterGroup("bias|norm", weight_decay=0.0)])

    The variables are named by a pattern, or listed. One that is in no group has the optimizer's own
    hyperparameters, and so has a group where it names none. A group may be given to several
    optimizers: `optimizer.groups` are what each has made of it, to be read and set.

    Args:
        pattern: A regular expression, searched for in the names of variables, also of those that
            are made later.
        variables: The group's variables or arrays, instead of a pattern; they are not kept alive.
            A mirrored variable stands for all its copies.
        hyperparameters: As the optimizer's own arguments: numbers, variables, or functions.

    Attributes:
        name: The pattern, or the name of the first variable.
        hyperparameters: By name, as they were given.

    Raises:
        TypeError: both or neither of `pattern` and `variables` are given, or one is no pattern or
            no variable.
        ValueError: the pattern is malformed, there are no variables, or one is listed twice.
    """

    __slots__ = ("_expected", "_identities", "_pattern", "hyperparameters", "name")

    def __init__(
        self,
        pattern: str | None = None,
        *,
        variables: Iterable[Any] | None = None,
        **hyperparameters: Unpack[OfGroup],
    ) -> None:
        if (pattern is None) == (variables is None):
            raise TypeError("a group has a pattern of its variables' names, or a list of variables")
        self.hyperparameters: Mapping[str, Any] = hyperparameters
        self._pattern: re.Pattern[str] | None = None
        self._identities: WeakSet[Identity] = WeakSet()
        # Of a copy: the listed variables, by the names of what they are copies of.
        self._expected: dict[str, Copy] = {}
        if variables is not None:
            identities = _identities(variables)
            self.name = identities[0].name
            self._identities.update(identities)
            return
        if not isinstance(pattern, str):
            raise TypeError(f"a group's pattern must be text, got {pattern!r}")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f'a group has the malformed pattern "{pattern}": {error}') from None
        self.name = pattern

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies the group and, unless it has a pattern, the variables that it lists.

        Copied without them, it is for variables of their names; see `CopiedByConstructor`.

        Raises:
            ValueError: it lists a view of an array, and the program does not keep the view.
        """
        if self._pattern is not None:
            return ParameterGroup, (self.name,), (None, {"hyperparameters": self.hyperparameters})
        owners = {identity.name: to_copy(identity) for identity in self._identities}
        listed = {name: each for name, each in owners.items() if each is not None}
        return _group_of, (self.name, listed, self.hyperparameters)

    def with_changes(self, changed: Mapping[str, Hyperparameter]) -> ParameterGroup:
        """Returns a group of the same variables in which some hyperparameters are others."""
        other = object.__new__(ParameterGroup)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.hyperparameters = {**self.hyperparameters, **changed}
        return other

    def __repr__(self) -> str:
        names = sorted(identity.name for identity in self._identities)
        which = f"variables={names}" if self._pattern is None else repr(self.name)
        given = [f"{name}={value!r}" for name, value in self.hyperparameters.items()]
        return f"ParameterGroup({', '.join([which, *given])})"

    def has(self, identity: Identity) -> bool:
        """Whether a variable is in this group."""
        if self._pattern is None:
            expected = self._expected.get(identity.name) if self._expected else None
            if expected is not None and expected.is_replaced_by(identity):
                self._identities.add(identity)
            return identity in self._identities
        return self._pattern.search(identity.name) is not None

    def lost(self) -> list[str]:
        """Returns the names of its arrays, if it came out of a copy or a pickle without them."""
        gone = {name: each for name, each in self._expected.items() if not each.is_kept()}
        if len(gone) < len(self._expected):
            return []
        return [name for name, each in gone.items() if each.name_of_other() is None]

    def is_empty(self, variables: Iterable[Variable]) -> bool:
        """Whether this is a pattern that none of some variables has in its name."""
        return self._pattern is not None and not [v for v in variables if self.has(v.identity)]


class Groups:
    """The groups of one optimizer, which have numbers from 1 on; 0 is for all other variables."""

    def __init__(self, groups: Iterable[ParameterGroup]) -> None:
        """Takes groups, some of whose variables may not exist yet.

        Raises:
            TypeError: `groups` is no list of groups.
            ValueError: two groups have one name.
        """
        is_list = isinstance(groups, Iterable) and not isinstance(groups, ParameterGroup | str)
        if not is_list:
            raise TypeError(f"groups must be a list of ParameterGroup, got {groups!r}")
        self._groups = list(groups)
        for each in self._groups:
            if not isinstance(each, ParameterGroup):
                raise TypeError(f"groups must be a list of ParameterGroup, it has {each!r}")
        names = [group.name for group in self._groups]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'two groups are of "{name}"; a variable may be in one')
        self._numbers: WeakKeyDictionary[Identity, int] = WeakKeyDictionary()
        # Patterns of which no variable is known yet.
        self._unknown = list(self._groups)

    def __iter__(self) -> Iterator[ParameterGroup]:
        return iter(self._groups)

    def number_of(self, variable: Variable) -> int:
        """Returns the number of a variable's group.

        Raises:
            ValueError: the variable is in two groups.
        """
        if not self._groups:
            return 0
        identity = variable.identity
        found = self._numbers.get(identity)
        if found is None:
            numbers = [n for n, group in enumerate(self._groups, 1) if group.has(identity)]
            if len(numbers) > 1:
                first, second = (self._groups[n - 1].name for n in numbers[:2])
                raise ValueError(
                    f'variable "{identity.name}" is in two groups, "{first}" and "{second}"; a '
                    "variable may be in one"
                )
            found = self._numbers[identity] = numbers[0] if numbers else 0
        return found

    def check(self, variables: Sequence[Variable]) -> None:
        """Looks for the groups of variables that a step updates for the first time.

        Raises:
            ValueError: one is in two groups, none of all variables has a group's pattern in its
                name, or a group came out of a pickle without the arrays that it lists.
        """
        for group in self._groups:
            if lost := group.lost():
                raise ValueError(describe_lost(f'group "{group.name}"', lost))
        for variable in variables:
            self.number_of(variable)
        if self._unknown:
            # A slot may have the pattern in its own part of the name.
            others = [each for each in global_variables() if not each.has_owner]
            known = [*variables, *others]
            self._unknown = [group for group in self._unknown if group.is_empty(known)]
            for group in self._unknown:
                names = ", ".join(f'"{each.name}"' for each in variables[:_MOST_NAMES])
                more = ", ..." if len(variables) > _MOST_NAMES else ""
                raise ValueError(
                    f'no variable has the pattern of group "{group.name}" in its name; this step '
                    f"updates {names}{more}"
                )


def _group_of(
    name: str, listed: Mapping[str, Copied], hyperparameters: Mapping[str, Any]
) -> ParameterGroup:
    group = object.__new__(ParameterGroup)
    group.name, group.hyperparameters, group._pattern = name, hyperparameters, None
    group._identities = WeakSet(each.identity for each in found_again(listed).values())
    group._expected = {name: Copy(name, each) for name, each in listed.items()}
    return group


def _identities(variables: Iterable[Any]) -> list[Identity]:
    is_one = isinstance(variables, str) or hasattr(variables, "dtype")
    if is_one or not isinstance(variables, Iterable):
        raise TypeError(f"a group's variables must be a list of variables, got {variables!r}")
    identities: list[Identity] = []
    for position, given in enumerate(variables):
        for each in getattr(given, "replicas", (given,)):
            try:
                identity = as_variable(each).identity
            except TypeError as error:
                raise TypeError(f"a group's variables[{position}]: {error}") from error
            if identity in identities:
                raise ValueError(f'variable "{identity.name}" is listed twice in a group')
            identities.append(identity)
    if not identities:
        raise ValueError("a group's list of variables is empty")
    return identities
