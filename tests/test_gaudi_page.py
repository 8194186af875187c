"""The pages about Gaudi say what is so: programs print what stands below them, and figures are counted here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gaudi_emulator.lint.command import main
from scripts.docs.reference_pages import gaudi_flags

ROOT = Path(__file__).parent.parent
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
