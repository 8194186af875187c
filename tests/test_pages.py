"""What pages say is so: files, names and headings that they mention exist, and commands that they show are parsed.

What is run besides: README and docs/recipes.md in test_readme.py, the tutorial in test_site.py.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

import pytest

import lantern_hpu
from lantern_hpu import cli
from lantern_hpu.backends import BACKENDS
from lantern_hpu.commands.options import Parser
from lantern_hpu.files import ASSETS, VERSION
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.zoo.cards import CARD
from lantern_hpu.zoo.registry import entries
from scripts.docs.reference_pages import MODELS_BY_DEVICE
from scripts.house import PRODUCT, sources

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "docs" / "reference" / "generated"


def written() -> list[Path]:
    """Markdown of the repository that people wrote."""
    listed = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("comfyui/*.md"),
        *ROOT.glob(".github/**/*.md"),
    ]
    return sorted(page for page in listed if GENERATED not in page.parents)


# ------------------------------------------------------------------------------------ names

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


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`([\w/.<>-]+(?:\.(?:py|json|toml|md|txt)|/))`", text))
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


def test_classes_that_many_packages_use_are_on_the_architecture_page() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    defined: set[str] = set()
    packages_of: dict[str, set[Path]] = {}
    for file in (f for part in PRODUCT for f in sources(part)):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                for name in node.names:
                    packages_of.setdefault(name.name, set()).add(file.parent)
    shared = {name for name, packages in packages_of.items() if len(packages) >= 4} & defined
    assert len(shared) > 20
    assert not sorted(name for name in shared if not re.search(rf"`{name}`", text))


def test_public_names_are_on_the_page_of_python() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text()
    names = set(lantern_hpu.__all__) - {"__version__"}
    assert not sorted(name for name in names if f"lantern_hpu.{name}\n" not in text)


# Tables that nothing here was measured for
COMPUTED_OR_QUOTED = ("Status", "Lower bounds", "What others published", "Claims, sources, checks")


@pytest.mark.parametrize("page", written(), ids=lambda page: page.name)
def test_figures_have_the_date_or_the_raw_file_of_their_measurement(page: Path) -> None:
    intro, *sections = re.split(r"\n(?=#{2,4} )", page.read_text(encoding="utf-8"))
    for section in sections:
        title, _, text = section.partition("\n")
        figures = re.findall(r"\b\d+\.\d+\b", "".join(re.findall(r"^\|.*$", text, re.M)))
        if len(figures) >= 4 and title.lstrip("# ") not in COMPUTED_OR_QUOTED:
            assert re.search(r"\b20\d\d-\d\d-\d\d\b|\.json\b", intro + text), (
                f"{page.name}, {title}"
            )


# ------------------------------------------------------------------------------------ links

FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|\b(?:src|href)=\"([^\"]+)\"")
PAGES = [*written(), ROOT / "llms.txt", *ROOT.glob("docs/**/*.ipynb")]
OUTSIDE = ("http://", "https://", "mailto:")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in links(page):
        if link.startswith(OUTSIDE):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        # What a build of the site generates is lacking where the repository is browsed
        lacks = GENERATED in target.parents or not target.exists()
        if lacks or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


# ------------------------------------------------------------------------------------ facts


def measured(name: str) -> set[str]:
    """What the environments of all raw files say of something."""
    raw = [json.loads(file.read_text()) for file in ROOT.glob("benchmarks/results/*.json")]
    return {str(one.get("environment", {}).get(name) or "") for one in raw} - {""}


def millions() -> str:
    """Parameters of the embedded model's target."""
    from safetensors import safe_open

    with safe_open(ASSETS / "builtin" / "target.safetensors", "pt") as file:
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    return f"{sum(sizes) / 1e6:.0f}"


def oldest_python() -> str:
    (found,) = re.findall(
        r'^requires-python = ">=(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M
    )
    return str(found)


NODES = ast.parse((ROOT / "comfyui" / "nodes.py").read_text()).body
NUMBERS = ("no", "one", "two", "three", "four")
# What stands in several places: what the code says, and a pattern a place, whose group has to say the same
FACTS: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "version": (
        lambda: VERSION,
        {
            "CITATION.cff": r"^version: (\S+)",
            "CHANGELOG.md": r"^## (\S+)",
            "comfyui/pyproject.toml": r'^version = "(\S+)"',
        },
    ),
    "oldest Python": (
        oldest_python,
        {
            "README.md": r"Python (\S+) or later",
            "docs/install/cpu.md": r"^Python (\S+) or later",
            "CONTRIBUTING.md": r"every CPython from (\S+) on",
            "comfyui/pyproject.toml": r'^requires-python = ">=(\S+)"',
            "gaudi_emulator/pyproject.toml": r'^requires-python = ">=(\S+)"',
        },
    ),
    "size of the embedded model": (
        millions,
        {
            "README.md": r"a model of (\d+) M parameters that ships inside",
            "llms.txt": r"A (\d+) M-parameter model is part",
            "docs/guides/choose-a-method.md": r"the model's own (\d+) M parameters",
            "docs/processors.md": r"Its (\d+) M parameters",
        },
    ),
    "nodes": (
        lambda: NUMBERS[sum(isinstance(one, ast.ClassDef) and bool(one.bases) for one in NODES)],
        {"README.md": r"\[(\w+) nodes\]", "comfyui/README.md": r"^(\w+) nodes, "},
    ),
    "methods": (
        lambda: {name.removesuffix("2") for name in METHODS if METHODS[name].drafts},
        {"README.md": r" · (EAGLE, .*)\.$", "llms.txt": r"with (EAGLE, .*?), on "},
    ),
    "devices": (
        lambda: {*BACKENDS},
        {
            "README.md": r"diffusion models\.\*\* On (.*?), with one code",
            "llms.txt": r"Jacobi, on (.*?)\. ",
            "pyproject.toml": r"^description = .*, on (.*)\"$",
            "CITATION.cff": r"^abstract: .* on (.*)$",
        },
    ),
    "cards that were measured": (
        lambda: measured("card"),
        {"llms.txt": r"one CUDA card, an (.*?);"},
    ),
}
WORDS = {"nvidia": "cuda", "gaudi": "hpu", "cpus": "cpu"}
FILLING = {"and", "cards", "intel", "plain"}


def said(text: str) -> set[str]:
    """The words of a list as the code has them."""
    parts = re.findall(r"[\w+-]+", text.lower())
    return {WORDS.get(part, part) for part in parts} - FILLING


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_is_the_same_in_all_its_places(fact: str) -> None:
    truth, places = FACTS[fact]
    for page, pattern in places.items():
        found = re.search(pattern, (ROOT / page).read_text("utf-8"), re.M)
        assert found, f"{page} does not say it any more"
        expected = truth()
        if isinstance(expected, set):
            assert said(found[1]) == set().union(*map(said, expected)), page
        else:
            assert found[1].lower() == expected, page


MODELS = {
    "README.md": r"(LlamaGen, .*?) · ",
    "llms.txt": r"\((LlamaGen, .*?)\)",
    "docs/index.md": r": (LlamaGen, .*?)\. One",
}


@pytest.mark.parametrize("page", MODELS)
def test_each_family_of_models_is_named_where_they_are_listed(page: str) -> None:
    found = re.search(MODELS[page], " ".join((ROOT / page).read_text("utf-8").split()))
    assert found, f"{page} does not list them any more"
    names = found[1].replace("> ", "").split(", ")
    known = [(entry.family, entry.title) for entry in entries().values()]
    named = {family for family, title in known if title.startswith(tuple(names))}
    assert named == {family for family, _ in known}
    assert all(any(title.startswith(name) for _, title in known) for name in names), names


NEVER_RUN = {
    "published weights": {
        "README.md": r"Never run so far:\*\* published weights",
        "llms.txt": r"No published weights were loaded yet",
        "docs/guides/deploy-gaudi.md": r"no published weights were loaded yet",
        "docs/evaluation.md": r"No published weights were available",
    },
    "hpu": {
        "README.md": r"Never run so far:.* and a Gaudi card",
        "llms.txt": r"the Gaudi code passes an emulator and has run on no card",
        "docs/guides/after-optimum-habana.md": r"not run on a card",
    },
}


@pytest.mark.parametrize("what", NEVER_RUN)
def test_pages_say_what_was_never_run_until_a_raw_file_has_it(what: str) -> None:
    raw = [json.loads(file.read_text()) for file in ROOT.glob("benchmarks/results/*.json")]
    models = {str(one.get("model") or "builtin") for one in raw}
    ran = {
        "hpu": what in measured("device"),
        "published weights": not all(m.startswith("builtin") for m in models),
    }
    for page, pattern in NEVER_RUN[what].items():
        assert bool(re.search(pattern, (ROOT / page).read_text("utf-8"))) is not ran[what], page


def test_no_page_installs_from_an_index_that_lacks_the_package() -> None:
    texts = {page.name: page.read_text("utf-8") for page in PAGES}
    texts |= {"a model's card": CARD, "models by device": MODELS_BY_DEVICE}
    assert sum("pip install" in text for text in texts.values()) > 5
    wrong = re.compile(r"pip install (?:-\S+ )*[\"']?lantern[-_]hpu", re.I)
    assert not [name for name, text in texts.items() if wrong.search(text)]


def test_what_the_embedded_model_tells_of_a_word_is_what_was_counted() -> None:
    """Each caption whose object was missing in a tenth of its pictures has a word that is warned of, and no other."""
    about = json.loads((ASSETS / "builtin" / "model.json").read_text())
    counted = json.loads((ROOT / "benchmarks/results/objects-embedded.json").read_text())["rows"]
    usual, better = counted[0], counted[-1]
    assert usual["sampling"]["guidance_scale"] == about["sampling"]["cfg_scale"]
    assert (
        usual["sampling"]["temperature"]
        == better["sampling"]["temperature"]
        == about["sampling"]["temperature"]
    )
    assert better["sampling"]["guidance_scale"] == 5
    left = {caption for caption, count in usual["missing"].items() if count / usual["seeds"] >= 0.1}
    for word, remark in about["condition"]["remarks"]:
        mine = [caption for caption in usual["missing"] if word in caption.split()]
        assert left.intersection(mine), word
        left.difference_update(mine)
        often, less = (
            round(100 * sum(row["missing"][caption] for caption in mine) / len(mine) / row["seeds"])
            for row in (usual, better)
        )
        assert remark == f"missing in {often} % of its pictures, in {less} % with cfg_scale 5"
    assert not left


# ------------------------------------------------------------------------------------ commands

COMMANDED = [page for page in written() if page.name != "CHANGELOG.md"] + [ROOT / "llms.txt"]
SHELL, INDENTED = r"^```(?:bash|shell|console)\n(.*?)^```", r"(?:^ {4}\S.*\n(?: {8}.*\n)*)+"
# Of a name alone no option is parsed
INLINE = r"(?<!`)`((?:lantern-hpu [^`]+ --|python -m (?:scripts|lantern_\w+|tests)\.)[^`]+)`(?!`)"
STARTS = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(lantern-hpu|gaudi|python -m (?:lantern_hpu\.generate|(?:scripts|lantern_lab|tests)\.[\w.]+)) "
)
VARIABLES = {
    "$TREES": "--method ar,eagle@chain",
    "$card": "3",
    "${card}": "3",
}  # that the pages set


class ParsedError(Exception):
    """The arguments are fine."""


def commands(page: Path) -> list[list[str]]:
    """The words of each command of ours on a page, in blocks and in lines."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(SHELL, text, re.M | re.S) + re.findall(INDENTED, text, re.M)
    lines = [line.strip() for b in blocks for line in b.replace("\\\n", " ").splitlines()]
    lines += [re.sub(r"\s+", " ", found) for found in re.findall(INLINE, text)]
    parts = (part.strip() for line in lines for part in re.split(r"&&|\||&$", line))
    ours = dict.fromkeys(part for part in parts if STARTS.match(f"{part} "))
    return [words(part) for part in ours if "COMMAND" not in part]


def words(command: str) -> list[str]:
    """A program, as a module, and its arguments."""
    for name, value in VARIABLES.items():
        command = command.replace(name, value)
    given = shlex.split(command, comments=True)
    while re.match(r"[A-Z_]+=", given[0]):
        given.pop(0)
    if given[0] == "python":
        return given[2:] if given[2] != "lantern_hpu.generate" else ["generate", *given[3:]]
    return given[1:]


LISTED = [(page, given) for page in COMMANDED for given in commands(page)]


def test_published_files_that_a_page_compares_are_of_the_models_weights() -> None:
    """`compare` refuses files of other weights; a reader's file is of the model as it is today."""
    own = json.loads((ROOT / "lantern_hpu/assets/builtin/model.json").read_text())["files"]
    now = {name.removesuffix(".safetensors"): digest for name, digest in own.items()}
    files = [w for _, given in LISTED if given[0] == "compare" for w in given if "benchmarks/" in w]
    assert files
    for file in files:
        weights = json.loads((ROOT / file).read_text())["weights"]
        assert weights == {name: now[name] for name in weights}, file


@pytest.mark.parametrize(
    ("page", "given"), LISTED, ids=[f"{page.name}: {' '.join(given)}" for page, given in LISTED]
)
def test_command_of_a_page_is_parsed(
    page: Path, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def patched(real: Any) -> Any:
        def parse_args(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
            real(self, *args, **kwargs)
            raise ParsedError

        return parse_args

    for kind in (argparse.ArgumentParser, Parser):
        monkeypatch.setattr(kind, "parse_args", patched(kind.parse_args))
    name, *rest = given
    if "." not in name:
        assert name in cli.COMMANDS, page
        with pytest.raises(ParsedError):
            cli.main(given)
        return
    monkeypatch.setattr(sys, "argv", [name, *rest])
    main = import_module(name).main
    with pytest.raises(ParsedError):
        main()


# README, recipes and tutorial are run by test_readme.py and test_site.py, plans and lists here, and all else is parsed
RUN_ELSEWHERE = ("README.md", "recipes.md", "tutorial.md")
RUN_HERE = re.compile(r"(models|scripts\.house|models plan [a-z-][\w.-]+ .*)$")
LEFT = dict.fromkeys(" ".join(g) for page, g in LISTED if page.name not in RUN_ELSEWHERE)
RUN = [command for command in LEFT if RUN_HERE.match(command)]
# All else is parsed above and not run, and why
NOT_RUN = {
    r"models plan (NAME|FOLDER)": "a place for the reader's own",
    r"models download|.*(llamagen-[ct]|anole-|janus-|lumina-|emu3|u0-|simplear|mammothmoda2|glm-image|models/t2i)": (
        "gigabytes that are downloaded; test_checkpoints.py reads their formats"
    ),
    r".*--device (cuda|hpu)(?! --emulate)": "needs a card",
    r".*--emulate": "minutes on the emulator; test_hpu.py is shorter",
    r"serve": "ends by a signal; test_serve.py",
    r"doctor": "asks the machine; test_doctor.py",
    r"(lantern_lab\.embedded|tests\.checkpoints)": "hours, or gigabytes; test_scripts.py is smaller",
    r"(lantern_lab\.measure|scripts\.(docs|release))": "minutes of measuring; their tests are of toy sizes",
    r"fidelity": "minutes of drawing; test_fidelity.py is of a toy size",
    r"(bench|compare|tune|evaluate|train|models stretch|lint|generate)": "README, recipes and tutorial run others",
}


def test_every_command_of_a_page_is_run_or_there_is_a_reason() -> None:
    """The first pattern that fits is the reason; one that fits nothing any more is to go."""
    used = set[str]()
    for command in LEFT:
        if command not in RUN:
            reason = next((pattern for pattern in NOT_RUN if re.match(pattern, command)), None)
            assert reason, f"{command}: run it, or say why not"
            used.add(reason)
    assert used == set(NOT_RUN)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_command_that_draws_nothing_runs(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *rest = command.split()
    monkeypatch.setattr(sys, "argv", [name, *rest])
    done = import_module(name).main() if "." in name else cli.main([name, *rest])
    assert not done and capsys.readouterr().out
