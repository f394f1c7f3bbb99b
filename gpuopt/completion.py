"""Completion of the command line: a shell's script, which shtab writes."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec

SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")


def make_script(
    parser: argparse.ArgumentParser,
    shell: str,
    words: Mapping[str, Sequence[str]],
    files: Collection[str],
) -> str:
    """Returns a script that completes a command line.

    Args:
        parser: The command line's, which cannot parse anything afterwards.
        shell: One of SHELLS.
        words: What to offer for arguments without choices of their own, by `dest`.
        files: The arguments that are files, by `dest`.

    Raises:
        ImportError: shtab is not installed.
    """
    if find_spec("shtab") is None:
        raise ImportError(
            'completion needs shtab, which is in gpuopt\'s extra "completion": pip install shtab'
        )
    import shtab

    for action in _list_actions(parser):
        if action.dest in files:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.choices is None:
            action.choices = words.get(action.dest)
    return shtab.complete(parser, shell)


def _list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _list_actions(command)
