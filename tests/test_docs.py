"""What pages for developers name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Files are named from the repository, the package, or the package that the text is about.
BASES = (
    "",
    "lantern_hpu",
    "docs",
    "gaudi_emulator",
    "lantern_hpu/decode/drafting",
    "lantern_hpu/decode",
)
PLACEHOLDERS = ("<device>", "NAME")
WRITTEN = (page for page in (ROOT / "docs").rglob("*.md") if "generated" not in page.parts)
PAGES = [ROOT / "README.md", *sorted(WRITTEN)]


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`([\w/.<>-]+(?:\.(?:py|json|toml|md|txt)|/))`", text))
    named |= set(re.findall(r"\]\((?!http|#)([^)#]+)", text))
    assert named
    missing = [
        name
        for name in sorted(named)
        if not any(mark in name for mark in PLACEHOLDERS)
        and not any((ROOT / base / name).exists() for base in BASES)
    ]
    assert not missing


def test_classes_and_functions_of_the_architecture_page_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = ("lantern_hpu", "backends", "graphs", "tests")
    code = "\n".join(f.read_text() for folder in folders for f in (ROOT / folder).rglob("*.py"))
    names = {
        part for name in re.findall(r"`([A-Z]\w+(?:\.\w+)*)", text) for part in name.split(".")
    }
    assert {"Step", "DecodeState", "resolve"} <= names
    missing = [name for name in sorted(names) if not re.search(rf"\b{name}\b", code)]
    assert not missing


# Tables that nothing here was measured for
COMPUTED_OR_QUOTED = ("Status", "Lower bounds", "What others published", "Claims, sources, checks")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_have_the_date_or_the_raw_file_of_their_measurement(page: Path) -> None:
    intro, *sections = re.split(r"\n(?=#{2,4} )", page.read_text(encoding="utf-8"))
    for section in sections:
        title, _, text = section.partition("\n")
        figures = re.findall(r"\b\d+\.\d+\b", "".join(re.findall(r"^\|.*$", text, re.M)))
        if len(figures) >= 4 and title.lstrip("# ") not in COMPUTED_OR_QUOTED:
            assert re.search(r"\b20\d\d-\d\d-\d\d\b|\.json\b", intro + text), (
                f"{page.name}, {title}"
            )
