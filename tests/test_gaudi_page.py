"""The pages about Gaudi say what is so: programs print what stands below them, and figures are counted here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lantern_hpu.cli import module_of, split_command
from lantern_lab.commands.lint import main
from lantern_lab.measure.gaudi_counts import GRAPHS, table
from scripts.docs.reference_pages import gaudi_flags
from tests import plain_user
from tests.folder import write_folder

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "guides" / "deploy-gaudi.md").read_text()
PAGE = (ROOT / "docs" / "gaudi-lint.md").read_text()
GAUDI = (ROOT / "docs" / "gaudi.md").read_text()
EXAMPLE = r"```python\n(.*?)```\n\n`lantern-hpu lint ([^`]*)` prints\n\n```text\n(.*?)```"
EXAMPLES = [(*match[:2], match[2]) for match in re.findall(EXAMPLE, PAGE, re.S)]


def test_every_program_of_the_page_is_an_example() -> None:
    assert len(EXAMPLES) == PAGE.count("```python") >= 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example[1])
def test_lint_prints_what_the_page_says(
    example: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program, options, said = example
    words = shlex.split(options)
    (tmp_path / words[-1]).write_text(program)
    monkeypatch.chdir(tmp_path)
    main(words)
    assert capsys.readouterr().out == said


def test_flags_of_the_page_are_those_that_are_set() -> None:
    in_code = {(row[0].strip("`"), row[1]) for row in gaudi_flags()}
    section = GAUDI[GAUDI.index("## Flags") : GAUDI.index("## Several cards")]
    assert set(re.findall(r"`((?:PT|HABANA)_\w+)", section)) == {name for name, _ in in_code}
    assert set(re.findall(r"`(PT_\w+)=(\w+)`", section)) <= in_code


@pytest.mark.slow
def test_counts_of_a_step_are_those_of_the_page() -> None:
    """All of them with the torch that the page names; others guard something else."""
    rows = re.findall(r"^\| `[\w+]+` \| `\w+` \| \d.*", GAUDI, re.M)
    asked = [re.findall(r"`([^`]+)`", row) for row in rows]
    assert {mode for _, mode in asked} == set(GRAPHS)
    of_the_page = torch.__version__.startswith("2.13")
    for row, (method, mode) in zip(rows, asked, strict=True):
        (line,) = [line for line in table("builtin", [method], [mode]) if line.startswith("| `")]
        cells, wanted = ([cell.strip() for cell in text.split("|")] for text in (line, row))
        assert cells[:6] == wanted[:6] and cells[7] == wanted[7]
        assert not of_the_page or cells[6] == wanted[6]


# The guide, by a user without rights. What stands for docker mounts as it does, and runs the command under the emulator

DOCKER = r"""#!{python}
import os, subprocess, sys
from pathlib import Path

words = sys.argv[1:]
if words[0] == "build":
    assert Path(words[words.index("-f") + 1]).is_file() and words[-1] == "."
elif words[0] == "compose":
    assert Path(words[words.index("-f") + 1]).is_file() and words[-1] == "serve"
    assert os.environ["UID"] == str(os.getuid())
else:
    at = words.index("lantern_hpu:hpu")
    given, command = words[1:at], words[at + 1 :]
    assert given[given.index("--user") + 1] == f"{{os.getuid()}}:{{os.getgid()}}", given
    mounts = dict(v.split(":")[::-1] for o, v in zip(given, given[1:]) if o == "-v")
    assert Path(mounts["/out"]).is_dir(), "docker makes it as root"
    if command[0] == "verify":
        command += ["--emulate", "--minutes", "{minutes}"]
    if command[0] in {run}:
        command = [sys.executable, "-m", "lantern_hpu", *command]
        code = subprocess.run(command, cwd=mounts["/out"]).returncode
        sys.exit(code > ("verify" in command))  # 1: what there was no time for is not answered
"""
COMMANDS = re.findall(r"```(?:bash|text)\n(.*?)```", GUIDE, re.S)


def follow(
    block: str, folder: Path, run: str = "verify", minutes: float = 0.001, ours: Path = ROOT
) -> str:
    """The output of a block of the guide, in a folder, by bash; of what is run in containers the commands named."""
    python, programs = plain_user.python(), folder / "bin"
    programs.mkdir(exist_ok=True)
    texts = {"docker": DOCKER.format(python=python, run=run.split(), minutes=minutes)}
    texts["lantern-hpu"] = f'#!/bin/sh\nexec {python} -m lantern_hpu "$@"\n'
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": plain_user.packages(ours)}
    done = plain_user.run(["bash", "-eu", "-c", block], folder, environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def block_with(word: str) -> str:
    (block,) = [block for block in COMMANDS if word in block]
    return block


def test_commands_of_the_guide_have_options_that_exist() -> None:
    said = re.findall(r"`(lantern-hpu [^`]* --[^`]*)`", GUIDE) + "\n".join(COMMANDS).splitlines()
    said = [line.replace("--emulate", "") for line in said]  # an option of every command
    found = [shlex.split(line) for line in said if re.match(r"(lantern-hpu|gaudi|serve) ", line)]
    asked = [split_command(words[words[0] != "serve" :]) for words in found]
    names = {"lint", "generate", "verify", "doctor", "serve", "models plan", "models download"}
    assert {name for name, _ in asked} >= names
    for name, args in asked:
        import_module(module_of(name)).make_parser().parse_args(args)


@pytest.mark.slow
def test_steps_of_the_guide_with_docker_run_for_a_user_without_rights() -> None:
    """The image, the card, serving; `verify` writes its report and page where the user can read them."""
    with plain_user.home() as folder:
        shutil.copytree(ROOT / "docker", folder / "docker")
        for word in ("docker build", "gaudi doctor", "docker compose"):
            follow(block_with(word), folder)
        assert (folder / "out" / "verify.html").is_file()
        report = json.loads((folder / "out" / "verify.json").read_text())
        (logs,) = [check for check in report["checks"] if check["name"] == "logs"]
        assert logs["ok"] and Path(logs["detail"]).is_relative_to(folder)


@pytest.mark.slow
def test_the_guide_can_be_followed_from_a_clone_by_a_user_without_rights() -> None:
    """All its commands, in files of this user; options at their ends take a tiny model and less time."""
    with plain_user.home() as folder:
        clone = folder / "clone"
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
        for name in files.stdout.splitlines():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name, follow_symlinks=False)
        write_folder(clone / "tiny")
        plain_user.give(folder)
        rehearsal = [f"{line} --model tiny" for line in block_with("lint --strict").splitlines()]
        rehearsal[-1] += " --minutes 0.2 || [ $? = 1 ]"
        assert "fits in 96.0 GB" in follow(block_with("models plan anole-7b"), clone, ours=clone)
        assert "0 errors, 0 warnings" in follow("\n".join(rehearsal), clone, ours=clone)
        assert (clone / "apple.png").stat().st_size and (clone / "verify.json").is_file()
        for word in ("docker build", "gaudi doctor", "docker compose"):
            follow(block_with(word), clone, "doctor verify", 0.2, clone)
        assert (clone / "out" / "verify.json").is_file()
