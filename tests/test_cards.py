"""Model cards say what is known and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from lantern_hpu.commands import convert
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.zoo.cards import LICENCES
from lantern_hpu.zoo.cards import card as make_card
from lantern_hpu.zoo.find import find_parts
from lantern_hpu.zoo.registry import entries

REPORT = {
    "kind": "lantern_hpu.train drafter",
    "held_out_prompts": 7,
    "kept_step": 30,
    "eagle": {"tokens_per_step": 1.234, "by_depth": [0.5, 0.25]},
    "lantern++": {"tokens_per_step": 1.5, "by_depth": [0.75]},
}


def loaded(model: Path | str, **given: Any) -> ImageModel:
    return open_model(find_parts(str(model), PartOverrides(**given))).load(Placement())


def test_a_converted_folder_has_a_card(model: Path, tmp_path: Path) -> None:
    assert convert.main([str(model), str(tmp_path / "ours")]) == 0
    card = ModelCard.load(tmp_path / "ours" / "README.md")
    assert card.data.library_name == "lantern-hpu" and card.data.get("license") == "unknown"
    assert card.data.get("base_model") is None and "speculative-decoding" in card.data.tags
    assert "lantern-hpu generate --model ours " in card.text and "not measured" in card.text
    (tmp_path / "ours" / "README.md").write_text("mine")  # it is no part of the model
    assert loaded(tmp_path / "ours").name == loaded(model).name


def test_a_drafter_s_card_has_the_figures_of_its_report() -> None:
    config = entries()["llamagen-t2i-256"].config
    card = ModelCard(make_card("builtin", config, "f" * 64, "out", REPORT).decode())
    assert "eagle" in card.data.get("tags")
    assert "7 held-out prompts, after step 30" in card.text and "not measured" not in card.text
    assert "| `eagle` | 1.23 | 0.50, 0.25 |" in card.text
    assert "| `lantern++` | 1.50 | 0.75 |" in card.text


@pytest.mark.parametrize("name", [*entries(), "builtin"])
def test_a_card_names_the_known_licence_and_base_model(name: str) -> None:
    config = entries()[name].config if name != "builtin" else entries()["llamagen-t2i-256"].config
    card = ModelCard(make_card(name, config, "f" * 64, "out").decode())
    if name == "builtin":
        assert card.data.get("license") == "apache-2.0" and card.data.get("base_model") is None
        return
    entry = entries()[name]
    assert card.data.get("base_model") == entry.parts["target"].repo
    wanted = LICENCES.get(entry.parts["target"].licence, "other")
    assert card.data.get("license") == wanted
    assert (wanted == "other") == bool(card.data.get("license_name"))
    assert ("goldfish" in card.text) == (entry.family == "llamagen-c2i")
