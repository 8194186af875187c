"""Folders and names as people have them: homes, dots, slashes, the Hub's cache, what an operating system adds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lantern_hpu.commands import generate
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.outputs import image_files
from lantern_hpu.zoo.find import find_parts


def files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("output", "file"),
    [
        ("out", "out/000-cat.png"),
        ("llamagen-cfg-7.5-seed-0", "llamagen-cfg-7.5-seed-0/000-cat.png"),
        ("run.1", "run.1/000-cat.png"),
        ("cat.png", "cat.png"),
        ("cat.PNG", "cat.PNG"),
        ("cat.png/", "cat.png/000-cat.png"),
        ("v1.jpg/", "v1.jpg/000-cat.png"),
        ("there.png", "there.png/000-cat.png"),
    ],
)
def test_an_output_is_a_folder_unless_its_ending_is_a_pictures(
    output: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.png").mkdir()
    assert image_files(output, ["cat"], False)[0] == [Path(file)]


def test_a_tilde_is_the_home(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "m")
    words = ["--model=~/m", "--prompt", "cat", "--output=~/made/", "--report=~/r.json"]
    assert generate.main(words) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"m", "made", "r.json"}
    assert PartOverrides(vq="~/m/vq.safetensors").resolved().vq == str(
        tmp_path / "m/vq.safetensors"
    )


def test_the_hubs_own_folder_is_its_main_version(tmp_path: Path) -> None:
    target = tmp_path / "models--someone--Lumina-mGPT-7B-768"
    drafter = tmp_path / "models--someone--drafter"
    for folder in (target, drafter):
        files(folder, "snapshots/old/model.safetensors", "snapshots/new/model.safetensors")
        files(folder, "refs/main", "blobs/abc")
        (folder / "refs" / "main").write_text("new\n")
    parts = find_parts(str(target), PartOverrides(drafter=str(drafter)))
    assert parts.target == target / "snapshots" / "new"
    assert parts.drafter == drafter / "snapshots" / "new"
    assert parts.name == "Lumina-mGPT-7B-768"
    shutil.rmtree(target / "refs")
    shutil.rmtree(target / "snapshots" / "new")
    assert find_parts(str(target)).target == target / "snapshots" / "old"


def test_files_with_a_dot_in_front_are_not_weights(tmp_path: Path) -> None:
    names = "c2i_B_256.pt", "vq.pth", "drafter.pt"
    files(tmp_path, *names, *(f"._{name}" for name in names), "._model.safetensors.index.json")
    parts = find_parts(str(tmp_path))
    assert parts.target == tmp_path / "c2i_B_256.pt"
    assert parts.vq == tmp_path / "vq.pth" and parts.drafter == tmp_path / "drafter.pt"


@pytest.mark.parametrize(
    "vq", ["vq.pth", "vq.safetensors", "vq-16.ckpt", "vqgan.bin", "vq_ds16_c2i.pt"]
)
def test_a_tokenizer_beside_a_target_is_no_second_model(vq: str, tmp_path: Path) -> None:
    parts = find_parts(str(files(tmp_path, "c2i_B_256.pt", vq)))
    assert parts.target == tmp_path / "c2i_B_256.pt" and parts.vq == tmp_path / vq


def test_a_model_moves_between_devices_by_the_path_it_was_given(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    pipeline = LanternPipeline.from_pretrained(model.name)
    monkeypatch.chdir(tmp_path)
    assert pipeline.to(dtype="bfloat16").model.source == str(model)
