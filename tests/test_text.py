"""Prompts become what models were trained on: cleaned captions, T5 features, class numbers."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import shutil
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as Joiner
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, T5Config, T5EncoderModel, T5ForConditionalGeneration

from lantern_hpu.backends import host
from lantern_hpu.core import IMAGENET_CLASSES, Request
from lantern_hpu.errors import OptionError, WeightsError, needing, torchvision_misfit
from lantern_hpu.models.text import t5
from lantern_hpu.models.text.prefix import (
    IMAGENET,
    TextConditioner,
    TextFeatures,
    class_index,
    splitter,
)
from lantern_hpu.models.text.t5 import T5Conditioner, clean, clean_caption
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.serve.decoder import keep_encoder
from lantern_hpu.tree import DraftTree
from tests.published import with_settings

PREFIX, WIDTH = 12, 16
SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json")  # all but the weights
WORDS = "a red apple on the table blue fish in grass".split()
PROMPTS = ["a red apple", "blue fish in the grass", "on"]
LONG = "a red apple on the table a blue fish in the grass on a table"


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words, with T5's marks, in the files that T5's lie in."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    pieces += [(f"▁{word}", -2.0) for word in WORDS]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer, tokenizer.decoder = Metaspace(), Joiner()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "T5Tokenizer",
        "model_max_length": 8,  # shorter than the prefix, as 512 might be: transformers warns
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def t5_config() -> T5Config:
    make: Any = T5Config  # its arguments are typed in some releases, and not all of them
    config: T5Config = make(
        vocab_size=16,
        d_model=WIDTH,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        initializer_factor=4.0,  # so that tokens see each other clearly
        decoder_start_token_id=0,
    )
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 with its decoder, as flan-t5-xl comes, in two parts."""
    made = tmp_path_factory.mktemp("t5")
    torch.manual_seed(0)
    T5ForConditionalGeneration(t5_config()).save_pretrained(made, max_shard_size="8KB")
    assert len(list(made.glob("*.safetensors"))) > 1
    write_tokenizer(made)
    return made


def conditioner(folder: Path, keep: str = "host", **options: Any) -> T5Conditioner:
    return T5Conditioner(folder, PREFIX, options.pop("dtype", torch.float32), keep=keep, **options)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass through any encoder."""
    seen: list[int] = []
    forward = T5EncoderModel.forward

    def counted(self: T5EncoderModel, *args: Any, **options: Any) -> Any:
        seen.append(len(options["input_ids"]))
        return forward(self, *args, **options)

    monkeypatch.setattr(T5EncoderModel, "forward", counted)
    return seen


# --- T5


def flipped(embedding: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The contract, one prompt in NumPy: [P, C] and [P] with pads on the right -> on the left."""
    count = int(mask.sum())
    rolled = np.concatenate([embedding[count:], embedding[:count]])
    mask = mask[::-1]
    return rolled * mask[:, None], mask.astype(bool)


@pytest.fixture(scope="module")
def twin(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Features and mask of each prompt, by transformers alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = T5EncoderModel.from_pretrained(folder, local_files_only=True).eval().float()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    made = {}
    for prompt in [*PROMPTS, LONG]:
        tokens = tokenizer(
            prompt, max_length=PREFIX, padding="max_length", truncation=True, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = model(tokens["input_ids"], tokens["attention_mask"]).last_hidden_state
        made[prompt] = flipped(hidden[0].numpy(), tokens["attention_mask"][0].numpy())
    return made


def test_features_are_those_of_transformers_with_pads_on_the_left(
    folder: Path, twin: dict[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    text: TextConditioner = conditioner(folder)
    condition = text.encode([*PROMPTS, LONG])
    assert torch.equal(text.encode(["A RED *apple*"]).features, condition.features[:1])
    assert text.encode([]).features.shape == (0, PREFIX, WIDTH)
    assert condition.features.shape == (4, PREFIX, WIDTH)
    assert condition.valid.dtype == torch.bool
    for row, (features, valid) in enumerate(twin.values()):
        np.testing.assert_array_equal(condition.valid[row].numpy(), valid)
        np.testing.assert_allclose(condition.features[row].numpy(), features, rtol=1e-5, atol=1e-6)
    assert condition.valid.sum(-1).tolist() == [4, 6, 2, PREFIX]  # words and the end mark


def same(a: TextFeatures, b: TextFeatures) -> bool:
    return torch.equal(a.features, b.features) and torch.equal(a.valid, b.valid)


def test_features_depend_on_the_number_format_alone(folder: Path, tmp_path: Path) -> None:
    """Not on where the encoder stays, nor on the container of its weights."""
    expected = conditioner(folder).encode(PROMPTS)
    half = conditioner(folder, dtype=torch.bfloat16).encode(PROMPTS).features
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), expected.features, rtol=0.1, atol=0.1)
    for keep in ("device", "host", "free"):
        text = conditioner(folder, keep)
        assert same(text.encode(PROMPTS), expected)
        text.encode(["a table"])  # the encoder is asked for again
    for name in SMALL:
        shutil.copy(folder / name, tmp_path)
    weights = T5EncoderModel.from_pretrained(folder, local_files_only=True).state_dict()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert same(conditioner(tmp_path).encode(PROMPTS), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "stays"), [("device", True), ("host", True), ("free", False)])
def test_only_free_lets_the_encoder_go(
    folder: Path, keep: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []
    load: Any = T5EncoderModel.from_pretrained

    def watched(*args: Any, **options: Any) -> Any:
        model, info = load(*args, **options)
        made.append(weakref.ref(model))
        return model, info

    monkeypatch.setattr(T5EncoderModel, "from_pretrained", watched)
    text = conditioner(folder, keep)
    assert not made, "loaded before any prompt came"
    text.prepare(PROMPTS)
    gc.collect()
    assert [model() is not None for model in made] == [stays]
    text.prepare(["a table"])
    assert len(made) == (1 if stays else 2)


def test_what_is_known_does_not_wait_for_what_is_encoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server encodes a new prompt in one thread while the steps begin images in another."""
    text, going, real = conditioner(folder), threading.Event(), T5Conditioner._features
    first = text.encode(PROMPTS)

    def features(self: T5Conditioner, prompt: str) -> Any:
        assert going.wait(100)
        return real(self, prompt)

    monkeypatch.setattr(T5Conditioner, "_features", features)
    other = threading.Thread(target=text.prepare, args=(["a table"],))
    other.start()
    assert same(text.encode(PROMPTS), first) and text.notes(LONG)
    assert other.is_alive() and "a table" not in text._known
    going.set()
    other.join()
    assert "a table" in text._known


def test_a_server_keeps_the_encoder_on_the_device_where_it_fits(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model))
    pipeline.engines.get(pipeline.spec([Request("cat")], DraftTree.root_only(), 2))
    for keep, free, where in (
        ("auto", 0, "auto"),
        ("auto", 1 << 40, "device"),
        ("host", 1 << 40, "host"),
    ):
        text = conditioner(folder, keep)
        monkeypatch.setattr(pipeline.model.condition, "text", text)
        monkeypatch.setattr(host, "available_bytes", lambda free=free: free)
        keep_encoder(pipeline)
        assert text.keep == where
    assert "room" in pipeline.fit.decided["text encoder"]


def test_tokens_of_a_text_are_split_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a prompt comes, and not again by the thread of the steps; whoever changes the list changes no other."""
    texts: list[str] = []

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        texts.append(text)
        return {"input_ids": [len(text)]}

    words = splitter(tokenizer)
    words("a red apple").append(0)
    assert words("a red apple") == [11] and texts == ["a red apple"]


def test_known_prompts_are_not_encoded_again(
    folder: Path, tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the folder read again; the oldest make room, and what was asked for at once is all there."""
    monkeypatch.setattr(t5, "CACHED", 2)
    text = conditioner(Path(shutil.copytree(folder, tmp_path / "t5")), "free")
    first = text.encode(PROMPTS)
    assert first.valid.any(-1).all()
    again = text.encode([PROMPTS[2], PROMPTS[0], PROMPTS[2]])
    assert torch.equal(again.features, first.features[[2, 0, 2]]) and len(runs) == len(PROMPTS)
    text.encode(["a table"])
    shutil.rmtree(tmp_path / "t5")
    assert torch.equal(text.encode(PROMPTS[:1]).features, first.features[:1])
    assert len(runs) == len(PROMPTS) + 1
    with pytest.raises(WeightsError, match="cannot load the T5 encoder"):
        text.encode(PROMPTS[2:])  # older than the two that stay


def test_notes_tell_what_is_cut_and_what_is_empty_and_nothing_else_is_said(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = conditioner(folder)
    assert text.notes("a red apple") == []
    (note,) = text.notes(LONG)
    assert "16 tokens, 12 are read; left out: 'grass on a table'" in note
    assert text.notes("#12") == [
        "the prompt is empty after cleaning, so the model may draw anything"
    ]
    assert text.notes(" ") == ["the prompt is empty, so the model may draw anything"]
    assert text.encode(["#12"]).valid.sum() == 1  # the end mark
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer.json or spiece.model"),
        ("*.safetensors", "model-00001-of"),
        ("*.safetensors*", "model.safetensors or pytorch_model.bin"),
    ],
)
def test_missing_files_are_named(folder: Path, tmp_path: Path, gone: str, named: str) -> None:
    copy = tmp_path / "t5"
    shutil.copytree(folder, copy)
    for file in copy.glob(gone):
        file.unlink()
    with pytest.raises(WeightsError) as caught:
        conditioner(copy)
    assert str(copy) in str(caught.value) and f"missing: {named}" in str(caught.value)


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    """transformers would fill what is missing with noise."""
    for name in SMALL:
        shutil.copy(folder / name, tmp_path)
    save_file({"wte.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match="it lacks"):
        conditioner(tmp_path).encode(PROMPTS)


@pytest.mark.parametrize("package", ["transformers", "ftfy", "bs4"])
def test_missing_packages_are_named(
    folder: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OptionError, match=package) as caught:
        conditioner(folder)
    assert caught.value.hint == 'pip install "lantern-hpu[models]"'


def test_a_torchvision_of_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.9.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy", "torch==2.13.0"])
    with pytest.raises(OptionError, match="does not load") as caught, needing("transformers", "x"):
        raise RuntimeError("operator torchvision::nms does not exist")
    assert "built for torch 2.13.0, and torch is 2.9.0+cpu" in caught.value.why
    assert caught.value.hint == "pip uninstall torchvision"
    versions["torch"] = "2.13.0+cu130"
    assert torchvision_misfit() == ""


# --- captions


@pytest.mark.parametrize(
    ("caption", "cleaned"),
    [
        ("A%20red+Apple", "a red apple"),
        ("  Loud TITLE  ", "loud title"),
        ("a <person> waving", "a person waving"),
        ("cat https://example.com/x today", "cat today"),
        ("cat www.shop.co/cats today", "cat today"),
        ("a <b>bold</b> cat", "a bold cat"),
        ("cat by @artist_1 here", "cat by here"),
        ("a 猫 cat", "a cat"),
        ("black—white", "black-white"),
        ("a “big” cat", 'a "big" cat'),
        ("the cat‘s’ hat", "the cat's' hat"),
        ("a &amp;quot;big cat", "a big cat"),
        ("cat &amp;amp dog", "cat dog"),
        ("host 192.168.1.10 cat", "host cat"),
        ("cat 1:23 \\n", "cat 1:23"),
        ("cat 1:23<br> ", "cat 1:23"),  # no space is left there
        ("cat 1:23 <br>", "cat"),
        ("a photo of two cats, on a sofa.", "a photo of two cats, on a sofa."),
        ("cat\\nhat", "cat hat"),
        ("cat #12 hat", "cat hat"),
        ("cat #12345 hat", "cat hat"),
        ("cat #1234 hat", "cat 1234 hat"),
        ("cat 1234567 hat", "cat hat"),
        ("photo_1.jpg of a cat", "of a cat"),
        ("say '''hi''' cat", 'say "hi" cat'),
        ("cat...hat", "cat hat"),
        ("***cat*** (hat) [x] ~ ©", "cat hat x"),
        ("cat . hat", "cat hat"),
        ("this-is-my-cute-cat", "this is my cute cat"),
        ("black-and-white", "black-and-white"),
        ("a ﬁne cat", "a fine cat"),
        ("tom &lt; jerry", "tom < jerry"),
        ("cat jc6640 hat", "cat hat"),
        ("cat jc6640vc hat", "cat hat"),
        ("cat 6640vc231 hat", "cat hat"),
        ("cat worldwide free shipping", "cat"),
        ("cat free download", "cat"),
        ("cat click for more", "cat"),
        ("cat png images", "cat"),
        ("cat page 12 hat", "cat hat"),
        ("cat j2d1a2a hat", "cat hat"),
        ("cat 1024x768 hat", "cat hat"),
        ("cat 3.5×4 hat", "cat hat"),
        ("cat : hat", "cat: hat"),
        ("cat,hat", "cat, hat"),
        ("cat\t \n hat", "cat hat"),
        ('"a cat"', "a cat"),
        ("-cat-", "cat"),
        (".hidden", ""),
    ],
)
def test_each_rule_of_cleaning(caption: str, cleaned: str) -> None:
    assert clean_caption(caption) == cleaned


def test_captions_are_cleaned_twice() -> None:
    """A space that `&amp;` left, as of `basic_clean` of DeepFloyd IF, no longer shields a link the second time."""
    assert clean("&amp; www.foo.co.uk") == ""
    assert clean("a sign that says <![a]").startswith("a sign that says")
    caption = "a cat %2540nick"
    assert clean_caption(caption) == "a cat %40nick"
    assert clean(caption) == clean_caption(clean_caption(caption)) == "a cat"


@pytest.mark.parametrize("layers", [10**9, 0, -1, "x", [2]])
def test_an_encoder_of_a_billion_layers_is_refused_before_it_is_made(
    folder: Path, tmp_path: Path, layers: Any
) -> None:
    with pytest.raises(WeightsError, match=r"config\.json"):
        conditioner(with_settings(folder, tmp_path / "t5", num_layers=layers))


@pytest.mark.parametrize(
    "part", ["<a ", "<![a]", "<!--", "<", "&amp;", "%25", "x.", "http://", "-"]
)
def test_no_caption_takes_long_to_clean(part: str) -> None:
    """Of the longest that a server takes; tags alone took a second."""
    clean("cat")
    began = time.process_time()
    clean((part * 4000)[:4000])
    assert time.process_time() - began < 0.3


# --- classes


def test_all_names_but_four_mean_one_class() -> None:
    first = [line.partition(",")[0].strip() for line in IMAGENET.read_text().splitlines()]
    shared = {"crane", "Cardigan", "cardigan", "maillot"}
    apart = [(index, name) for index, name in enumerate(first) if name not in shared]
    assert len(first) == IMAGENET_CLASSES and len(apart) == len(set(first) - shared)
    assert [class_index(name) for _, name in apart] == [index for index, _ in apart]


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("207", 207),
        (" 0 ", 0),
        ("golden retriever", 207),
        ("Golden Retriever", 207),
        ("golden_retriever", 207),
        ("Carassius auratus", 1),
        ("tank suit", 639),
        ("crane bird", 134),
        ("gong", 577),  # also a synonym of "chime"
        ("toilet tissue", 999),
        ("goldn retriver", "golden retriever"),
        ("qqqqqqqq", "an index from 0 to 999"),
        ("1000", "0 to 999"),
        ("-1", "0 to 999"),
        ("crane", "134 .*517"),
        ("Maillot", "638 .*639"),
        ("panther", "286 .*290"),
    ],
)
def test_classes_are_found_by_index_and_by_any_name(text: str, index: int | str) -> None:
    """Or what they might be is said."""
    if isinstance(index, int):
        assert class_index(text) == index
        return
    with pytest.raises(OptionError, match=index):
        class_index(text)
