"""The package's addresses: known to whoever builds it, and so to the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "REPOSITORY_URL"
DOCUMENTATION = "DOCUMENTATION_URL"


class ProjectUrls(MetadataHookInterface):
    """Fills in `project.urls`; hatchling itself reads back those that an sdist has."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["urls"] = project_urls(os.environ)


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
