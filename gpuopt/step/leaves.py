"""The leaves of the trees that an optimizer updates: each is known by its path."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence, Set
from operator import is_
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from gpuopt.errors import DeviceUnavailableError
from gpuopt.interrupts import interrupts_put_off
from gpuopt.locks import Lock
from gpuopt.state.state import State
from gpuopt.step.pairs import Zipped, raise_naming
from gpuopt.trees import Tree, Walk, describe_difference, flatten, walk_of
from gpuopt.variables.gate import writing
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable, as_variable, list_raw_array

Pairs = list[tuple[Any, Any]]

# The Variables that stand for raw arrays of trees, of all optimizers.
_of_arrays: WeakValueDictionary[Identity, Variable] = WeakValueDictionary()
_NODES = frozenset({dict, list, tuple})


class Leaves:
    """The leaves of one optimizer's trees, by the trees' names.

    A raw array gets the name of its path, and a Variable stands for it as long as the optimizer
    lives. An array that comes to the path later takes over the name and the state.
    """

    def __init__(self) -> None:
        self._trees: dict[str, _NamedTree] = {}
        self._guard = Lock("the trees of an optimizer")

    def find(self, params: Any, grads: Any, name: str) -> Zipped | None:
        """Returns the pairs of a step of the same arrays as before; None for others.

        Args:
            params: A tree.
            grads: A tree of their gradients.
            name: Of the tree.
        """
        tree = self._trees.get(name)
        if tree is None:
            return None
        given, gradients = tree.walk(params), tree.walk_gradients(grads)
        if given is None or gradients is None or not all(map(is_, given, tree.given)):
            return None
        if [array for array in tree.in_host_memory if not array.flags.writeable]:
            return None
        if not _NODES.isdisjoint(map(type, gradients)):
            return None
        tree.num_returns = 0
        return Zipped(gradients, tree.variables)

    def forget(self, changed: Set[Identity]) -> None:
        """Has `find` no longer find trees with variables that have got other arrays.

        Another optimizer may have replaced arrays that both update.
        """
        for tree in list(self._trees.values()):
            if not changed.isdisjoint([variable.identity for variable in tree.variables]):
                tree.walk = _find_no_leaves

    def prepare(
        self,
        params: Any,
        grads: Any,
        name: str,
        state: State,
        forget_plans: Callable[[Set[Identity]], None],
    ) -> tuple[Pairs, Callable[[], None]]:
        """Returns the pairs of a step, and what keeps a new tree once the step is made.

        Args:
            params: See `Optimizer.update`.
            grads: See there.
            name: See there.
            state: The optimizer's.
            forget_plans: Drops the plans for variables that get other arrays.

        Raises:
            TypeError, ValueError, DeviceUnavailableError: see `Optimizer.update`.
        """
        found, gradients = _alike(params, grads)
        with self._guard:
            former = self._trees.get(name)
            called = f'the tree "{name}"' if name else "the tree without a name"
            if former is None:
                paths = found.paths
            else:
                paths = former.paths
                what = ["params", f"{called} of earlier calls"]
                if difference := describe_difference(found.paths, paths, what):
                    raise ValueError(
                        f"{called} has other paths than before: {difference}. Trees of different "
                        'models need names of their own, as in update(params, grads, name="model")'
                    )
            tree = _NamedTree(paths, found, gradients)
            full = [_join(name, path) for path in paths]
            owners = self._owners_without(name)
            if former is None:
                self._refuse_paths_of_others(full, called)
            tree.variables = _variables_of(tree.given, full, former, owners, state, forget_plans)
            if former is not None:
                tree.follow(former, called)
                self._trees[name] = tree
        in_order = _ordered(gradients, paths)
        pairs = list(zip(in_order, tree.variables, strict=True))

        def keep() -> None:
            self._trees[name] = tree
            for variable in tree.variables:
                if variable.identity.is_of_array:
                    _of_arrays.setdefault(variable.identity, variable)

        return pairs, keep

    def _refuse_paths_of_others(self, paths: Sequence[str], called: str) -> None:
        """Raises ValueError if another tree has one of the paths, its name included."""
        for other, tree in self._trees.items():
            for path in {_join(other, each) for each in tree.paths}.intersection(paths):
                raise ValueError(
                    f'the path "{path}" of {called} is also one of the tree "{other}", by which '
                    "its state is known: give the trees names that are not the beginning of each "
                    "other's paths"
                )

    def _owners_without(self, name: str) -> dict[Identity, str]:
        """Returns the paths of the arrays of all trees but one."""
        return {
            variable.identity: _join(other, path)
            for other, tree in self._trees.items()
            if other != name
            for path, variable in zip(tree.paths, tree.variables, strict=True)
        }


def paired(params: Any, grads: Any) -> Pairs:
    """Returns the pairs of two trees, whose leaves are known by themselves.

    Raises:
        ValueError: the trees differ.
    """
    found, gradients = _alike(params, grads)
    return list(zip(_ordered(gradients, found.paths), found.leaves, strict=True))


class _NamedTree:
    """A tree as it was last passed.

    Attributes:
        paths: The leaves' paths, in the order of the tree's first call.
        given: The leaves as they were passed, in this order.
        in_host_memory: Those that are numpy's arrays, which may become read-only.
        walk: Lists them.
        walk_gradients: Lists their gradients.
        variables: The Variables that the leaves are, or that stand for them.
        replaced: Arrays that were replaced by others of the same path, if they are alive.
        num_returns: In how many of the last calls in a row such an array has come back.
        has_warned: Whether there was a warning of this.
    """

    def __init__(self, paths: list[str], found: Tree, gradients: Tree) -> None:
        self.paths = paths
        self.given = _ordered(found, paths)
        self.in_host_memory = [each for each in self.given if isinstance(each, np.ndarray)]
        self.walk = _walk_in_order(found, paths)
        self.walk_gradients = _walk_in_order(gradients, paths)
        self.variables: list[Variable] = []
        self.replaced: dict[int, weakref.ref[Any]] = {}
        self.num_returns = 0
        self.has_warned = False

    def follow(self, former: _NamedTree, called: str) -> None:
        """Takes the place of a tree of the same paths; warns where two take turns."""
        self.has_warned = former.has_warned
        pairs = zip(self.given, former.given, strict=True)
        changed = [(new, old) for new, old in pairs if new is not old]
        self.replaced = {key: ref for key, ref in former.replaced.items() if ref() is not None}
        if not changed:
            return
        new, old = changed[0]
        is_return = id(new) in self.replaced
        self.num_returns = former.num_returns + 1 if is_return else 0
        if not isinstance(old, Variable):
            self.replaced[id(old)] = weakref.ref(old)
        if self.num_returns > 1 and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"{called} gets two sets of arrays in turn, and both share one state. If they are "
                'two models, name them: update(params, grads, name="generator")',
                stacklevel=4,
            )


def _alike(params: Any, grads: Any) -> tuple[Tree, Tree]:
    """Returns what is in two trees; raises ValueError unless they have the same paths."""
    found, gradients = flatten(params, "params"), flatten(grads, "grads")
    if difference := describe_difference(found.paths, gradients.paths, ["params", "grads"]):
        raise ValueError(
            f"params and grads must be trees of the same paths; {difference}. None in grads leaves "
            "a leaf out"
        )
    return found, gradients


def _variables_of(
    given: Sequence[Any],
    paths: Sequence[str],
    former: _NamedTree | None,
    owners: dict[Identity, str],
    state: State,
    forget_plans: Callable[[Set[Identity]], None],
) -> list[Variable]:
    """Returns the Variables of leaves, whose arrays are new, or are others than before.

    Everything is checked before anything changes.
    """
    before: Sequence[Any] = [None] * len(given) if former is None else former.variables
    if former is not None:
        of_this = zip(former.variables, paths, strict=True)
        owners = {**owners, **{variable.identity: path for variable, path in of_this}}
    leaves = [_as_leaf(each, path) for each, path in zip(given, paths, strict=True)]
    taken: dict[Identity, str] = {}
    for leaf, old, path in zip(leaves, before, paths, strict=True):
        owner = taken.setdefault(leaf.identity, path)
        if owner == path:
            owner = owners.get(leaf.identity, path)
        if owner != path:
            raise ValueError(
                f'the array at "{path}" is that of "{owner}": each path has an array of its own, '
                "with its own state. Leave a shared array out of all places but one, and add up "
                "its gradients"
            )
        if not leaf.is_raw_array:
            continue
        if old is not None and leaf.identity is not old.identity:
            _check_replacement(leaf, old, path, state)
        elif leaf.identity in _of_arrays and leaf.identity.given_name != path:
            raise ValueError(
                f'the array at "{path}" is known as "{leaf.identity.given_name}" already, by a '
                "tree of another optimizer: use the same paths, or make a gpuopt.Variable of it, "
                "which keeps its own name"
            )
    variables, replaced = [], []
    for leaf, old, path in zip(leaves, before, paths, strict=True):
        if not leaf.is_raw_array:
            variables.append(leaf)
        elif old is None or leaf.identity is old.identity:
            variables.append(_named(leaf, path))
        else:
            variables.append(old)
            replaced.append((old, leaf))
    if replaced:
        _replace(replaced, forget_plans)
    without_slots = {
        path: variable
        for path, variable in zip(paths, variables, strict=True)
        if variable.identity.is_of_array and not state.slots_of(variable)
    }
    state.follow_paths(without_slots)
    return variables


def _as_leaf(given: Any, path: str) -> Variable:
    try:
        return as_variable(given)
    except DeviceUnavailableError as error:
        raise DeviceUnavailableError(f'params at "{path}": {error}') from error
    except Exception as error:
        raise_naming(f'params at "{path}"', error)


def _check_replacement(leaf: Variable, old: Variable, path: str, state: State) -> None:
    """Raises ValueError unless an array can come to a path in the place of another one."""
    if not old.identity.is_of_array:
        raise ValueError(
            f'params at "{path}" is an array, and was the Variable "{old.name}" before: pass the '
            "Variable again"
        )
    form = leaf.shape, leaf.dtype, leaf.device
    expected = old.shape, old.dtype, old.device
    if form != expected:
        raise ValueError(
            f'the array at "{path}" has shape {leaf.shape} and dtype {leaf.dtype} and is on '
            f"{leaf.device}; the one before had shape {old.shape} and dtype {old.dtype} and was on "
            f"{old.device}, and its state fits no other. A new model needs a new optimizer, or a "
            "name of its own"
        )
    if state.slots_of(leaf):
        raise ValueError(
            f'the array at "{path}" has a state of its own, by steps that named no path; it cannot '
            "take over that of the array before"
        )


def _named(leaf: Variable, path: str) -> Variable:
    """Returns the Variable that stands for a raw array under a name."""
    known = _of_arrays.get(leaf.identity)
    if known is not None:
        return known
    leaf.identity.give_name(path)
    list_raw_array(leaf)
    return leaf


def _replace(
    replaced: Sequence[tuple[Variable, Variable]],
    forget_plans: Callable[[Set[Identity]], None],
) -> None:
    """Gives the Variables of paths other arrays, with the arrays' values."""
    with writing(), interrupts_put_off():
        forget_plans({variable.identity for variable, _ in replaced})
        for variable, leaf in replaced:
            variable.take_array(leaf)


def _join(name: str, path: str) -> str:
    return "/".join(part for part in (name, path) if part)


def _ordered(tree: Tree, paths: list[str]) -> list[Any]:
    """Returns a tree's leaves in the order of these paths."""
    if tree.paths == paths:
        return tree.leaves
    by_path = dict(zip(tree.paths, tree.leaves, strict=True))
    return [by_path[path] for path in paths]


def _find_no_leaves(tree: Any) -> None:
    """Walks a tree that is to be looked at again."""


def _walk_in_order(tree: Tree, paths: list[str]) -> Walk:
    if tree.paths == paths:
        return walk_of(tree.form)
    positions = {path: position for position, path in enumerate(tree.paths)}
    return walk_of(tree.form, tuple(positions[path] for path in paths))
