"""A hook of mkdocs: the page of each optimizer, in the navigation."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> None:
    """Adds the pages of docs/optimizers below "Optimizers"."""
    files = sorted(Path(config.docs_dir, "optimizers").glob("*.md"), key=lambda f: f.stem.lower())
    pages = [{file.stem: f"optimizers/{file.name}"} for file in files]
    [section] = [entry["Optimizers"] for entry in config.nav if "Optimizers" in entry]
    section.append({"One by one": pages})
