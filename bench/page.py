"""Parts of documentation pages that programs write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_END = "<!-- to here -->\n"


def replace_between(page: str, command: str, text: str) -> str:
    """Returns a page with `text` in place of what `command` has written to it before."""
    begin = f"<!-- `{command}` writes from here -->\n\n"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(_END)
    return before + begin + text + "\n" + _END + after


def make_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
