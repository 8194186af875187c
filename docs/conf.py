"""The documentation site: `python -m sphinx -W -b html docs site`, with the extra `docs`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

from lantern_hpu import __version__
from scripts.docs import reference_pages

project, author = "lantern_hpu", "the lantern_hpu contributors"
copyright = f"2026, {author}. Apache-2.0"
release = version = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme, html_title = "furo", f"lantern_hpu {release}"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
nb_execution_mode = "off"  # the notebook is run by a test, and kept with its outputs
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
linkcheck_anchors = False
suppress_warnings = ["misc.highlighting_failure"]  # shell lines with placeholders

DOCS = Path(__file__).resolve().parent
UPWARDS = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")
REPOSITORY = os.environ.get("GITHUB_REPOSITORY", "")


def point_outside(app: Sphinx, page: str, source: list[str]) -> None:
    """A link to a file outside `docs`: to where it is published, or without an address its path alone."""
    folder = (DOCS / page).parent

    def link(match: re.Match[str]) -> str:
        text, target = match.group(1), (folder / match.group(2)).resolve()
        if target.is_relative_to(DOCS):
            return match.group(0)
        path = target.relative_to(DOCS.parent).as_posix()
        if REPOSITORY:
            return f"[{text}](https://github.com/{REPOSITORY}/blob/main/{path})"
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    source[0] = UPWARDS.sub(link, source[0])


def setup(app: Sphinx) -> None:
    reference_pages.write_all(DOCS / "reference" / "generated")
    app.connect("source-read", point_outside)
