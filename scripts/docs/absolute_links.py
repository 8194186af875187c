"""Make the relative links and pictures of a page absolute, as a package index needs them.

    python -m scripts.docs.absolute_links README.md RAW_ADDRESS PAGE_ADDRESS

Pictures are taken from RAW_ADDRESS, pages from PAGE_ADDRESS.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lantern_hpu.files import write_file

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)]+)\)")


def absolute(text: str, raw: str, pages: str) -> str:
    """The text with each relative target behind one of two addresses."""

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        return f"{mark}[{label}]({raw if mark else pages}/{target})"

    return LINK.sub(link, text)


def main() -> None:
    page, raw, pages = sys.argv[1:]
    text = Path(page).read_text(encoding="utf-8")
    write_file(Path(page), absolute(text, raw, pages).encode(), force=True)


if __name__ == "__main__":
    main()
