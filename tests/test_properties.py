"""What is read from outside, made up by hypothesis: it is taken, or refused by one clear error, and never hangs."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import save_file

from lantern_hpu.commands.generate import settings_again
from lantern_hpu.errors import LanternError, WeightsError
from lantern_hpu.methods.setting import Setting
from lantern_hpu.models.files.checkpoint import open_checkpoint
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.model import Placement
from lantern_hpu.results.images import METADATA, read_png
from lantern_hpu.results.outputs import read_saved_tokens
from lantern_hpu.results.prompts import read_prompts
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.tree import DraftTree, load_tree
from lantern_hpu.zoo.find import find_parts
from tests.marks import mostly_slow
from tests.test_serve import PATH, Running, served

# Each example takes as long as it takes, and nothing is kept between runs, so that they are alike.
HEALTH = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
SHARED: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": "HYPOTHESIS_SEED" not in os.environ,
    "suppress_health_check": HEALTH,
}


def examples(count: int) -> settings:
    """So many of them."""
    return settings(max_examples=count, **SHARED)


any_text = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates as well
numbers = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400])
leaves = st.none() | st.booleans() | numbers | any_text
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)

ERROR = {"message", "type", "param", "code"}
MORE = (  # of a setting, after its method
    st.sampled_from(
        ["", "@16", "@16:commit=4", "@2:2x1", "@", "@x", ":lambda-5", ":delta-0.1", ":gsd"]
    )
    | st.sampled_from([":lambda=5:k=10", "::", ":odd"])
    | st.builds(":{}={}".format, st.sampled_from(["k", "lambda", "delta", "tv"]), st.floats())
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.sampled_from(["cat", "red cat", "", " "]) | any_text,
    "n": st.integers(-1, 4),
    "seed": st.integers(-1, 2**63),
    "method": st.builds(
        str.__add__, st.sampled_from(["ar", "lantern++", "eagle2", "jacobi", "magic"]), MORE
    ),
    "cfg_scale": st.floats(),
    "temperature": st.floats(),
    "top_k": st.integers(-1, 40),
    "top_p": st.floats(0, 2),
    "relax_k": st.integers(-1, 40),
    "window": st.integers(-1, 40),
    "stream": st.booleans(),
    "partial_images": st.integers(-1, 4),
    "size": st.sampled_from(["auto", "8x8", "9x9"]),
    "user": any_text,
}
likely = st.fixed_dictionaries({}, optional={n: s | values for n, s in FIELDS.items()})
mostly_right = st.fixed_dictionaries(
    {"prompt": st.just("cat")},
    optional={n: FIELDS[n] for n in ("n", "seed", "method", "cfg_scale", "temperature", "stream")},
)
bodies = (
    (mostly_right | likely | values).map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=40)
    | st.integers(1, 60).map(lambda n: b"[" * 10**4 + b'{"prompt": 1}'[:n])
    | likely.flatmap(
        lambda v: st.integers(0, 60).map(lambda cut: json.dumps(v).encode()[:-cut] or b"{")
    )
)


@pytest.fixture(scope="module")
def server(model: Path) -> Any:
    methods = ("lantern++", "ar", "eagle2", "jacobi")
    with served(ServeOptions(str(model), methods=methods, slots=3, queue=64)) as running:
        yield running


def check_answer(server: Running, client: httpx.Client, body: bytes) -> int:
    """The status; below 500, in OpenAI's shape, and soon."""
    headers = {"Content-Type": "application/json"}
    answer = client.post(server.url + PATH, content=body, headers=headers, timeout=300)
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == ERROR, body
    elif answer.headers["content-type"].startswith("application/json"):
        assert answer.json()["data"]
    else:
        assert "image_generation.completed" in answer.text
    return answer.status_code


def ask_generated(server: Running, count: int) -> list[int]:
    statuses: list[int] = []
    with httpx.Client() as client:

        @examples(count)
        @given(bodies)
        def ask(body: bytes) -> None:
            statuses.append(check_answer(server, client, body))

        ask()
        assert client.get(server.url + "/livez").status_code == 200
    server.until(lambda: not server.decoder.queue.open_jobs)
    assert server.metric("recompiles_after_readiness") == 0
    return statuses


@pytest.mark.parametrize("count", mostly_slow([150, 1000], 150))
def test_no_body_is_a_failure_of_the_server(server: Running, count: int) -> None:
    statuses = ask_generated(server, count)
    assert 200 in statuses and 400 in statuses


# Of each field: the ends of its range, and what is just past them or far away
ENDS: dict[str, tuple[Any, ...]] = {
    "prompt": ("x" * 4000, "<![a]", "<a " * 1333, "\uffff", "</s><image>"),
    "n": (1, 10, 11),
    "seed": (0, 2**63 - 12, 2**63 - 1, 2**63),
    "cfg_scale": (1, 0.99, 100, 100.1, 1e308),
    "temperature": (0, 5e-324, 0.01, 0.0099, 10, 10.1, 1e308),
    "top_k": (0, 1, 31, 32, 33, 2**31, 2**63, 10**30),
    "top_p": (1, 1e-6, 9.9e-7, 1e-46, 5e-324, 0, 2),
    "method": (
        *("lambda=1:k=2147483648", "lambda=1000000000:k=1000000000", "lambda=1e300", "k=30"),
        *("delta=1:k=30", "delta=0:k=1000000000", "tv=1:budget=1e9", "tv=1e-45:budget=0"),
        *("omega=1000:nu=-10:mu=-10", "omega=0:nu=10", "distance=1e9:ranks=1000:gap=1", "gsd"),
        *("k=" + "9" * 5000, "@", "@scd:2:commit=:x", "@dynamic:64x16x4200", "@" + "x" * 5000),
        *("@0", "@1", "@256", "@257", "@" + "9" * 5000, "@2:64x1", "@4:commit=4"),
    ),
    "stream": (True, False),
    "partial_images": (0, 3, 4, 2**63),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lantern++", "ar", "eagle2", "jacobi", "scd"])
def test_fields_at_the_ends_of_their_ranges_are_no_failure_of_the_server(
    model: Path, method: str
) -> None:
    """In pairs, on a server that allows what it can."""
    allow: tuple[str, ...] = ("greedy", "top_k", "top_p")
    allow += {"lantern++": ("lambda-5", "gsd", "tv"), "scd": ("tv",), "ar": ()}.get(method, ())
    options = ServeOptions(str(model), methods=(method,), slots=3, queue=64, allow=allow)
    chosen = random.Random(0)
    with served(options) as running, httpx.Client() as client:
        statuses = []
        for _ in range(250):
            fields = {name: chosen.choice(ENDS[name]) for name in chosen.sample([*ENDS], 2)}
            if "method" in fields:
                mark = "" if fields["method"].startswith("@") else ":"
                fields["method"] = method + mark + fields["method"]
            body = json.dumps({"prompt": "cat"} | fields).encode()
            statuses.append(check_answer(running, client, body))
        assert {200, 400} <= set(statuses)
        assert running.decoder.failure is None
        assert running.metric("recompiles_after_readiness") == 0


def read_or_refused(read: Any, *arguments: Any) -> Any:
    """What came of it; anything but a LanternError fails the test."""
    try:
        return read(*arguments)
    except LanternError:
        return None


@examples(100)
@given(
    st.sampled_from([".txt", ".tsv", ".json"]),
    st.binary(max_size=60) | values.map(lambda v: json.dumps(v).encode()),
)
def test_a_prompt_file_is_read_or_refused(tmp_path: Path, kind: str, content: bytes) -> None:
    file = tmp_path / f"prompts{kind}"
    file.write_bytes(content)
    prompts = read_or_refused(read_prompts, file)
    assert prompts is None or all(p and p == p.strip() for p in prompts)


paths = st.lists(st.lists(st.integers(-1, 4), max_size=4), max_size=8)


@examples(150)
@given(values | paths | paths.map(lambda p: {"paths": p}))
def test_a_tree_is_read_or_refused(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(content))
    tree = read_or_refused(load_tree, str(file))
    assert tree is None or isinstance(tree, DraftTree)


WORDS = "eagle scd lantern++ auto ar : @ lambda=5 delta-0.1 chain 16 nan -1".split()
words = st.sampled_from([*WORDS, "9" * 40])


@examples(200)
@given(st.lists(words | any_text, max_size=6).map("".join))
def test_a_setting_is_read_or_refused_and_its_form_is_read_again(text: str) -> None:
    setting = read_or_refused(Setting.parse, text)
    if setting is not None and (setting.tree is None or not getattr(setting.tree, "file", None)):
        assert Setting.parse(str(setting)) == setting


@pytest.fixture(scope="module")
def png(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lantern_hpu.pipeline import LanternPipeline

    file = tmp_path_factory.mktemp("png") / "cat.png"
    file.write_bytes(LanternPipeline.from_pretrained(str(model))("cat", method="scd").png(0))
    return file


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """An object with one thing in it replaced or left out."""
    if not isinstance(value, dict) or not value or draw(st.integers(0, 3)) == 0:
        return draw(values)
    name = draw(st.sampled_from(sorted(value)))
    if draw(st.booleans()):
        return value | {name: draw(changed(value[name]))}
    return {key: each for key, each in value.items() if key != name}


@examples(150)
@given(st.data())
def test_metadata_of_a_png_are_read_or_refused(png: Path, tmp_path: Path, data: Any) -> None:
    info, file = PngInfo(), tmp_path / "x.png"
    with Image.open(png) as image:
        known = json.loads(image.text[METADATA])
        info.add_itxt(METADATA, json.dumps(data.draw(changed(known))))
        image.save(file, pnginfo=info)
    found = read_or_refused(read_png, file)
    if found is not None:
        weights: dict[str, str]
        for weights in (known["config"]["weights"], {}):
            read_or_refused(settings_again, file, found["config"], "cat", weights)


@examples(60)
@given(st.integers(0, 3000), st.binary(max_size=8))
def test_a_png_that_is_cut_or_damaged_is_read_or_refused(
    png: Path, tmp_path: Path, place: int, put: bytes
) -> None:
    content, file = png.read_bytes(), tmp_path / "x.png"
    file.write_bytes(content[:place] + (put + content[place + len(put) :] if put else b""))
    read_or_refused(read_png, file)


@examples(60)
@given(st.data())
def test_saved_tokens_are_read_or_refused(tmp_path: Path, data: Any) -> None:
    kinds = st.sampled_from([np.int32, np.float32, np.str_, np.bool_])
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    arrays: dict[str, Any] = {
        name: np.zeros(shape, data.draw(kinds))
        if data.draw(st.booleans())
        else np.asarray(json.dumps(data.draw(values)))
        for name in data.draw(
            st.sets(st.sampled_from(["tokens", "prompts", "metadata", "tokenizer"]))
        )
    }
    np.savez(tmp_path / "x.npz", **arrays)
    content = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(content[: data.draw(st.integers(0, len(content))) or None])
    read_or_refused(read_saved_tokens, tmp_path / "x.npz")


@examples(80)
@given(st.data())
def test_a_checkpoint_is_read_or_refused(tmp_path: Path, data: Any) -> None:
    """Cut off, with a header of another length, or with one that lies."""
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3, 2), "b": torch.ones(4)}, file)
    content = file.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "length", "header"]))
    if kind == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif kind == "length":
        length = data.draw(st.integers(0, 2**64 - 1) | st.sampled_from([2**40, 2**63]))
        content = struct.pack("<Q", length) + content[8:]
    else:
        shape = data.draw(st.lists(st.integers(-1, 2**40), max_size=3))
        ends = data.draw(st.lists(st.integers(-1, 2**40), max_size=3))
        header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": ends}}).encode()
        content = struct.pack("<Q", len(header)) + header + content[-40:]
    file.write_bytes(content)
    found = read_or_refused(open_checkpoint, file)
    if found is not None:
        for name in found.shapes:
            read_or_refused(found.read, name)


@pytest.mark.parametrize("files", [[], ["target.safetensors"], None, "target.safetensors", 7])
def test_files_without_checksums_are_refused(model: Path, tmp_path: Path, files: Any) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "tiny"))
    about = json.loads((folder / "model.json").read_text()) | {"files": files}
    (folder / "model.json").write_text(json.dumps(about))
    with pytest.raises(WeightsError, match=r"model\.json"):
        open_model(find_parts(str(folder))).load(Placement(None))


@examples(40)
@given(st.data())
def test_a_model_folder_with_another_description_is_read_or_refused(
    model: Path, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    folder = tmp_path_factory.mktemp("model")
    known = json.loads((model / "model.json").read_text())
    for name in known["files"]:
        (folder / name).symlink_to(model / name)
    (folder / "model.json").write_text(json.dumps(data.draw(changed(known))))

    def load() -> None:
        opened = open_model(find_parts(str(folder)))
        config = opened.config.target
        if config.parameters < 10**6:  # what is larger is refused by its tensors' shapes alone
            opened.load(Placement(None))

    read_or_refused(load)
