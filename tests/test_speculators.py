"""Drafters in the speculators layout come back bit for bit, draw the same, and are refused where they do not fit; the
model cards beside them say what is known and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from lantern_hpu import LanternPipeline
from lantern_hpu.commands import convert
from lantern_hpu.errors import LanternError, OptionError
from lantern_hpu.models.families.speculators import write_drafter
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.files.names import Given
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.zoo.fetch import Subject, drafter_card, folder_card
from lantern_hpu.zoo.find import find_parts
from lantern_hpu.zoo.registry import entries
from tests.marks import mostly_slow

REPORT = {
    "kind": "lantern_hpu.train drafter",
    "held_out_prompts": 7,
    "kept_step": 30,
    "eagle": {"tokens_per_step": 1.234, "by_depth": [0.5, 0.25]},
    "lantern++": {"tokens_per_step": 1.5, "by_depth": [0.75]},
}


def loaded(model: Path | str, **given: Any) -> ImageModel:
    return open_model(find_parts(str(model), Given(**given))).load(Placement())


def exported(model: Path | str, folder: Path, *options: str) -> Path:
    assert convert.main([str(model), str(folder), "--to", "speculators", *options]) == 0
    return folder


def same_weights(one: ImageModel, other: ImageModel) -> bool:
    assert one.drafter is not None and other.drafter is not None
    mine, theirs = one.drafter.state_dict(), other.drafter.state_dict()
    assert mine.keys() == theirs.keys()
    return all(mine[n].dtype == theirs[n].dtype and torch.equal(mine[n], theirs[n]) for n in mine)


# ------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize(
    "name", mostly_slow(["builtin", "anole", "llamagen-t2i-256"], "builtin", "anole")
)
def test_a_drafter_comes_back_bit_for_bit(name: str, public: Path, tmp_path: Path) -> None:
    """With and without input norm and norms of heads; one drafter's embedding is not its target's."""
    model = name if name == "builtin" else public / name
    folder, before = exported(model, tmp_path / "drafter"), loaded(model)
    after = loaded(model, drafter=str(folder))
    assert after.config.drafter == before.config.drafter and same_weights(before, after)
    assert convert.main([str(model), str(tmp_path / "whole"), "--drafter", str(folder)]) == 0
    assert same_weights(before, loaded(tmp_path / "whole"))


def test_it_draws_the_same_image(model: Path, tmp_path: Path) -> None:
    folder = exported(model, tmp_path / "drafter")
    drawn = []
    for given in (Given(), Given(drafter=str(folder))):
        pipe = LanternPipeline.from_pretrained(str(model), given=given)
        drawn.append(pipe("a red apple", method="eagle", seed=3))
    assert torch.equal(torch.as_tensor(drawn[0].tokens), torch.as_tensor(drawn[1].tokens))
    assert drawn[0].records[0].tokens_per_step > 1


def test_other_programs_read_the_layer(model: Path, tmp_path: Path) -> None:
    """transformers builds the layer from `transformer_layer_config`, and its tensors fit."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    folder = exported(model, tmp_path / "drafter")
    about = json.loads((folder / "config.json").read_text())
    layer = LlamaDecoderLayer(LlamaConfig.from_dict(about["transformer_layer_config"]), 0)
    prefix, weights = "transformer.", load_file(folder / "model.safetensors")
    state = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
    missing, unknown = layer.load_state_dict(state, strict=False)
    assert missing == ["input_layernorm.weight"] and not unknown  # as with `layernorms` false
    assert about["speculators_config"]["algorithm"] == about["speculators_model_type"] == "eagle"
    assert weights["fusion_fc.weight"].shape[1] == 2 * weights["fusion_fc.weight"].shape[0]


def test_a_folder_without_our_key_takes_what_it_lacks_from_the_target(
    model: Path, tmp_path: Path
) -> None:
    """The layout leaves out an embedding that is the verifier's, and a bias where `fusion_bias` is false."""
    folder = exported(model, tmp_path / "drafter")
    edit(folder, lambda about: about.pop("lantern_hpu"))
    edit(folder, lambda about: about.update(fusion_bias=False))
    weights = load_file(folder / "model.safetensors")
    bias = weights.pop("fusion_fc.bias")
    embedding = weights.pop("embed_tokens.weight")
    save_file(weights, folder / "model.safetensors")
    other = loaded(model, drafter=str(folder))
    assert other.drafter is not None and not bias.any()
    assert torch.equal(other.drafter.embed.weight, embedding)
    assert torch.equal(other.drafter.fc.weight, weights["fusion_fc.weight"])


# ------------------------------------------------------------------------------------ bad input


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "config.json"
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


def layer(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda about: about["transformer_layer_config"].update(changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda about: about.update(speculators_model_type="eagle3"), "'eagle3'.*one of eagle"),
        (lambda about: about.pop("speculators_model_type"), "speculators_model_type is missing"),
        (lambda about: about.pop("speculators_config"), "speculators_config is missing"),
        (lambda about: about["speculators_config"].pop("algorithm"), "algorithm is missing"),
        (lambda about: about["speculators_config"].update(algorithm="hass3"), "algorithm 'hass3'"),
        (
            lambda about: about.pop("transformer_layer_config"),
            "transformer_layer_config is missing",
        ),
        (
            lambda about: about["transformer_layer_config"].pop("vocab_size"),
            "vocab_size is missing",
        ),
        (lambda about: about.update(transformer_layer_config=3), "cannot read .*config.json"),
        (lambda about: about.update(layernorms=True), "extra norms"),
        (layer(hidden_size=128), "hidden_size is 128, not 64"),
        (
            layer(num_hidden_layers=2, vocab_size=5),
            "num_hidden_layers is 2, not 1; vocab_size is 5",
        ),
        (lambda about: about["lantern_hpu"].update(target="ab"), "another target"),
        (lambda about: about["lantern_hpu"].update(options={"width": 3}), "cannot read .*config"),
    ],
)
def test_a_folder_that_does_not_fit_is_one_error(
    change: Callable[[dict[str, Any]], Any], words: str, model: Path, tmp_path: Path
) -> None:
    folder = exported(model, tmp_path / "drafter")
    edit(folder, change)
    with pytest.raises(LanternError, match="(?s)" + words):
        loaded(model, drafter=str(folder))


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("transformer.self_attn.q_proj.weight", None, "1 tensors missing .*q_proj"),
        ("transformer.mlp.down_proj.weight", torch.zeros(3, 4), "another shape .*down_proj"),
        ("lm_head.weight", torch.zeros(3, 4), "1 unknown .*lm_head"),
        ("embed_tokens.weight", torch.ones(32, 64), "another target"),
    ],
)
def test_wrong_tensors_are_one_error(
    name: str, tensor: torch.Tensor | None, words: str, model: Path, tmp_path: Path
) -> None:
    folder = exported(model, tmp_path / "drafter")
    edit(folder, lambda about: about.pop("lantern_hpu"))
    weights = load_file(folder / "model.safetensors")
    weights.pop(name, None)
    save_file(weights | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")
    with pytest.raises(LanternError, match=words):
        loaded(model, drafter=str(folder))


def test_what_cannot_be_exported_says_why_and_leaves_nothing(
    public: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(public / "glm-image")
    assert convert.main([source, str(tmp_path / "out"), "--to", "speculators"]) == 2
    assert "has no drafter" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert convert.main(["builtin", str(tmp_path / "out"), "--to", "onnx"]) == 2
    assert "one of folder, speculators" in capsys.readouterr().err
    other = loaded(model)
    assert other.drafter is not None
    other.drafter.config = replace(other.drafter.config, sandwich_norms=True)
    with pytest.raises(OptionError, match="does not fit the layout"):
        write_drafter(other, tmp_path)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------ model cards


def test_a_converted_folder_has_a_card(model: Path, tmp_path: Path) -> None:
    assert convert.main([str(model), str(tmp_path / "ours")]) == 0
    card = ModelCard.load(tmp_path / "ours" / "README.md")
    assert card.data.library_name == "lantern-hpu" and card.data.get("license") == "unknown"
    assert card.data.get("base_model") is None and "speculative-decoding" in card.data.tags
    assert "lantern-hpu generate --model ours " in card.text and "not measured" in card.text
    (tmp_path / "ours" / "README.md").write_text("mine")  # it is no part of the model
    assert loaded(tmp_path / "ours").name == loaded(model).name


def test_a_drafter_s_card_has_the_figures_of_its_report_and_no_others(
    model: Path, tmp_path: Path
) -> None:
    """Figures are those of the folder that the drafter comes from."""
    first = exported(model, tmp_path / "first")
    assert "not measured" in (first / "README.md").read_text()
    (first / "report.json").write_text(json.dumps(REPORT))
    second = exported(model, tmp_path / "second", "--drafter", str(first))
    card = ModelCard.load(second / "README.md")
    assert {"eagle", "speculators"} <= set(card.data.tags)
    assert "7 held-out prompts, after step 30" in card.text and "not measured" not in card.text
    assert "| `eagle` | 1.23 | 0.50, 0.25 |" in card.text
    assert "| `lantern++` | 1.50 | 0.75 |" in card.text
    (first / "report.json").write_text(json.dumps(REPORT | {"kind": "another"}))
    third = exported(model, tmp_path / "third", "--drafter", str(first))
    assert "not measured" in (third / "README.md").read_text()


@pytest.mark.parametrize("name", [*entries(), "builtin"])
def test_a_card_names_the_known_licence_and_base_model(name: str) -> None:
    config = entries()[name].config if name != "builtin" else entries()["llamagen-t2i-256"].config
    card = ModelCard(folder_card(Subject(name, config, "f" * 64), "out"))
    if name == "builtin":
        assert card.data.get("license") == "apache-2.0" and card.data.get("base_model") is None
        return
    entry = entries()[name]
    assert card.data.get("base_model") == entry.parts["target"].repo
    known = {"MIT": "mit", "Apache-2.0": "apache-2.0"}
    assert card.data.get("license") == known.get(entry.licence, "other")
    assert (card.data.get("license") == "other") == bool(card.data.get("license_name"))
    assert ("goldfish" in card.text) == (entry.family == "llamagen-c2i")
    made = ModelCard(drafter_card(Subject(name, config, "f" * 64, "drafter"), "out", None))
    if "drafter" in entry.parts:
        assert made.data.get("license") == "unknown", "its repository states none"


def test_without_the_hub_s_library_a_folder_is_written_without_a_card(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    assert convert.main([str(model), str(tmp_path / "ours")]) == 0
    assert not (tmp_path / "ours" / "README.md").exists()
    assert "no model card was written" in capsys.readouterr().err
