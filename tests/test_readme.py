"""Commands and examples of README and docs/recipes.md do what they say, and the test command is the one CI runs."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lantern_hpu import cli
from lantern_hpu.commands.generate import main
from tests.folder import write_folder

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
RECIPES = (ROOT / "docs" / "recipes.md").read_text()
# A benchmark is shortened: its figures are not the point here. The first image is drawn with the embedded model, the
# others with a tiny one, or one with as many codes as they ask for: what their options do is the point.
FIRST = 'lantern-hpu generate --prompt "a red apple" --output apple.png'
SHORTER = {
    "generate": ["--model", "tiny"],
    "bench": ["--model", "tiny", "--num-images", "1", "--batch-sizes", "1"],
    "fidelity": ["--model", "tiny", "--num-images", "8", "--draws", "8", "--timed", "1"],
    "race": ["--model", "tiny", "--prompt", "red cat"],
    "lint": ["--method", "ar", "--model", "tiny"],
    "tune": ["--model", "tiny", "--num-images", "2"],
    "train": ["--model", "tiny", "--samples", "8", "--steps", "2", "--measured", "1"],
}

MODEL = """
import torch
import habana_frameworks.torch.core as htcore

layer = torch.nn.Linear(4, 4).to("hpu")
layer(torch.ones(2, 4, device="hpu"))
htcore.mark_step()
"""


def commands() -> list[str]:
    """Every command of the tables that ends by itself, in their order, after the first one."""
    listed = re.findall(
        r"\| `((?:python -m lantern_hpu\.generate|lantern-hpu) [^`]+)` \|$", TEXT + RECIPES, re.M
    )
    return list(dict.fromkeys([FIRST, *(line for line in listed if line != "lantern-hpu serve")]))


def run(command: str) -> int:
    """Run a command in this process."""
    words = shlex.split(command)
    words = ["generate", *words[3:]] if words[0] == "python" else words[1:]
    shorter = [] if command == FIRST or "--script" in command else SHORTER.get(words[0], [])
    if ":k=" in command:
        shorter = ["--model", "many-codes"]
    return cli.main([*words, *shorter])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, all_cores: None) -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("readme")
    patch.chdir(folder)
    write_folder(folder / "tiny")
    write_folder(folder / "many-codes", codes=1024)
    (folder / "my_model.py").write_text(MODEL)  # the reader's own
    (folder / "prompts.txt").write_text("\n".join(f"{a} cat {b}" for a in "abcd" for b in "efg"))
    yield folder
    patch.undo()


def made_by(command: str) -> list[str]:
    """Files and folders that a command writes."""
    return re.findall(r"(?:--output|--report|--svg) (\S+)", command)


def run_once(folder: Path, command: str) -> None:
    """Run a command, after those that make what it reads."""
    if command in DONE:
        return
    DONE.add(command)
    read = set(shlex.split(command)) - set(made_by(command))
    for other in LISTED:
        if read & set(made_by(other)):
            run_once(folder, other)
    for file in (word for word in read if word.startswith("benchmarks/")):
        assert (ROOT / file).exists()
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "bench.json", folder / file)  # another's report, of the same model
    assert run(command) == 0, command
    for file in made_by(command):
        assert (folder / file).exists(), command


LISTED = commands()
DONE: set[str] = set()  # in this process and its folder


@pytest.mark.slow
@pytest.mark.parametrize("command", LISTED)
def test_command_runs(folder: Path, command: str) -> None:
    run_once(folder, command)


def test_first_command_is_there() -> None:
    assert FIRST in TEXT and len(LISTED) >= 20


def test_front_page_is_short_and_answers_first() -> None:
    """Models, devices, lossless, what was never run, speed and the reader's own model before line 40."""
    lines = TEXT.splitlines()
    assert len(lines) <= 110 and all(len(x) <= 200 for x in lines if not x.startswith(("|", "![")))
    first = "\n".join(lines[:40])
    for promised in (
        "not for diffusion models",
        "Never run so far",
        FIRST,
        "## Speed",
        "## Your model",
    ):
        assert promised in first


def test_python_example_runs(folder: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert '"builtin"' in code
    code = code.replace('"builtin"', '"tiny"')
    exec(compile(code, "README.md", "exec"), {})
    assert main(["--from-png", "seed7.png", "--output", "the-same.png"]) == 0


def test_install_line_is_the_one_ci_runs() -> None:
    assert TEXT.count('pip install -c constraints.txt -e ".[test]" && pytest\n') == 1
