"""Files of others: links, devices and caches that somebody else may have put there, and contents that lie."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import stat
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

from lantern_hpu.commands import generate, pixels
from lantern_hpu.errors import OutputError, WeightsError, exit_code
from lantern_hpu.files import check_free, own_cache, sha256, write_file
from lantern_hpu.methods import tuned_trees
from lantern_hpu.models.config import (
    ConditionConfig,
    DrafterConfig,
    T5Config,
    TransformerConfig,
    VQConfig,
)
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.model import Placement, cached_nearest, nearest_codes
from lantern_hpu.results.images import METADATA
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
    assert tuned_trees.tuned_methods({"batch_size": 1}, ["scd"]) == {}


def spoiled_row(table: np.ndarray, code: int) -> np.ndarray:
    """With one code in a row that is not among those compared with the codebook."""
    result = table.copy()
    result[1, 3] = code
    return result


def test_a_cached_table_of_neighbours_is_checked(cache: Path) -> None:
    """One that lists other codes draws other tokens, and codes beyond the codebook are read beyond memory."""
    book = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    want = nearest_codes(book, 5)
    assert torch.equal(cached_nearest(book, 5), want)
    (file,) = (cache / "neighbours").iterdir()
    kept = np.load(file)
    beyond = [spoiled_row(kept, code) for code in (50, -1, 2**30)]
    shapes = (kept[:, ::-1], kept[:3], kept[:, :3])
    for wrong in (*shapes, kept + 1, kept.astype(float), kept * 0 - 1, *beyond):
        np.save(file, wrong)
        with pytest.warns(UserWarning, match="it is made again"):
            assert torch.equal(cached_nearest(book, 5), want)
        assert np.array_equal(np.load(file), kept)
    file.unlink()
    os.mkfifo(file)
    with pytest.warns(UserWarning, match="no regular file; it is made again"):
        assert torch.equal(cached_nearest(book, 5), want)
    assert np.array_equal(np.load(file), kept)


def test_a_tokenizer_of_more_codes_than_the_target_draws_is_refused(
    model: Path, tmp_path: Path
) -> None:
    """Neighbours that are computed of its codebook would be codes that no row has."""
    folder = Path(shutil.copytree(model, tmp_path / "tiny"))
    about, weights = json.loads((folder / "model.json").read_text()), folder / "vq.safetensors"
    stored = load_file(weights)
    name = "quantize.embedding.weight"
    save_file(stored | {name: stored[name].repeat(2, 1)}, weights)
    about["vq"]["codebook_size"] *= 2
    about["files"][weights.name] = sha256(weights)
    (folder / "model.json").write_text(json.dumps(about))
    with pytest.raises(WeightsError, match="64 codes, the target draws 32"):
        open_model(find_parts(str(folder)))


def test_a_damaged_tuned_tree_is_as_if_it_were_not_there(cache: Path) -> None:
    file = tuned_trees.file_of({"method": "scd", "batch_size": 1})
    for text in ("", "{", "[]", '{"paths": 3}', '{"name": "scd:x", "paths": [[0]]}', "\0"):
        file.write_text(text)
        assert tuned_trees.tuned_methods({"batch_size": 1}, ["scd"]) == {}


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


CONFIGS = {
    "target": TransformerConfig,
    "condition": ConditionConfig,
    "drafter": DrafterConfig,
    "vq": VQConfig,
    "text": T5Config,
}
NAMES = dict.fromkeys(("name", "fingerprint", "pixels"), str | None)
NUMBERS: tuple[Any, ...] = (True, "4", -1, 10**30, float("nan"), float("inf"), [], {})
LISTS: tuple[Any, ...] = (3, "x", {}, [True], [1.5], [[1]], [None])
# Of none of the types that a value may have
WRONG: dict[Any, tuple[Any, ...]] = {
    **dict.fromkeys((bool, bool | Literal["rms"]), (0, 1, *NUMBERS[1:])),
    int: (1.5, *NUMBERS),
    float: (-0.5, *(value for value in NUMBERS if value != 10**30)),
    str: (3, *(value for value in NUMBERS if value != "4")),
    Literal: (3, *NUMBERS),
    tuple[int, int]: (["x"], [-1, -1], [1], [1, 1, 1], *LISTS),
    tuple[int, ...]: (["x"], [-1], [10**30], *LISTS),
    tuple[str, ...]: ([3], *LISTS),
    tuple[tuple[str, str], ...]: ([["a"]], [["a", 3]], [["a", "b", "c"]], *LISTS),
    tuple[tuple[int, int], ...]: (["x"], [[1]], [[-1, 2]], [[1, 2, 3]], *LISTS),
}
# Of the right type, and of no model
OUT_OF_RANGE: dict[tuple[str, str], tuple[Any, ...]] = {
    ("target", "layers"): (0, 1001, 10**9),
    ("target", "heads"): (0, 3),
    ("target", "kv_heads"): (0, 3),
    ("target", "head_size"): (0, 3),
    ("target", "grid"): ([0, 4], [10**9, 1]),
    ("target", "norm_eps"): (1, 1e300),
    ("target", "rope_base"): (0, 0.5),
    ("target", "grid_step"): (0,),
    ("target", "prefixes"): ([0], [4, 2], [2, 2]),
    ("target", "word_layers"): (1, 3),
    ("target", "spare_codes"): (32,),
    ("drafter", "shift"): (2, 96),
    ("drafter", "ffn_dim"): (0,),
    ("drafter", "norm_eps"): (1.5,),
    ("vq", "res_blocks"): (1001, 10**9),
    ("vq", "multipliers"): ([], [0, 1]),
    ("vq", "codebook_size"): (0,),
    ("vq", "decoder_only"): (2, 4, 96, 128),
    ("text", "num_layers"): (0, 1001),
    ("text", "d_model"): (0,),
    ("condition", "frame"): ("x", ""),
}


def wrong_values(kind: Any) -> Iterator[Any]:
    """Of no value that an annotation allows; 0 is none where there may be None."""
    kinds = get_args(kind) if type(None) in get_args(kind) else (kind, None)
    plain = Literal if get_origin(kinds[0]) is Literal else kinds[0]
    yield from WRONG[plain]
    if kinds[1] is None:
        yield None
    elif plain in (int, float):
        yield 0


def test_values_of_a_description_are_of_their_types_and_ranges(model: Path, tmp_path: Path) -> None:
    """Every value of every part; one error that names the file, before anything is allocated."""
    known = json.loads((model / "model.json").read_text()) | {"text": {}}
    for name in known["files"]:
        (tmp_path / name).symlink_to(model / name)
    file = tmp_path / "model.json"

    def refused(about: dict[str, Any]) -> bool:
        file.write_text(json.dumps(about))
        try:
            open_model(find_parts(str(tmp_path)))
        except WeightsError as error:
            return "model.json" in str(error)
        return False

    assert not refused(known)
    every = [
        (part, name, value)
        for part, config in CONFIGS.items()
        for name, kind in get_type_hints(config).items()
        for value in (*wrong_values(kind), *OUT_OF_RANGE.get((part, name), ()))
    ]
    taken = [
        (part, name, value)
        for part, name, value in every
        if not refused(known | {part: known[part] | {name: value}})
    ]
    beside = NAMES | {"notes": tuple[str, ...] | None, "codebook": int, "diffusion": int}
    for name, kind in beside.items():
        taken += [("", name, v) for v in wrong_values(kind) if not refused(known | {name: v})]
    named: tuple[Any, ...] = ("cpu", ["cpu"], ["ar"], ["x", None], ["scd", 3], [[], None])
    for value in ([], *({"cpu": pair} for pair in named)):
        taken += [] if refused(known | {"fastest": value}) else [("", "fastest", value)]
    assert len(every) > 600 and not taken


METADATA_OF_OTHERS = (
    *('{"config": 3}', '{"config": {"weights": 3}}', '{"prompt": 3}', '{"prompt": "a"}', "[1]"),
    *(
        '{"prompt": "a", "seed": [1]}',
        '{"prompt": "\\ud800", "seed": 1}',
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


# Files that a script damages: `DAMAGED=2000 pytest -n 0 tests/test_hostile_files.py -k damaged_by_a_script`

DAMAGED = int(os.environ.get("DAMAGED", "40"))
SECONDS = 10  # of this process, for each
ROOM = 2 << 30  # bytes of addresses that sizes which lie may take


def changed(value: Any, rng: random.Random) -> Any:
    """A value of another type, range, size or depth."""
    deep: Any = value
    for _ in range(rng.choice([1, 2, 300])):
        deep = [deep] if rng.random() < 0.5 else {"x": deep}
    others = [*HOSTILE, deep, [value] * 1000, "x" * 100_000, "../" * 9, "\ud800", "\0"]
    if isinstance(value, int | float):
        others += [-value, value + 1, 2 * value, 1000 * value, value / 3, 0, 2**31, 2**63] * 2
    return rng.choice(others)


def damaged_text(value: Any, rng: random.Random) -> str:
    """A JSON document with some of its values changed or left out, or cut, or nested without end."""
    for path in rng.sample(
        paths := list(leaves(value)), min(rng.choice([1, 1, 1, 2, 4]), len(paths))
    ):
        with suppress(LookupError, TypeError, AttributeError):  # what held it was changed before
            found = value
            for key in path:
                found = found[key]
            value = put(value, path, changed(found, rng))
            if rng.random() < 0.2:
                value = {key: held for key, held in value.items() if key != path[0]}
    text = json.dumps(value)
    kind = rng.random()
    if kind < 0.05:
        return text[: rng.randrange(len(text))]
    return rng.choice("[{") * 100_000 + text if kind < 0.07 else text


def small_files(folder: Path, pattern: str) -> list[Path]:
    """Without tokenizers, which a library reads."""
    return sorted(f for f in folder.rglob(pattern) if f.stat().st_size < 100_000)


def damaged_folder(source: Path, folder: Path, rng: random.Random, one: str | None = None) -> None:
    """A folder of links, in which one JSON file is damaged."""
    for file in source.rglob("*"):
        link = folder / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            link.symlink_to(file)
    file = rng.choice(small_files(folder, one or "*.json"))
    text = damaged_text(json.loads(file.read_text()), rng)
    file.unlink()
    file.write_text(text, errors="replace")


def damaged_png(source: Path, file: Path, rng: random.Random) -> None:
    info = PngInfo()
    with Image.open(source) as image:
        info.add_itxt(METADATA, damaged_text(json.loads(image.text[METADATA]), rng))
        image.save(file, pnginfo=info)
    data = file.read_bytes()
    if rng.random() < 0.2:
        at = rng.randrange(len(data))
        file.write_bytes(data[:at] + (rng.randbytes(4) + data[at + 4 :] if at % 2 else b""))


def damaged_tokens(source: Path, file: Path, rng: random.Random) -> None:
    held = dict(np.load(source))
    name = rng.choice([*held])
    was, size = held[name], rng.choice([(), (0,), (3,), (1, 1), (1, 16, 1), (2, 16), (1, 10**6)])
    if name == "metadata" and rng.random() < 0.8:
        held[name] = np.array([damaged_text(json.loads(str(t)), rng) for t in was.reshape(-1)])
    elif rng.random() < 0.2:
        held.pop(name)
    else:
        numbers = (np.zeros, np.ones, lambda size: np.full(size, rng.choice([-1, 10**9, np.nan])))
        kinds = (np.int64, np.int8, np.float32, np.bool_, np.str_, object, "V4", "M8[s]")
        with np.errstate(invalid="ignore"):
            held[name] = rng.choice(numbers)(size).astype(rng.choice(kinds))
    np.savez(file, **held)
    data = file.read_bytes()
    if rng.random() < 0.1:
        file.write_bytes(data[: rng.randrange(len(data))])


def load_only(folder: Path) -> int:
    """What `generate` does before it draws, which takes long for models of many codes."""
    return exit_code(lambda: int(not open_model(find_parts(str(folder))).load(Placement())))


def ends_well(seed: int, model: Path, drawn: Path, public: Path, place: Path) -> bool:
    """Draw from what was damaged: it fails with one error, or there is a picture. -> whether there is"""
    rng, picture = random.Random(seed), place / "picture.png"
    output, file = ["--output", str(picture)], place / "damaged"
    if seed % 4 == 0:
        damaged_folder(model, file, rng, "model.json")
        act = partial(generate.main, ["--model", str(file), "--prompt", "cat", *output])
    elif seed % 4 == 1:
        damaged_folder(rng.choice(small_files(public, "*.json")).parent, file, rng)
        act = partial(load_only, file)
    elif seed % 4 == 2:
        damaged_png(drawn / "a.png", file.with_suffix(".png"), rng)
        act = partial(generate.main, ["--from-png", str(file.with_suffix(".png")), *output])
    else:
        damaged_tokens(drawn / "a.npz", file.with_suffix(".npz"), rng)
        command = [str(file.with_suffix(".npz")), "--model", str(model), *output]
        act = partial(pixels.main, command)
    began, said = time.process_time(), io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        code = act()
    assert time.process_time() - began < SECONDS
    assert "Traceback" not in said.getvalue() and code in (0, 2)
    assert said.getvalue().count("error: ") == (code == 2), said.getvalue()
    if code == 0 and seed % 4 != 1:
        with Image.open(picture) as image:
            image.load()
    assert code == 0 or not picture.exists()
    return code == 0


@pytest.fixture
def little_room() -> Iterator[None]:
    """What is larger than it may be fails here, and not the machine."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits addresses as Linux does")
@pytest.mark.filterwarnings("ignore")
def test_files_that_are_damaged_by_a_script_are_one_error_or_a_picture(
    model: Path, drawn: Path, public: Path, tmp_path: Path, little_room: None
) -> None:
    """Descriptions of models, published folders, PNG files and saved tokens."""
    wrong, pictures = dict[int, str](), 0
    for seed in range(DAMAGED):
        place = tmp_path / str(seed)
        place.mkdir()
        try:
            pictures += ends_well(seed, model, drawn, public, place)
        except Exception as error:
            wrong[seed] = "".join(traceback.format_exception(error)[-3:])
        shutil.rmtree(place)
    print(f"{DAMAGED} damaged, {pictures} read all the same")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(f"{s}: {t}" for s, t in wrong.items())
    assert 0 < pictures < DAMAGED
