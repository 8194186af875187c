"""The documentation: its tutorial runs, its examples run, and the site builds without a warning."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from os.path import normpath
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from lantern_hpu import cli
from tests.folder import write_folder

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")
# What takes minutes is shortened; what the options do is the point.
SHORTER = {
    "fidelity": "--model tiny --method scd:lambda-5@8 --num-images 8 --draws 8 --timed 1".split(),
    "tune": "--model tiny --num-images 2".split(),
    "race": ["--model", "tiny", "--prompt", "red cat"],
}


def commands(text: str) -> list[list[str]]:
    """The `lantern-hpu` commands of a page that end by themselves."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line) for line in lines if line.startswith("lantern-hpu ")]
    return [each[1:] for each in words if each[1] != "serve"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("tutorial")
    patch.chdir(folder)
    patch.setenv("LANTERN_HPU_CACHE", str(folder / "cache"))
    write_folder(folder / "tiny")
    yield folder
    patch.undo()


@pytest.mark.slow
def test_the_tutorial_runs_from_top_to_bottom(folder: Path) -> None:
    assert len(commands(TUTORIAL)) >= 7
    for words in commands(TUTORIAL):
        assert cli.main([*words, *SHORTER.get(words[0], [])]) == 0, words
    assert (folder / "again.png").is_file() and (folder / "fidelity.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tutorial.md", "guides/async.md", "reference/python.md"])
def test_python_of_a_page_runs(page: str, folder: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    exec(compile(code, page, "exec"), {})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as they are published; a warning is an error."""
    pytest.importorskip("furo")
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run([*command, "docs", str(built)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    generated = (site / "reference/generated/commands.html").read_text("utf-8")
    assert all(f'id="{name}"' in generated for name in cli.COMMANDS)
    guide = (site / "guides/deploy-gaudi.html").read_text("utf-8")
    assert 'href="../gaudi.html#install"' in guide, "links between pages stay links"


class Links(HTMLParser):
    """What a page of the site links to, and what can be linked to in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(unquote(value))
            elif name == "id" and value:
                self.names.add(value)


@pytest.mark.slow
def test_every_link_and_anchor_of_the_site_resolves(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("*.html")}
    outside = re.compile(r"(https?|mailto|data):")
    inside = [
        (page, link)
        for page, found in pages.items()
        for link in found.targets
        if not outside.match(link)
    ]
    assert len(inside) > 1000
    broken = []
    for page, link in inside:
        path, _, anchor = link.partition("#")
        target = Path(normpath(page.parent / path.partition("?")[0])) if path else page
        if not target.is_file() or (anchor and anchor not in pages[target].names):
            broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(DOCS / "notebooks" / "first_steps.ipynb", 4)
    before = [cell.get("outputs") for cell in notebook.cells if cell.cell_type == "code"]
    assert all(before), "it is kept with its outputs"
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    assert (tmp_path / "apple.png").is_file()


@pytest.mark.slow
def test_outputs_that_the_notebook_keeps_are_those_of_its_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its first two cells are run; where another processor rounds otherwise, steps differ a little."""
    notebook = json.loads((DOCS / "notebooks" / "first_steps.ipynb").read_text("utf-8"))
    draws, prints, *_ = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for cell in (draws, prints):
        exec(compile("".join(cell["source"]), "first_steps.ipynb", "exec"), names)
    line = re.compile(r"(\w.*?) +seed (\d+)  (\d+) steps, ([\d.]+) tokens a step")
    shown = line.findall(capsys.readouterr().out)
    kept = line.findall("".join(prints["outputs"][0]["text"]))
    assert [found[:2] for found in kept] == [found[:2] for found in shown] != []
    for before, now in zip(kept, shown, strict=True):
        assert int(before[2]) == pytest.approx(int(now[2]), rel=0.2)
        assert float(before[3]) == pytest.approx(float(now[3]), rel=0.2)


def test_each_page_of_the_site_is_listed() -> None:
    listed = (DOCS / "index.md").read_text("utf-8")
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        if name != "index" and "generated" not in name:
            assert f"\n{name}\n" in listed, name


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
def test_each_known_model_has_its_command_for_each_device(device: str) -> None:
    """The commands parse; their models are all known ones; their memory is what `models plan` counts."""
    from lantern_hpu.commands import generate, serve
    from lantern_hpu.zoo.registry import entries
    from scripts.docs.reference_pages import device_command, memory_of, models_by_device

    parsers = {"serve": serve.make_parser(), "generate": generate.make_parser()}
    page = "\n".join(models_by_device())
    for name in entries():
        command = device_command(name, device)
        assert f"`{command}` |" in page
        _, program, *options = shlex.split(command)
        parsed = parsers[program].parse_args(options)
        assert (parsed.model, parsed.device) == (name, device)
        assert memory_of(name, device, 1) in page.replace("\u00a0", " ")


def test_the_table_of_memory_is_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from scripts.docs.reference_pages import memory_of

    words = "models plan anole-7b --device hpu --memory 96GB --dtype bfloat16 --batch-size"
    for images in (1, 8):
        assert cli.main([*words.split(), str(images)]) == 0
        assert memory_of("anole-7b", "hpu", images) in capsys.readouterr().out


def test_tables_of_figures_are_those_of_their_raw_files() -> None:
    from scripts.docs.figures import MARKED, PAGES, rewritten

    marked = [name for page in PAGES for _, name, *_ in MARKED.findall(page.read_text("utf-8"))]
    assert len(marked) >= 6 and len(set(marked)) == len(marked), "each file stands in one place"
    for page in PAGES:
        assert rewritten(page.read_text("utf-8")) == page.read_text("utf-8"), page


def test_the_front_pages_chart_has_what_was_measured_on_each_machine() -> None:
    from scripts.docs import figures

    for file in figures.MACHINES_OF_XL:
        found = figures.minutes(file)
        alone, best, *_ = found
        assert alone == "ar" and best.startswith("lossless: ")
        assert [*found.values()] == sorted(found.values()), "each is faster than what is above it"
    programs = figures.minutes_of_programs()
    assert len(programs) == 5 and [*programs][-1] == "this package"
    pytest.importorskip("matplotlib")
    assert figures.minutes_chart().startswith(b"\x89PNG")


def test_pages_name_the_fastest_setting_that_the_front_pages_table_has() -> None:
    """One table answers what is fastest without loss; `auto` takes that on a processor."""
    from lantern_hpu.backends.base import load_backend
    from lantern_hpu.backends.cpu import native
    from scripts.docs import figures

    best = {}
    for file in figures.MACHINES_OF_XL:
        _, row = figures.best_settings(file)[figures.LOSSLESS]
        best[file] = figures.label_of(row)
    assert best["xl-zen4.json"] == best["xl-int8.json"] == "eagle@chain_2"
    assert max(figures.read("race.json")["rows"], key=by_speed)["setting"] == "eagle@chain_2"
    for page in ("docs/tutorial.md", "docs/guides/choose-a-method.md"):
        assert "README.md#speed" in (ROOT / page).read_text("utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "isa", lambda: "avx512_bf16")
        assert load_backend("cpu").drafting_defaults(10**9).method == "eagle"


def by_speed(row: dict[str, Any]) -> float:
    """Of a lossless row of a race."""
    return float(row["times_ar"]) if row["lossless"] else 0.0


def test_links_of_the_front_page_can_be_made_absolute() -> None:
    from scripts.docs.absolute_links import LINK, absolute

    text = (ROOT / "README.md").read_text("utf-8")
    made = absolute(text, "https://raw", "https://pages")
    assert "![" in made and not LINK.search(made)
    assert made.count("(https://raw/docs/images/") == text.count("![")
