"""The package's addresses: known to whoever builds it, and so to the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "REPOSITORY_URL"
DOCUMENTATION = "DOCUMENTATION_URL"


# A link or an image; not one inside of a block of code.
_BLOCK = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


class ProjectUrls(MetadataHookInterface):
    """Fills in `project.urls` and `project.readme`; hatchling reads back those of an sdist."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["urls"] = project_urls(os.environ)
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        page = package_page(text, address(os.environ, REPOSITORY))
        metadata["readme"] = {"content-type": "text/markdown", "text": page}


def project_urls(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the URLs by label, and none where the environment names none.

    Raises:
        ValueError: a variable has what is no http or https address.
    """
    urls = {}
    if documentation := address(environment, DOCUMENTATION):
        urls["Documentation"] = documentation
    if repository := address(environment, REPOSITORY):
        urls["Source"] = repository
        urls["Issues"] = f"{repository}/issues"
        urls["Changelog"] = f"{repository}/blob/main/CHANGELOG.md"
    return urls


def package_page(readme: str, repository: str) -> str:
    """Returns the README for a package index, where links to files of the repository lead nowhere.

    Args:
        readme: With links relative to its folder.
        repository: Where they lead to; without one, a link becomes its text.
    """

    def link(found: re.Match[str]) -> str:
        is_image, text, target = found.groups()
        if "://" in target or target.startswith("#"):
            return found[0]
        if not repository:
            return text
        kind = "raw" if is_image else "tree" if target.endswith("/") else "blob"
        return f"{is_image}[{text}]({repository}/{kind}/main/{target})"

    parts = _BLOCK.split(readme)
    return "".join(_LINK.sub(link, part) if n % 2 == 0 else part for n, part in enumerate(parts))


def address(environment: Mapping[str, str], variable: str) -> str:
    """Returns a variable's URL without a slash at its end, or nothing."""
    url = environment.get(variable, "").strip().rstrip("/")
    parts = urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.netloc or url.split() != [url]):
        raise ValueError(
            f"{variable}={url} is no address of a web page: write https://HOST/PATH, "
            f"or unset {variable} to build a package that names none"
        )
    return url
