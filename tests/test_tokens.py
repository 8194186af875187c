"""Tokens without pictures, and pictures of saved tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lantern_hpu.commands import generate
from lantern_hpu.commands import pixels as decode
from lantern_hpu.results.images import read_png

TEXT, EMU3 = "llamagen-t2i-256", "emu3"
TARGET, TOKENIZER = "t2i_XL_stage1_256.pt", "vq_ds16_t2i.pt"
PROMPTS = ("a red apple", "dog")


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pictures in `drawn`, and their tokens."""
    folder = tmp_path_factory.mktemp("saved")
    assert drawn(model, folder / "drawn", "--save-tokens", folder / "tokens.npz") == 0
    return folder


def drawn(model: Path, output: Path, *more: object, prompts: Any = PROMPTS) -> int:
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    given = ["--model", model, "--output", output, "--method", "ar", *words, *more]
    return generate.main([str(word) for word in given])


def decoded(model: Path, tokens: Path, output: Path, *more: object) -> int:
    return decode.main(
        [str(word) for word in (tokens, "--model", model, "--output", output, *more)]
    )


def same_pictures(one: Path, other: Path) -> bool:
    files = sorted(one.iterdir())
    assert files and [f.name for f in files] == [f.name for f in sorted(other.iterdir())]
    pairs = [[np.asarray(Image.open(at / f.name)) for at in (one, other)] for f in files]
    return all(np.array_equal(a, b) for a, b in pairs)


# ------------------------------------------------------------------------------------ pictures of saved tokens


def test_saved_tokens_become_the_pictures_that_were_drawn(
    model: Path, saved: Path, tmp_path: Path
) -> None:
    assert decoded(model, saved / "tokens.npz", tmp_path / "again") == 0
    assert same_pictures(saved / "drawn", tmp_path / "again")
    for file in (tmp_path / "again").iterdir():
        assert read_png(file) == read_png(saved / "drawn" / file.name)
    file, again = next((tmp_path / "again").iterdir()), tmp_path / "third.png"
    assert generate.main(["--from-png", str(file), "--output", str(again)]) == 0
    assert np.array_equal(np.asarray(Image.open(again)), np.asarray(Image.open(file)))


def test_tokens_of_another_program_become_pictures(
    model: Path, saved: Path, tmp_path: Path
) -> None:
    """A bare array: nothing is known of them, so their files carry nothing."""
    tokens = np.load(saved / "tokens.npz")["tokens"]
    np.save(tmp_path / "bare.npy", tokens)
    assert decoded(model, tmp_path / "bare.npy", tmp_path / "out") == 0
    for file, want in zip(
        *(sorted(f.iterdir()) for f in (tmp_path / "out", saved / "drawn")), strict=True
    ):
        assert np.array_equal(np.asarray(Image.open(file)), np.asarray(Image.open(want)))
        assert not getattr(Image.open(file), "text", {})


def test_what_closes_rows_is_left_out_of_a_picture(public: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.npz"
    assert drawn(public / EMU3, tmp_path / "drawn", "--save-tokens", tokens, prompts=["red"]) == 0
    assert decoded(public / EMU3, tokens, tmp_path / "again") == 0
    assert same_pictures(tmp_path / "drawn", tmp_path / "again")


# ------------------------------------------------------------------------------------ tokens without pictures


def without_tokenizer(public: Path, folder: Path) -> Path:
    copied = Path(shutil.copytree(public / TEXT, folder / TEXT))
    (copied / TOKENIZER).unlink()
    return copied


@pytest.mark.slow
def test_tokens_need_no_tokenizer_of_pictures(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are those that are drawn beside it, and become the same pictures once it is there."""
    bare, tokens = without_tokenizer(public, tmp_path), tmp_path / "tokens.npz"
    assert drawn(bare, tmp_path / "none", "--save-tokens", tokens) == 0
    said = capsys.readouterr()
    assert "no VQ tokenizer, so no pictures" in said.err and str(tokens) in said.out
    assert not list((tmp_path / "none").glob("*"))
    assert drawn(public / TEXT, tmp_path / "drawn", "--save-tokens", tmp_path / "all.npz") == 0
    one, other = (np.load(file)["tokens"] for file in (tokens, tmp_path / "all.npz"))
    assert np.array_equal(one, other)
    vq = ("--vq", public / TEXT / TOKENIZER)
    (bare / "text").rename(tmp_path / "text")  # decoding reads no prompts
    assert decoded(bare, tokens, tmp_path / "again", *vq) == 0
    assert same_pictures(tmp_path / "drawn", tmp_path / "again")


def test_what_needs_a_tokenizer_says_so(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, tokens = without_tokenizer(public, tmp_path), ("--save-tokens", tmp_path / "x.npz")
    for more, said in (
        ([], "the VQ tokenizer ("),
        ([*tokens, "--grid"], "try: leave them out, or --vq FILE where"),
        ([*tokens, "--method", "lantern++"], "which codes are neighbours is not known"),
    ):
        assert drawn(bare, tmp_path / "out", *more) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()


# ------------------------------------------------------------------------------------ bad tokens


def write(file: Path, **arrays: Any) -> Path:
    np.savez(file, **arrays)
    return file


def test_tokens_that_do_not_fit_are_refused(
    model: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, tokens = saved / "tokens.npz", np.load(saved / "tokens.npz")["tokens"]
    half = tmp_path / "half.npz"
    half.write_bytes(file.read_bytes()[:200])
    cases = {
        tmp_path / "none.npz": "No such file",
        half: "cannot read tokens",
        write(tmp_path / "a.npz", codes=tokens, others=tokens): "expected one array of",
        write(tmp_path / "b.npz", tokens=tokens / 2): "of float64",
        write(tmp_path / "c.npz", tokens=tokens[:, 1:]): "of another model",
        write(tmp_path / "d.npz", tokens=tokens + 30): "its codes from 0 to 31",
        write(tmp_path / "e.npz", tokens=tokens - 32): "its codes from 0 to 31",
        write(tmp_path / "f.npz", tokens=tokens, prompts=["one"]): "not each image has a prompt",
    }
    for bad, said in cases.items():
        assert decoded(model, bad, tmp_path / "out") == 2
        assert said in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*"))
    assert decoded(model, file, saved / "drawn") == 2
    assert "exists" in capsys.readouterr().err


def test_tokens_of_another_tokenizer_are_refused(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, other = tmp_path / "tokens.npz", tmp_path / TOKENIZER
    assert drawn(public / TEXT, tmp_path / "drawn", "--save-tokens", tokens) == 0
    content = torch.load(public / TEXT / TOKENIZER, weights_only=True)
    weights = content.get("model", content)
    weights["quantize.embedding.weight"] += 1.0
    torch.save(content, other)
    assert decoded(public / TEXT, tokens, tmp_path / "out", "--vq", other) == 2
    assert "another VQ tokenizer" in capsys.readouterr().err
