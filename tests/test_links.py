"""Links between pages lead somewhere: to files that are there, and to headings that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from scripts.docs import reference_pages

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "docs" / "reference" / "generated"
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|\b(?:src|href)=\"([^\"]+)\"")
OUTSIDE = ("http://", "https://", "mailto:")


def pages() -> list[Path]:
    """What people read: Markdown of the repository, the notebook, and the index for language models."""
    listed = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")]
    listed = [page for page in listed if GENERATED not in page.parents]
    return sorted([*listed, ROOT / "llms.txt", *ROOT.glob("docs/**/*.ipynb")])


def text_of(page: Path) -> str:
    """A page without its code blocks; of a notebook the cells of text."""
    text = page.read_text("utf-8")
    if page.suffix == ".ipynb":
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return FENCED.sub("", text)


def links(page: Path) -> Iterator[str]:
    """Where a page links to, code in backticks left out."""
    text = re.sub(r"`[^`\n]*`(?!\])", "", text_of(page))
    for match in LINK.finditer(text):
        yield unquote(match[1] or match[2])


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and MyST make them."""
    result: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text_of(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        again = next(i for i in range(99) if (f"{name}-{i}" if i else name) not in result)
        result.add(f"{name}-{again}" if again else name)
    return result


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")  # is set by it
        reference_pages.write_all(folder)
    return folder


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path, generated: Path) -> None:
    broken = []
    for link in links(page):
        if link.startswith(OUTSIDE):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if GENERATED in target.parents:
            target = generated / target.relative_to(GENERATED)
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            broken.append(link)
    assert not broken


def test_the_check_sees_links_and_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`: [c](d.md)!\n\n## Same\n\n## Same\n\n[x](y.md#z) ![i](i.png) `[no](no.md)`\n"
        '```text\n[no](no.md)\n# no\n```\n<img src="j.png">\n'
    )
    assert list(links(page)) == ["d.md", "y.md#z", "i.png", "j.png"]
    assert anchors(page) == {"a-b-c", "same", "same-1"}


def test_external_links_are_listed_once_and_use_https() -> None:
    """CI asks them with Sphinx's linkcheck (.github/workflows/docs.yml); here they only have to be well formed."""
    outside = {link for page in pages() for link in links(page) if link.startswith(OUTSIDE)}
    assert len(outside) >= 10
    local = re.compile(r"http://(127\.0\.0\.1|localhost)\b")
    wrong = [link for link in outside if not link.startswith("https://") and not local.match(link)]
    assert not wrong and not [link for link in outside if re.search(r"[\s<>\"]", link)]
    assert "-b linkcheck" in (ROOT / ".github/workflows/docs.yml").read_text("utf-8")
