"""Trees of parameters: dicts, lists, tuples and dataclasses, whose leaves are found by path."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

# A node's type, the keys of its children, and their forms; None for a leaf.
Form = tuple[type[Any], tuple[Any, ...], tuple[Any, ...]] | None
Walk = Callable[[Any], list[Any] | None]

# Others, of which reading a key may have effects, are walked without generated code.
_PLAIN = frozenset({dict, OrderedDict, list, tuple})
_MOST_SHOWN = 5


class Tree(NamedTuple):
    """What is found in a tree.

    Attributes:
        paths: The leaves' paths, as "layers/0/W"; "" for a tree that is one leaf.
        leaves: The leaves, in the same order.
        form: The tree without its leaves. Trees of equal forms have equal paths.
    """

    paths: list[str]
    leaves: list[Any]
    form: Form


def flatten(tree: Any, what: str) -> Tree:
    """Lists a tree's leaves: whatever is no mapping, list, tuple or dataclass.

    The children of a node are in the order that it has them; keys become text.

    Args:
        tree: The tree.
        what: The argument's name, for errors.

    Raises:
        ValueError: a key contains "/", is empty, or is the same text as another one of its node;
            the tree holds itself; or a field of a dataclass was never set.
    """
    found = Tree([], [], None)
    try:
        form = _add_leaves(tree, "", what, found)
    except RecursionError:
        raise ValueError(f"{what} holds itself, or is nested too deeply") from None
    return found._replace(form=form)


def is_leaf(value: Any, what: str) -> bool:
    """Whether a value has no children.

    Args:
        value: The value.
        what: The argument's name, for errors.

    Raises:
        ValueError: a field of a dataclass was never set.
    """
    return _children(value, "", what) is None


def describe_difference(first: Sequence[str], second: Sequence[str], names: Sequence[str]) -> str:
    """Returns the paths that one of two trees alone has, up to five of each.

    Args:
        first: The paths of the one tree.
        second: The paths of the other tree.
        names: What the two trees are called.
    """
    pairs = [(names[0], first, set(second)), (names[1], second, set(first))]
    alone = [(name, [path for path in own if path not in other]) for name, own, other in pairs]
    return "; ".join(f"only {name} has {_shortened(paths)}" for name, paths in alone if paths)


@lru_cache(maxsize=256)
def walk_of(form: Form, order: tuple[int, ...] | None = None) -> Walk:
    """Returns a function that lists the leaves of a tree of this form, and None for another form.

    It is generated: it takes a tenth of the time of `flatten`.

    Args:
        form: See `Tree.form`.
        order: The positions of the leaves in the list that is wanted; None for their own order.
    """
    code = _Code()
    if not code.add_walk(form, "tree", "  "):
        return lambda tree: None
    lines = [
        "def walk(tree):",
        " leaves = []",
        " try:",
        *code.lines,
        " except (KeyError, AttributeError):",  # of a key or a field that another tree has
        "  return None",
        " return leaves",
    ]
    exec("\n".join(lines), code.constants)
    walk: Walk = code.constants["walk"]
    if order is None:
        return walk
    return lambda tree: None if (found := walk(tree)) is None else [found[at] for at in order]


class _Code:
    """Lines of Python, and the constants that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}

    def add_walk(self, form: Form, node: str, indent: str) -> bool:
        """Adds the walk of a node; False if some type is one for which there is none.

        Args:
            form: Of the node.
            node: An expression for it.
            indent: Of the lines.
        """
        if form is None:
            self.lines.append(f"{indent}leaves.append({node})")
            return True
        kind, keys, forms = form
        is_dataclass = dataclasses.is_dataclass(kind)
        if not (kind in _PLAIN or is_dataclass or _is_named_tuple(kind)):
            return False
        local = node
        if not node.isidentifier():
            local = f"node_{len(self.lines)}"
            self.lines.append(f"{indent}{local} = {node}")
        length = "" if is_dataclass else f" or len({local}) != {len(keys)}"
        self.lines += [
            f"{indent}if type({local}) is not {self._constant(kind)}{length}:",
            f"{indent} return None",
        ]
        if kind in (list, tuple) and len(keys) > 1 and len(set(forms)) == 1:
            if forms[0] is None:
                self.lines.append(f"{indent}leaves += {local}")
                return True
            child = f"child_{len(self.lines)}"
            self.lines.append(f"{indent}for {child} in {local}:")
            return self.add_walk(forms[0], child, indent + " ")
        leaves: list[str] = []
        for position, (key, child_form) in enumerate(zip(keys, forms, strict=True)):
            if is_dataclass:
                child = f"{local}.{key}"
            elif issubclass(kind, dict):
                child = f"{local}[{self._constant(key)}]"
            else:
                child = f"{local}[{position}]"
            if child_form is None:
                leaves.append(child)
                continue
            self._add_leaves(leaves, indent)
            if not self.add_walk(child_form, child, indent):
                return False
        self._add_leaves(leaves, indent)
        return True

    def _add_leaves(self, leaves: list[str], indent: str) -> None:
        if leaves:
            self.lines.append(f"{indent}leaves += {', '.join(leaves)},")
            leaves.clear()

    def _constant(self, value: Any) -> str:
        if type(value) is str:
            return repr(value)
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name


def _add_leaves(node: Any, path: str, what: str, found: Tree) -> Form:
    children = _children(node, path, what)
    if children is None:
        found.paths.append(path)
        found.leaves.append(node)
        return None
    keys, values = children
    _check_keys(keys, path, what)
    forms = tuple(
        _add_leaves(value, f"{path}/{key}" if path else str(key), what, found)
        for key, value in zip(keys, values, strict=True)
    )
    return type(node), tuple(keys), forms


def _children(node: Any, path: str, what: str) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """Returns the keys of a node's children, and the children; None for a leaf."""
    if isinstance(node, Mapping):
        return list(node), list(node.values())
    if _is_named_tuple(type(node)):
        return node._fields, node
    if isinstance(node, list | tuple):
        return range(len(node)), node
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        try:
            return names, [getattr(node, name) for name in names]
        except AttributeError as error:  # of a field that was never set
            raise ValueError(f"{_where(what, path)}: {error}") from error
    return None


def _is_named_tuple(kind: type[Any]) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _check_keys(keys: Sequence[Any], path: str, what: str) -> None:
    texts: dict[str, Any] = {}
    where = _where(what, path)
    for key in keys if not isinstance(keys, range) else ():
        text = str(key)
        if not text or "/" in text:
            raise ValueError(
                f"{where} has the key {key!r}: a key must not be empty, nor contain a '/', which "
                "stands between the keys of a path"
            )
        if text in texts:
            raise ValueError(
                f"{where} has the keys {texts[text]!r} and {key!r}, which are the same path"
            )
        texts[text] = key


def _where(what: str, path: str) -> str:
    return f'{what}["{path}"]' if path else what


def _shortened(paths: Sequence[str]) -> str:
    shown = ", ".join(f'"{path}"' for path in paths[:_MOST_SHOWN])
    more = len(paths) - _MOST_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
