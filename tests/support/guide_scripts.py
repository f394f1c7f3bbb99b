"""The scripts of the guide to several processes: they need ranks or GPUs, which tests give them."""

from __future__ import annotations

import re
from pathlib import Path

import gpuopt

GUIDE = Path(gpuopt.__file__).parents[1] / "docs" / "guides" / "several_processes.md"


def scripts() -> dict[str, list[str]]:
    """Returns the scripts, the blocks marked `py`, by the heading that they are under."""
    sections = re.split(r"^## (.*)\n", GUIDE.read_text(), flags=re.MULTILINE)
    found = {
        heading: re.findall(r"^```py\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for heading, text in zip(sections[1::2], sections[2::2], strict=True)
    }
    return {heading: texts for heading, texts in found.items() if texts}


def scripts_under(heading: str) -> list[str]:
    return scripts()[heading]
