"""What GLM-Image refuses: one error each, before weights are read where that is possible."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lantern_hpu.commands import generate
from lantern_hpu.models.files.checkpoint import Stored
from lantern_lab.commands import stretch

pytest.importorskip("transformers.models.glm_image")


@pytest.fixture
def folder(public: Path) -> Path:
    return public / "glm-image"


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that must not be read."""
    monkeypatch.setattr(Stored, "fill", lambda *_: pytest.fail("weights were read"))


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What `generate` says."""
    command = ["--model", str(folder), "--device", "cpu", "--prompt", "red", *options]
    assert generate.main(command) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--height", "100"), "multiples of 32"),
        (("--height", "64", "--width", "0"), "multiples of 32"),
        (("--height", "96000", "--width", "3200"), "4111 positions, 4096 were trained"),
    ],
)
def test_sizes_that_cannot_be_drawn(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    unread: None,
    options: tuple[str, ...],
    why: str,
) -> None:
    assert why in refusal(folder, capsys, *options, "--save-tokens", "never.npz")


@pytest.mark.parametrize(
    "what",
    [
        "model-00002-of-00004.safetensors",
        "tokenizer.json",
        "processor_class is Another",
        "image_start_token_id is 7",
        "vae",
    ],
)
def test_checkpoints_that_are_not_whole_or_of_another_kind(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unread: None, what: str
) -> None:
    """A shard, the tokenizer or a part of what makes pixels is missing; previews or codes follow other rules."""
    pytest.importorskip("diffusers")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    inner, processor = copy / "vision_language_encoder", copy / "processor"
    if what == "vae":
        shutil.rmtree(copy / what)
    elif what == "tokenizer.json":
        (processor / what).unlink()
    elif what == "processor_class is Another":
        (processor / "processor_config.json").write_text('{"processor_class": "Another"}')
    elif what == "image_start_token_id is 7":
        about = json.loads((inner / "config.json").read_text())
        (inner / "config.json").write_text(json.dumps(about | {"image_start_token_id": 7}))
    else:
        (inner / what).unlink()
    assert what in refusal(copy, capsys)


def test_prompts_that_are_too_long(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "zq" * 600, "--height", "64", "--save-tokens", "never.npz")
    assert "up to 1009" in refusal(folder, capsys, *options)


def test_pictures_as_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No command takes one."""
    with pytest.raises(SystemExit) as ended:
        refusal(folder, capsys, "--image", "source.png")
    assert ended.value.code == 2


@pytest.mark.parametrize("to", ["glm-image", "llamagen-xl"])
def test_it_is_not_stretched(
    folder: Path, capsys: pytest.CaptureFixture[str], unread: None, to: str
) -> None:
    """Neither to its published sizes, nor to those of another kind."""
    why = {
        "glm-image": "it is of the family glm-image",
        "llamagen-xl": "they differ in kind: rope mrope and 2d",
    }
    assert stretch.main([to, "--model", str(folder), "--output", "never"]) == 2
    assert why[to] in capsys.readouterr().err
