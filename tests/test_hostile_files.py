"""Files of others: links, devices and caches that somebody else may have put there, and contents that lie."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lantern_hpu.commands import generate, pixels
from lantern_hpu.errors import LanternError, OutputError, WeightsError
from lantern_hpu.files import check_free, own_cache, write_file
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.model import cached_nearest, nearest_codes
from lantern_hpu.results.images import METADATA
from lantern_hpu.tree import tuned_trees
from lantern_hpu.zoo.find import find_parts

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    "x",
    [],
    {},
    -1,
    1.5,
    float("nan"),
    float("inf"),
    10**9,
    10**30,
    [[]],
)


def test_what_is_written_first_has_a_name_that_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is opened through no link: another user's file keeps what it has."""
    theirs, goal = tmp_path / "theirs", tmp_path / "ours.png"
    theirs.write_text("secret")
    (tmp_path / f".ours.png.{os.getpid()}.tmp").symlink_to(theirs)
    write_file(goal, b"ours")
    assert theirs.read_text() == "secret" and goal.read_bytes() == b"ours"
    monkeypatch.setattr("lantern_hpu.files.secrets.token_hex", lambda _: "known")
    (tmp_path / ".ours.png.known.tmp").symlink_to(theirs)
    with pytest.raises(OutputError):
        write_file(goal, b"again", force=True)
    assert theirs.read_text() == "secret" and goal.read_bytes() == b"ours"


def test_devices_and_pipes_are_not_replaced_by_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        before = path.stat().st_mode
        for write in (lambda p: check_free([p], True), lambda p: write_file(p, b"", True)):
            with pytest.raises(OutputError, match="no regular file"):
                write(path)
        assert path.stat().st_mode == before and not stat.S_ISREG(before)


def test_many_places_are_checked_in_little_time(tmp_path: Path) -> None:
    """Each is compared with the others once: 30,000 would take minutes."""

    class Counted(type(tmp_path)):  # type: ignore[misc]
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return bool(super().__eq__(other))

        __hash__ = type(tmp_path).__hash__

    check_free([Counted(tmp_path / str(i)) for i in range(300)], False)
    assert Counted.compared < 3000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LANTERN_HPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_cache_where_others_may_write_is_not_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stat.S_IMODE(own_cache("trees").stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    for folder in (cache, cache / "trees"):
        folder.chmod(0o770)
        with pytest.raises(OutputError, match="is not used"):
            own_cache("trees")
        folder.chmod(0o700)
    own_cache("trees")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(OutputError, match="another user"):
        own_cache("trees")
    assert tuned_trees.tuned_windows({"batch_size": 1}, ["scd"]) == {}


def test_a_cached_table_of_neighbours_is_checked(cache: Path) -> None:
    """One that lists other codes draws other tokens."""
    book = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    want = nearest_codes(book, 5)
    assert torch.equal(cached_nearest(book, 5), want)
    (file,) = (cache / "neighbours").iterdir()
    kept = np.load(file)
    for wrong in (kept[:, ::-1], kept + 1, kept.astype(np.int64), kept[:3], kept * 0 - 1):
        np.save(file, wrong)
        assert torch.equal(cached_nearest(book, 5), want)
    assert np.array_equal(np.load(file), kept)


def test_a_damaged_tuned_tree_is_as_if_it_were_not_there(cache: Path) -> None:
    file = tuned_trees.file_of({"method": "scd", "batch_size": 1})
    for text in ("", "{", "[]", '{"paths": 3}', '{"name": "scd:x", "paths": [[0]]}', "\0"):
        file.write_text(text)
        assert tuned_trees.tuned_windows({"batch_size": 1}, ["scd"]) == {}


# Contents


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a JSON document are."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, part in inner:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from leaves(part, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    made = value.copy()
    made[path[0]] = put(value[path[0]], path[1:], new)
    return made


@pytest.fixture(scope="module")
def drawn(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    command = ["--model", str(model), "--prompt", "cat", "--method", "lantern++"]
    files = ["--output", str(folder / "a.png"), "--save-tokens", str(folder / "a.npz")]
    assert generate.main([*command, *files]) == 0
    return folder


def test_a_png_with_hostile_metadata_is_one_error(drawn: Path, tmp_path: Path) -> None:
    with Image.open(drawn / "a.png") as image:
        known, picture = json.loads(image.text[METADATA]), image.copy()
    del known["environment"]
    parser = generate.make_parser()
    for path in leaves(known):
        for value in HOSTILE:
            info = PngInfo()
            info.add_itxt(METADATA, json.dumps(put(known, path, value)))
            picture.save(tmp_path / "b.png", pnginfo=info)
            try:
                job = generate.read_job(parser.parse_args(["--from-png", str(tmp_path / "b.png")]))
                generate.settings_again(tmp_path / "b.png", job.known or {}, "tiny", {})
            except LanternError:
                pass


def test_a_description_of_hostile_sizes_is_one_error(model: Path, tmp_path: Path) -> None:
    """Before anything is allocated."""
    known = json.loads((model / "model.json").read_text())
    for name in known["files"]:
        (tmp_path / name).symlink_to(model / name)
    for value in (10**9, 1001, float("nan"), "x", -1):
        (tmp_path / "model.json").write_text(json.dumps(put(known, ("target", "layers"), value)))
        with pytest.raises(WeightsError, match=r"model\.json"):
            open_model(find_parts(str(tmp_path)))


METADATA_OF_OTHERS = (
    *('{"config": 3}', '{"config": {"weights": 3}}', '{"prompt": 3}', '{"prompt": "a"}', "[1]"),
    *(
        '{"prompt": "a", "seed": [1]}',
        '{"prompt": "a", "seed": 1, "config": {"weights": [3]}}',
        "x",
    ),
)


@pytest.mark.parametrize("metadata", METADATA_OF_OTHERS)
def test_tokens_with_hostile_metadata_are_one_error(
    drawn: Path, model: Path, tmp_path: Path, metadata: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = dict(np.load(drawn / "a.npz")) | {"metadata": np.array([metadata])}
    np.savez(tmp_path / "b.npz", **held)
    command = [str(tmp_path / "b.npz"), "--model", str(model), "--output", str(tmp_path / "b.png")]
    assert pixels.main(command) == 2
    assert "cannot read tokens" in capsys.readouterr().err and not (tmp_path / "b.png").exists()
