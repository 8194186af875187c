"""Files, folders and requests that a script makes from what people have: read as meant or refused, nothing else."""

from __future__ import annotations

import io
import json
import random
from csv import writer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from lantern_hpu.errors import LanternError
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.model import Placement
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.prompts import numbered_prompts
from lantern_hpu.serve.calls import read_call
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.protocol import ApiError, ImagesRequest
from lantern_hpu.serve.served import make_served_model
from lantern_hpu.zoo.find import find_parts
from scripts.checkpoints.files import draw_all
from scripts.checkpoints.llamagen import VQ16, gpt_shapes, write_llamagen_vq
from tests.test_serve import served

# ---------------------------------------------------------------------------------------- prompt files

TEXTS = [
    "a red cat",
    'a 5" pipe',
    '"open',
    "café, naïve",
    "赤いりんご",
    "a\u2028b",
    "tab-free; with, marks",
    "🦁 lion",
    "",
    "it's 'quoted'",
    '"whole"',
    "prompt",
]
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "latin-1")
ENDS = ("\n", "\r\n", "\r")


def table(texts: list[str], mark: str, head: str, end: str) -> str:
    made = io.StringIO()
    rows = writer(made, delimiter=mark, lineterminator=end, doublequote=True, quoting=1)
    rows.writerow(["id", head, "note"])
    rows.writerows([n, text, "x"] for n, text in enumerate(texts))
    return made.getvalue()


def prompt_file(rng: random.Random) -> tuple[str, str, str, dict[int, str]]:
    """-> ending, text, encoding, and the prompts that are meant"""
    texts = rng.sample(TEXTS, rng.randint(2, 6))
    encoding, end = rng.choice(ENCODINGS), rng.choice(ENDS)
    meant = {n: text for n, text in enumerate(texts) if text}
    name = rng.choice(["prompt", "Prompt", "text", "caption", "CAPTIONS"])
    shapes: dict[str, Any] = {
        "list": texts,
        "objects": [{"id": 1, name: text} for text in texts],
        "by name": {f"prompt_{n}": {name: text} for n, text in enumerate(texts)},
        "held": {"version": 1, "prompts": texts},
        "COCO": {"info": {}, "annotations": [{"id": 0, "caption": text} for text in texts]},
        "column": {name: {str(n): text for n, text in enumerate(texts)}},
    }
    kind = rng.choice(["txt", "tsv", "csv", "jsonl", *shapes])
    if kind in shapes:
        plain = rng.random() < 0.5
        return ".json", json.dumps(shapes[kind], ensure_ascii=plain), encoding, meant
    if kind == "jsonl":
        lines = [json.dumps({name: text}, ensure_ascii=False) for text in texts]
        return ".jsonl", end.join(lines), encoding, meant
    if kind == "txt":
        lines = [text for text in texts if text]
        return ".txt", end.join(texts), encoding, dict(enumerate(lines))
    mark = "\t" if kind == "tsv" else rng.choice(",;")
    return f".{kind}", table(texts, mark, name, end), encoding, meant


@pytest.mark.parametrize("seed", range(60))
def test_a_prompt_file_gives_what_was_meant_or_one_error(seed: int, tmp_path: Path) -> None:
    ending, text, encoding, meant = prompt_file(random.Random(seed))
    encoding = encoding if encoding != "latin-1" or "é" in text else "utf-8"
    file = tmp_path / ("prompts" + random.Random(seed).choice([ending, ending.upper()]))
    file.write_bytes(text.encode(encoding, "replace"))
    if encoding.startswith("utf-8"):
        assert numbered_prompts(file) == meant
        return
    with pytest.raises(LanternError, match="UTF-8"):
        numbered_prompts(file)


# ---------------------------------------------------------------------------------- checkpoint folders

WRAPS = ("", "_orig_mod.", "module.", "model.", "module._orig_mod.", "_fsdp_wrapped_module.model.")
HOLDERS = (None, "model", "module", "state_dict", "ema")
JUNK = ("._c2i_B_256.pt", ".DS_Store", "._vq_ds16_c2i.pt", "README.md", "vq_training.log")
FAULTS = (
    "none",
    "none",
    "none",
    "pointer",
    "page",
    "cut",
    "numpy",
    "a tensor less",
    "a shard less",
)


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return draw_all(gpt_shapes(layers=1), torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("vq") / "vq.pt"
    write_llamagen_vq(file, VQ16, torch.Generator().manual_seed(1))
    return file.read_bytes()


def write_checkpoint(folder: Path, rng: random.Random, state: dict[str, Tensor]) -> str:
    """-> what is wrong with it"""
    fault, wrap, holder = rng.choice(FAULTS), rng.choice(WRAPS), rng.choice(HOLDERS)
    named = {wrap + name: tensor.contiguous() for name, tensor in state.items()}
    if fault == "a tensor less":
        named.pop(rng.choice([name for name in named if "layers" in name]))
    for name in rng.sample(JUNK, 2):
        (folder / name).write_bytes(b"\0\5\x16\7")
    (folder / "config.json").write_text(json.dumps({"block_size": 256, "num_attention_heads": 2}))
    if rng.random() < 0.5 or fault == "a shard less":
        names, files = sorted(named), [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        for n, shard in enumerate(files):
            save_file({name: named[name] for name in names[n::2]}, folder / shard)
        if fault == "a shard less":
            (folder / files[rng.randrange(2)]).unlink()
        file = next(path for name in files if (path := folder / name).exists())
        if fault == "numpy":
            return "none"  # there are none in such files
    else:
        file = folder / "c2i_B_256.pt"
        content: dict[str, Any] = {holder: named} if holder else named
        if fault == "numpy":
            content = {"model": named, "loss": np.float64(0.5)}
        torch.save(content, file)
    if fault in ("pointer", "page"):
        file.write_text("version https://git-lfs.x\n" if fault == "pointer" else "<html>Sign in")
    elif fault == "cut":
        file.write_bytes(file.read_bytes()[:-4000])
    return fault


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_folder_is_the_model_that_was_saved_or_one_error(
    seed: int, state: dict[str, Tensor], tokenizer: bytes, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    fault = write_checkpoint(tmp_path, rng, state)
    vq = rng.choice(["vq.pth", "vq_ds16_c2i.pt"])
    (tmp_path / vq).write_bytes(tokenizer)
    if fault != "none":
        with pytest.raises(LanternError) as refused:
            open_model(find_parts(str(tmp_path))).load(Placement())
        said = {"pointer": "git lfs pull", "page": "web page", "numpy": "scalar"}.get(fault, "")
        assert said in str(refused.value)
        return
    model = open_model(find_parts(str(tmp_path))).load(Placement())
    mine = model.target.state_dict()
    assert torch.equal(mine["embed.weight"], state["tok_embeddings.weight"].float())
    assert torch.equal(mine["head.weight"], state["output.weight"].float())
    assert torch.equal(
        mine["layers.0.attention.out.weight"], state["layers.0.attention.wo.weight"].float()
    )


# -------------------------------------------------------------------------------------- request bodies

FIELDS: dict[str, tuple[Any, ...]] = {
    "prompt": ("red cat", "café 🦁", "a\u2028b", "", " ", "\ud83d", "x\x1b", 7, None),
    "model": ("dall-e-3", "tiny", "gpt-5", None, 3),
    "n": (1, 2, 0, 11, "1", None),
    "size": ("auto", "8x8", "1024x1024", "", None),
    "quality": ("auto", "hd", "best", None),
    "style": ("vivid", "natural", "none", None),
    "background": ("auto", "transparent", None),
    "user": ("me", "", 5, None),
    "seed": (0, 7, -1, 2**63, 1.5, None),
    "response_format": ("b64_json", "url", "base64", None),
    "output_format": ("png", "jpeg", "webp", "gif", None),
    "output_compression": (100, 0, 101, -1, None),
    "negative_prompt": ("dog", "", None),
    "stream": (False, True, "yes", None),
    "top_k": (0, 5, 10**9, None),
    "temperature": (1.0, 0.0, 1e9, None),
    "steps": (20,),
}


def body_of(seed: int) -> dict[str, Any]:
    """A prompt and up to four fields, values that mean something more often than others."""
    rng = random.Random(seed)
    names = rng.sample([name for name in FIELDS if name != "prompt"], rng.randint(0, 4))
    chosen = {name: rng.choice(FIELDS[name][: 2 + rng.randint(0, 3)]) for name in names}
    return {"prompt": rng.choice(FIELDS["prompt"][: rng.choice([3, 3, 9])]), **chosen}


@pytest.fixture(scope="module")
def options(model: Path) -> ServeOptions:
    names = ("tiny", "dall-e-3")
    return ServeOptions(str(model), served_model_name=names, methods=("ar",), slots=2)


@pytest.mark.parametrize("seed", range(60))
def test_a_body_is_drawn_as_it_says_or_refused(
    seed: int, pipeline: LanternPipeline, options: ServeOptions
) -> None:
    body = body_of(seed)
    try:
        call = read_call(ImagesRequest.model_validate(body), make_served_model(pipeline, options))
    except (ApiError, ValidationError):
        return
    given = {name: value for name, value in body.items() if value is not None}
    (first, *others) = call.requests
    assert (first.prompt, 1 + len(others)) == (body["prompt"], given.get("n", 1))
    assert first.seed == given.get("seed", first.seed)
    assert first.sampling.top_k == given.get("top_k", first.sampling.top_k)
    assert first.sampling.temperature == given.get("temperature", first.sampling.temperature)
    assert call.output == (given.get("output_format", "png"), given.get("output_compression", 100))
    assert call.kinds == ((given["response_format"],) if "response_format" in given else call.kinds)
    assert call.stream == given.get("stream", False) and not given.get("negative_prompt")
    idle = [n for n in ("quality", "style", "background", "user") if given.get(n, "auto") != "auto"]
    assert all(any(name in said for said in call.warnings) for name in idle)


@pytest.mark.slow
def test_no_body_is_answered_with_a_servers_error(options: ServeOptions) -> None:
    with served(options) as running:
        for seed in range(60):
            body = {name: v for name, v in body_of(seed).items() if v != "\ud83d"}
            answer = running.post(**body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
