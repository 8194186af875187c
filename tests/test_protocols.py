"""The literature's protocols: captions rules, references, weights, and metrics on sets of known values.

Published weights cannot be had here: networks are small or random ones in the real formats. Tests of torch-fidelity and
open_clip are skipped where these cannot be imported.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lantern_hpu.errors import OptionError, WeightsError
from lantern_lab.commands.evaluate import main
from lantern_lab.evaluate import scorer_published
from lantern_lab.evaluate.drawing import pictures_in
from lantern_lab.evaluate.evaluation import Evaluation
from lantern_lab.evaluate.metrics import Gaussian, frechet, inside
from lantern_lab.evaluate.options import PRESETS, Library, PictureSource
from lantern_lab.evaluate.scorer_published import Reference, read_statistics
from lantern_lab.evaluate.sets import Item, classes, coco, dpg, export, geneval, read_set
from tests.folder import config_file

CAPTIONS = {
    "images": [{"id": 7}, {"id": 139}],
    "annotations": [
        {"image_id": 139, "id": 1, "caption": "red cat "},
        {"image_id": 7, "id": 2, "caption": "apple"},
        {"image_id": 139, "id": 3, "caption": "blue cat on red"},
        {"image_id": 139, "id": 4, "caption": "red cat on blue"},
    ],
}


def need(name: str) -> Any:
    """A library, or skip: also one that is there and does not load."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"{name} cannot be imported: {error}")


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    file = tmp_path / "captions.json"
    file.write_text(json.dumps(CAPTIONS))
    return file


# ------------------------------------------------------------------------------------ prompt sets


def test_captions_are_chosen_by_a_rule(captions: Path) -> None:
    """Each picture is drawn under its id; of two captions of one length it is the first."""
    found = [(item.id, item.prompt) for item in coco(captions, "longest")]
    assert found == [("000000000007", "apple"), ("000000000139", "blue cat on red")]
    assert [item.prompt for item in coco(captions, "first")] == ["apple", "red cat"]
    assert [item.prompt for item in coco(captions, "first", 1)] == ["apple"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"annotations": [{"id": 1, "caption": "a"}]}, "annotation 0 has no 'image_id'"),
        ({"annotations": [{"image_id": 1}]}, "annotation 0 has no 'caption'"),
        ({"annotations": []}, "holds no captions"),
        ({"images": []}, "cannot read captions"),
        ({"annotations": 3}, "cannot read captions"),
    ],
)
def test_a_file_of_other_things_is_no_file_of_captions(
    tmp_path: Path, content: Any, said: str
) -> None:
    file = tmp_path / "captions.json"
    file.write_text(json.dumps(content))
    with pytest.raises(OptionError, match=said):
        coco(file, "first")


def test_other_sets_are_read(tmp_path: Path) -> None:
    parti = tmp_path / "PartiPrompts.tsv"
    parti.write_text("Prompt\tCategory\na cat\tAnimals\na dog\tAnimals\n")
    found = read_set("parti", parti, "first", None)
    assert [(item.id, item.prompt) for item in found] == [("000000", "a cat"), ("000001", "a dog")]
    labels = classes(2)
    assert len(labels) == 2000 and labels[1000].id == "0000-01" and labels[1001].prompt == "1"
    with pytest.raises(OptionError, match="unknown prompts"):
        read_set("magic", None, "first", None)
    with pytest.raises(OptionError, match="prompts_file is missing"):
        read_set("coco-val2017", None, "first", None)


def drawn(folder: Path, names: list[str]) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    places = {name: folder / f"{name}.png" for name in names}
    for i, place in enumerate(places.values()):
        Image.new("RGB", (8, 8), (20 * i, 0, 0)).save(place)
    return places


def test_geneval_reads_its_layout(tmp_path: Path) -> None:
    source = tmp_path / "evaluation_metadata.jsonl"
    lines = [json.dumps({"tag": "one", "prompt": text}) for text in ("a cat", "two dogs")]
    source.write_text("\n".join(lines))
    items = geneval(source)
    assert len(items) == 8 and items[5].prompt == "two dogs"
    places = drawn(tmp_path / "drawn", [item.id for item in items])
    export("geneval", items, places, source, tmp_path / "out")
    assert json.loads((tmp_path / "out/00001/metadata.jsonl").read_text())["prompt"] == "two dogs"
    want = places["00001-0002"].read_bytes()
    assert (tmp_path / "out/00001/samples/0002.png").read_bytes() == want


def test_dpg_reads_sheets_of_four(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "partiprompts12.txt").write_text("a cat\n")
    items = dpg(prompts)
    places = drawn(tmp_path / "drawn", [item.id for item in items])
    export("dpg", items, places, prompts, tmp_path / "out")
    sheet = Image.open(tmp_path / "out/partiprompts12.png")
    assert sheet.size == (16, 16)
    reds = [sheet.getpixel(at) for at in ((2, 2), (12, 2), (2, 12), (12, 12))]
    assert reds == [(20 * i, 0, 0) for i in range(4)]


# ------------------------------------------------------------------------------------ pictures and references


def test_t2i_compbench_gets_a_file_a_picture_named_by_its_prompt(tmp_path: Path) -> None:
    source = tmp_path / "color_val.txt"
    source.write_text("a green bench and a blue bowl\na red book and a yellow vase\n")
    items = read_set("t2i-compbench", source, "first", None)
    assert len(items) == 20
    places = {item.id: tmp_path / f"{item.id}.png" for item in items}
    for number, path in places.items():
        path.write_bytes(number.encode())
    export("t2i-compbench", items, places, source, tmp_path / "out")
    made = {file.name: file.read_text() for file in (tmp_path / "out" / "samples").iterdir()}
    assert len(made) == 20
    assert made["a green bench and a blue bowl_000000.png"] == "000000"
    assert made["a red book and a yellow vase_000019.png"] == "000019"
    with pytest.raises(OptionError, match="has a slash"):
        export("t2i-compbench", [Item("000000", "a/b")], places, source, tmp_path / "out")


@pytest.mark.parametrize(("width", "left"), [(259, 2), (257, 0), (261, 2), (263, 4), (512, 128)])
def test_lanterns_pictures_are_the_middle_square_as_torchvision_crops(
    width: int, left: int
) -> None:
    """It rounds halves to even, so that sides that differ by 3 lose 2 pixels before and 1 behind."""
    image = Image.new("RGB", (width, 256))
    image.putpixel((left, 0), (255, 0, 0))
    found = scorer_published.cropped(image, PRESETS["lantern"])
    assert found.size == (256, 256) and found.getpixel((0, 0)) == (255, 0, 0)
    assert scorer_published.cropped(image, PRESETS["sjd"]).size == image.size


def test_clean_resizing_is_pillows_bicubic_within_rounding() -> None:
    """Away from black and white, where 8 bits cut off what lies between the filter's two passes."""
    pixels = np.random.default_rng(0).integers(80, 176, (64, 64, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    got = np.asarray(scorer_published.cleanly(image, 299)).astype(int)
    want = np.asarray(image.resize((299, 299), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(got - want).max() <= 1


def statistics(file: Path, **more: Any) -> Path:
    np.savez(file, mu=np.zeros(3), sigma=np.eye(3), **more)
    return file


def test_published_statistics_are_read_and_those_of_another_protocol_refused(
    tmp_path: Path,
) -> None:
    adm = statistics(tmp_path / "VIRTUAL_imagenet256_labeled.npz", mu_s=np.zeros(2))
    found = read_statistics(adm, "imagenet")
    assert found.mean.shape == (3,) and found.covariance.shape == (3, 3)
    with pytest.raises(OptionError, match="no reference of lantern"):
        read_statistics(adm, "lantern")
    ours = statistics(tmp_path / "ours.npz", protocol="sjd")
    assert read_statistics(ours, "sjd").mean.shape == (3,)
    with pytest.raises(OptionError, match="made for sjd"):
        read_statistics(ours, "lantern")
    (tmp_path / "half.npz").write_bytes(adm.read_bytes()[:50])
    with pytest.raises(WeightsError, match=r"half\.npz"):
        read_statistics(tmp_path / "half.npz", "imagenet")


def test_statistics_cannot_stand_in_for_pictures(tmp_path: Path) -> None:
    library = Library(PRESETS["lantern"], metrics=("fid", "precision"))
    with pytest.raises(OptionError, match="precision compare with pictures"):
        Reference.of(statistics(tmp_path / "x.npz", protocol="lantern"), library)
    with pytest.raises(OptionError, match="reference is missing"):
        Reference.of(None, library)
    drawn(tmp_path / "few", ["a", "b"])
    with pytest.raises(OptionError, match="holds 2 pictures"):
        Reference.of(tmp_path / "few", library)


LEFT_BEHIND = (
    *(".ipynb_checkpoints/0-checkpoint.jpg", "@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg", "a.png/x.txt"),
    *(".Trash-1000/files/x.png", "__MACOSX/n0/._1.jpg", "n0/._1.jpg", "n0/Thumbs.db"),
)


def test_what_programs_leave_in_folders_of_pictures_is_not_counted(tmp_path: Path) -> None:
    mine = ["n0/1.JPEG", "n0/2.webp", "n1/3.bmp", "n1/4.tif", "n1/5.png"]
    for name in (*mine, *LEFT_BEHIND):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = [str(file.relative_to(tmp_path)) for file in pictures_in(tmp_path)]
    assert found == mine


def test_two_runs_in_a_folder_are_refused(tmp_path: Path) -> None:
    items = [SimpleNamespace(id=name) for name in ("0", "1")]
    asked: Any = SimpleNamespace(scorer=SimpleNamespace(items=items))
    for run in ("a", "b"):
        for name in ("0", "1", "grid"):
            (tmp_path / run).mkdir(exist_ok=True)
            (tmp_path / run / f"{name}.png").write_bytes(b"")
    with pytest.raises(OptionError, match="holds 0 more than once"):
        Evaluation.outside(asked, tmp_path)
    assert len(Evaluation.outside(asked, tmp_path / "a")) == 2


# ------------------------------------------------------------------------------------ metrics


def test_manifolds_hold_what_is_near() -> None:
    """On a line: third neighbours are known, so is who is inside."""
    others = np.arange(10.0)[:, None]  # the third neighbour is 2 or 3 away
    points = np.array([[-3.1], [-3.0], [4.4], [12.0], [12.1]])
    assert inside(points, others).tolist() == [0, 1, 1, 1, 0]


def test_precision_and_recall_agree_with_torch_fidelity() -> None:
    prc = need("torch_fidelity.metric_prc")
    rng = np.random.default_rng(0)
    made, real = rng.standard_normal((80, 4)), 0.3 + rng.standard_normal((90, 4))
    pair = torch.from_numpy(made), torch.from_numpy(real)
    precision, recall = prc.calculate_precision_recall_full(*pair, 3)
    assert inside(made, real).mean() == pytest.approx(precision, abs=1e-6)
    assert inside(real, made).mean() == pytest.approx(recall, abs=1e-6)


def random_inception(file: Path) -> Path:
    """Random weights in torch-fidelity's format."""
    module = need("torch_fidelity.feature_extractor_inceptionv3")

    class Random(module.FeatureExtractorInceptionV3):  # type: ignore[name-defined]
        def load_state_dict(self, state: Any) -> None:
            pass

    torch.manual_seed(0)
    empty = file.with_name("empty.pth")
    torch.save({}, empty)
    net = Random("random", ["2048"], feature_extractor_weights_path=str(empty))
    torch.save(net.state_dict(), file)
    return file


def random_pictures(folder: Path, count: int, seed: int) -> Path:
    """Smooth noise at 32 x 32."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((32, 32), Image.Resampling.BICUBIC).save(folder / f"{i:06d}.png")
    return folder


@pytest.mark.slow
def test_fid_agrees_with_torch_fidelity_on_the_same_folders(tmp_path: Path) -> None:
    fidelity = need("torch_fidelity")
    weights = random_inception(tmp_path / "inception.pth")
    folders = [random_pictures(tmp_path / name, 12, i) for i, name in enumerate(("a", "b"))]
    want = fidelity.calculate_metrics(
        input1=str(folders[0]),
        input2=str(folders[1]),
        fid=True,
        cuda=False,
        cache=False,
        verbose=False,
        feature_extractor_weights_path=str(weights),
    )["frechet_inception_distance"]
    preset = PRESETS["sjd"]
    network = scorer_published.inception(weights, preset)
    rows = [
        scorer_published.rows_of(network, preset, sorted(f.glob("*.png")), [], "x", True)[
            "inception"
        ]
        for f in folders
    ]
    got = frechet(Gaussian.of(rows[1]))(Gaussian.of(rows[0]))
    assert got == pytest.approx(want, abs=1e-3, rel=1e-3)


def tiny_clip(folder: Path) -> Path:
    """A small random CLIP in transformers' format."""
    transformers = need("transformers")
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for letter in "abcdefghijklmnopqrstuvwxyz":
        vocabulary |= {letter: len(vocabulary), f"{letter}</w>": len(vocabulary) + 1}
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[])
    size = {"height": 16, "width": 16}
    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
    transformers.CLIPProcessor(pixels, tokenizer).save_pretrained(folder)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={**small, "num_attention_heads": 2, "vocab_size": 60, "eos_token_id": 1},
        vision_config={**small, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("preset", ["lantern", "sjd"])
def test_clip_score_agrees_with_a_direct_computation(tmp_path: Path, preset: str) -> None:
    transformers = need("transformers")
    folder, chosen = tiny_clip(tmp_path / "clip"), PRESETS[preset]
    files = sorted(random_pictures(tmp_path / "pictures", 18, 0).glob("*.png"))
    captions = [f"cat {'abcdefghijklmnopqr'[i]}" for i in range(18)]
    network = scorer_published.clip(folder, chosen)
    got = scorer_published.rows_of(network, chosen, files, captions, "x", True)["clip"]
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    processor = transformers.CLIPProcessor.from_pretrained(folder)
    for i in (0, 17):
        picture = scorer_published.cropped(Image.open(files[i]).convert("RGB"), chosen)
        given = processor(text=[chosen.prefix + captions[i]], images=picture, return_tensors="pt")
        with torch.no_grad():
            seen = model.vision_model(given["pixel_values"]).pooler_output
            a = model.visual_projection(seen)
            said = model.text_model(given["input_ids"], given["attention_mask"]).pooler_output
            b = model.text_projection(said)
        want = chosen.scale * float(torch.nn.functional.cosine_similarity(a, b))
        assert got[i] == pytest.approx(want, abs=1e-4 * chosen.scale)


# ------------------------------------------------------------------------------------ weights


def test_missing_weights_are_all_named_with_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(scorer_published, "in_hub_cache", lambda source: None)
    with pytest.raises(WeightsError) as raised:
        scorer_published.locate_networks(Library(PRESETS["lantern"]))
    for name in ("inception=", "6726825d.pth", "vgg=", "clip=", "HPS_v2.1_compressed.pt"):
        assert name in str(raised.value)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights-inception-2015-12-05-6726825d.pth"
    torch.save({"fc.weight": torch.zeros(2)}, file)
    library = Library(PRESETS["sjd"], metrics=("fid",), inception=file)
    with pytest.raises(WeightsError, match="SHA-256 does not begin with 6726825d"):
        scorer_published.locate_networks(library)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    scorer_published.check_network(file, PictureSource("x", "there", digest[:8]))
    need("torch_fidelity")
    with pytest.raises(WeightsError, match="does not hold this network's weights"):
        scorer_published.inception(file, PRESETS["sjd"])


def test_pickles_that_hold_code_are_not_run(tmp_path: Path) -> None:
    file, mark = tmp_path / "weights.pth", tmp_path / "ran"

    class Code:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return (Path.touch, (mark,))

    torch.save({"fc.weight": Code()}, file)
    with pytest.raises(WeightsError, match=r"cannot read .*weights\.pth"):
        scorer_published.load_state(file)
    assert not mark.exists()


def test_pictures_of_several_sizes_are_refused(tmp_path: Path) -> None:
    places = list(drawn(tmp_path / "p", ["a", "b"]).values())
    Image.new("RGB", (9, 8)).save(places[1])

    def network(images: scorer_published.Pictures, captions: Any) -> dict[str, Any]:
        return {"count": torch.ones(len(images))}

    with pytest.raises(OptionError, match=r"b\.png is 9 x 8 pixels"):
        scorer_published.rows_of(network, PRESETS["sjd"], places, [], "x", alike=True)
    assert scorer_published.rows_of(network, PRESETS["sjd"], places, [], "x", False)[
        "count"
    ].shape == (2,)


# ------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("preset", "keys", "said"),
    [
        ("scenes", {"panels": 1}, "error: panels"),
        ("scenes", {"metrics": "fid"}, "metrics has no meaning for --preset scenes"),
        ("scenes", {"folder": ["here"]}, "folder is here"),
        ("lantern", {"panels": 3}, "panels has no meaning for --preset lantern"),
        ("lantern", {"metrics": ["magic"]}, "unknown metric 'magic'"),
        ("lantern", {"export": "there"}, "export needs the prompts of a benchmark"),
    ],
)
def test_keys_of_another_protocol_are_refused(
    preset: str, keys: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config_file(tmp_path / "x.toml", **keys)
    assert main([*given, "--preset", preset, "--output", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_preset_lantern_scores_a_run_with_random_networks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its metrics, VGG16 and ViT-H by small stand-ins of the same rows."""
    weights, clip = random_inception(tmp_path / "inception.pth"), tiny_clip(tmp_path / "clip")

    def stand_in(name: str, width: tuple[int, ...]) -> Any:
        mixed = torch.randn(48, *width, generator=torch.Generator().manual_seed(0)) / 7

        def rows(images: scorer_published.Pictures, captions: Any) -> dict[str, Any]:
            small = [np.asarray(i.resize((4, 4))).reshape(-1) / 255 for i in images]
            return {name: torch.from_numpy(np.stack(small)) @ mixed.double()}

        return lambda file, preset: rows

    monkeypatch.setitem(scorer_published.NETWORKS, "vgg", stand_in("vgg", (16,)))
    monkeypatch.setitem(scorer_published.NETWORKS, "hps", stand_in("hps", ()))
    file, real = tmp_path / "captions.json", random_pictures(tmp_path / "real", 9, 3)
    entries = [{"image_id": i, "caption": f"red cat {i}"} for i in range(8)]
    file.write_text(json.dumps({"annotations": entries}))
    places = dict.fromkeys(("inception", "vgg", "hps"), str(weights)) | {"clip": str(clip)}
    how = {"any_weights": True, "top_k": 0, "rounds": 4, "no_floor": True}
    given = config_file(tmp_path / "lantern.toml", **places, **how)
    command = f"--model {model} --preset lantern --prompts-file {file} --reference {real}"
    rest = f"--method ar,lantern++ --output {tmp_path / 'out'}"
    assert main([*given, *command.split(), *rest.split()]) == 0
    found = json.loads((tmp_path / "out/evaluation.json").read_text())
    for row in found["rows"]:
        assert {"fid", "precision", "recall", "clip", "hps"} <= set(row)
        assert row["fid"] > 0 and 0 <= row["precision"] <= 1 and 0 <= row["recall"] <= 1
    notes = " ".join(found["notes"])
    assert "FID of 8 pictures is too large" in notes and "unchecked" in notes


@pytest.mark.slow
def test_preset_lantern_scores_a_synthetic_llamagen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published format, T5 and drafter, drawn by two of the preset's rows; CLIP by transformers."""
    from tests.checkpoints import synthetic

    synthetic.write_all(tmp_path / "public", only={"llamagen-t2i-256"})
    clip, out, file = tiny_clip(tmp_path / "clip"), tmp_path / "out", tmp_path / "captions.json"
    entries = [
        {"image_id": i, "caption": text}
        for i in range(2)
        for text in (f"red cat {'abc'[i]}", f"the photo of a red cat {'abc'[i]} on a tree")
    ]
    file.write_text(json.dumps({"annotations": entries}))
    model = f"--model {tmp_path / 'public/llamagen-t2i-256'} --preset lantern"
    rows, relaxed = "--method ar,lantern++:lambda-5@chain", "lantern++:lambda-5@chain"
    keys: dict[str, Any] = {"metrics": "clip", "clip": str(clip), "rounds": 4, "no_floor": True}
    command = f"{model} {rows} --prompts-file {file} --batch-size 2 --output {out}".split()

    def evaluated(**more: Any) -> int:
        return main([*config_file(tmp_path / "clip.toml", **keys, **more), *command])

    assert evaluated() == 0
    found = json.loads((out / "evaluation.json").read_text())
    sampling = {"cfg_scale": 7.5, "temperature": 1.0, "top_k": 1000, "top_p": 1.0}
    assert found["settings"]["sampling"] == sampling
    assert evaluated(folder=[f"mine={out / 'pictures/ar'}"]) == 0
    by_name = {row["row"]: row for row in json.loads((out / "evaluation.json").read_text())["rows"]}
    mine = by_name.pop("mine")
    assert mine["clip"] == by_name["ar"]["clip"] and "tokens_per_step" not in mine
    assert evaluated(folder=[f"mine={clip}"]) == 2
    assert "2 of 2 are missing" in capsys.readouterr().err
    assert list(by_name) == ["ar", relaxed]
    assert all(-1 <= row["clip"] <= 1 for row in by_name.values())
    assert by_name["ar"]["tokens_per_step"] == 1 < by_name[relaxed]["tokens_per_step"]
    assert by_name[relaxed]["relaxation"]["bound"] == 5
    for picture in sorted((out / "pictures").rglob("*.png")):
        assert Image.open(picture).size == (256, 256)
    names = {file.name for file in (out / "pictures/ar").glob("*.png")}
    assert names == {f"{i:012d}.png" for i in range(2)}
