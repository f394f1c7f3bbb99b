"""For `make docs`: an attribute without a type in its class has none in the reference.

griffe 2.4 gives it that of the attribute above it in the docstring.
"""

from __future__ import annotations

from typing import Any

import griffe


class AttributeTypes(griffe.Extension):
    """Takes types away that griffe has guessed."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        _correct(pkg)


def _correct(parent: griffe.Module | griffe.Class) -> None:
    for member in parent.members.values():
        if member.is_alias:
            continue
        if isinstance(member, griffe.Class) and member.docstring:
            for section in member.docstring.parsed:
                if section.kind is griffe.DocstringSectionKind.attributes:
                    for attribute in section.value:
                        if attribute.name not in member.members:
                            attribute.annotation = None
        if isinstance(member, griffe.Module | griffe.Class):
            _correct(member)
