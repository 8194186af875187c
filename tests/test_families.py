"""What every family of checkpoints promises: converted it is the same, it draws by every method, and what does not fit
is refused before weights are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lantern_hpu import cli
from lantern_hpu.commands import convert, generate, pixels, serve
from lantern_hpu.core import Request
from lantern_hpu.models.files.checkpoint import Stored
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.zoo.find import find_parts
from lantern_hpu.zoo.registry import entries
from tests.marks import mostly_slow
from tests.published import EMU35_IMAGE, U0, small_pictures

C2I, CONTAINERS, T2I, HUB_T2I = (
    "llamagen-c2i/c2i_B_256.pt",
    "llamagen-c2i-containers/c2i_B_384.pt",
    "llamagen-t2i-256",
    "llamagen-t2i-512",
)
VQ = "--vq {public}/llamagen-c2i/vq_ds16_c2i.pt"
ANOLE, LUMINA, LUMINA2, JANUS = "anole", "lumina-mgpt", "lumina-mgpt-2.0", "janus-pro"
EMU3, SIMPLEAR, MAMMOTH, GLM = "emu3", "simplear", "mammothmoda2", "glm-image"
# Each layout: a published model whose settings it has, and options that make a small picture
LAYOUTS = {
    C2I: ("llamagen-c2i-b-256", ""),
    "llamagen-c2i-384-fsdp/c2i_3B_384.pt": ("llamagen-c2i-3b-384", ""),
    "llamagen-c2i-384-fsdp/c2i_XXL_384.pt": ("llamagen-c2i-xxl-384", ""),
    CONTAINERS: ("llamagen-c2i-b-384", VQ),
    T2I: ("llamagen-t2i-256", ""),
    HUB_T2I: ("llamagen-t2i-512", ""),
    ANOLE: ("anole-7b", ""),
    "anole-hub": ("anole-7b", ""),
    LUMINA: ("lumina-mgpt-7b-512", ""),
    LUMINA2: ("lumina-mgpt-2.0", "--height 64 --width 96"),
    JANUS: ("janus-pro-1b", ""),
    "janus-pro-hub": ("janus-pro-1b", ""),
    EMU3: ("emu3-gen", ""),
    "emu3-authors": ("emu3-gen", ""),
    SIMPLEAR: ("simplear-1.5b-1024", "IMAGE_SIZE=512"),
    MAMMOTH: ("mammothmoda2-preview", "--height 96 --width 128 --save-states x.safetensors"),
    GLM: ("glm-image", "--height 64 --width 96"),
    EMU35_IMAGE: ("emu3.5-image", "--height 64 --width 96"),
    U0: ("u0-4b", "--height 64 --width 96"),
}
STATES = "--save-states x.safetensors"
TOKENS = "--save-tokens x.npz"
MAMMOTH_NETWORK = "config.json:llm_config.text_config"
# A model, what is changed in a copy of it, options, and what the refusal says
REFUSED = (
    (T2I, "", "IMAGE_SIZE=512", "contradictory"),
    (HUB_T2I, "", "IMAGE_SIZE=256", "contradictory"),
    (C2I, "", "IMAGE_SIZE=384", "contradictory"),
    (ANOLE, "", "IMAGE_SIZE=256", "512 x 512"),
    (T2I, "", "--drafter {public}/llamagen-t2i-512/drafter", "for another target"),
    (T2I, "", "--drafter {public}/anole/drafter", "for another target"),
    (T2I, "", "--vq {public}/anole/vqgan.ckpt", "8192 codes"),
    (C2I, "", "--vq {public}/llamagen-vq8/vq_ds8_c2i.pt", "8 pixels wide"),
    (HUB_T2I, "config.json:num_attention_heads=0", "", "does not describe a model"),
    (HUB_T2I, 'config.json:rms_norm_eps="x"', "", "does not describe a model"),
    (HUB_T2I, "config.json:block_size=null", "", "does not describe a model"),
    (HUB_T2I, "-model-00002-of-00002.safetensors", "", "model-00002-of-00002.safetensors"),
    ("chameleon-base", "", "--vq {public}/anole/vqgan.ckpt", "base Chameleon"),
    (LUMINA, "", "IMAGE_SIZE=768", "contradictory"),
    (LUMINA, 'config.json:_name_or_path=""', "", "is unknown"),
    (LUMINA, 'config.json:_name_or_path=""', "IMAGE_SIZE=640", "no Lumina-mGPT draws 640"),
    (LUMINA, "", "--text-encoder {public}/emu3", "is not Chameleon's"),
    (LUMINA, "", "--negative-prompt dog", "--negative-prompt cannot be used"),
    (LUMINA2, "-model-00002-of-00002.safetensors", "", "files are missing in"),
    (LUMINA2, "-movqgan_270M.ckpt", "", "--vq; movqgan_270M.ckpt"),
    (LUMINA2, "-tokenizer.json", "", "holds no tokenizer.json"),
    (LUMINA2, "", "--text-encoder {public}/lumina-mgpt", "2.0's: <|endoftext|> is missing"),
    (LUMINA2, "", "--text-encoder {public}/emu3", "2.0's: <reserved08706> is missing"),
    (LUMINA2, "", "--vq {public}/anole/vqgan.ckpt", "8192 codes"),
    (LUMINA2, "", "--vq {public}/emu3-authors/vqvae", "32768 codes"),
    (LUMINA2, "", "--drafter {public}/lumina-mgpt/drafter", "is for another target"),
    (LUMINA2, "", "IMAGE_SIZE=784", "allowed: multiples of 32"),
    (LUMINA2, "", "--height 40 --width 64", "allowed: multiples of 32"),
    (LUMINA2, "", "--height 1024 --width 1024", "takes 16768 positions, 10240 were trained"),
    (JANUS, "", "IMAGE_SIZE=768", "draws 128 x 128 pixels"),
    (JANUS, "", "--text-encoder {public}/emu3", "is not Janus's"),
    (JANUS, "", "--negative-prompt dog", "--negative-prompt cannot be used"),
    (EMU3, "", "IMAGE_SIZE=767", "image_size is 767"),
    (EMU3, "", "--method lantern++", "has no drafter"),
    (EMU3, "", "--method eagle@chain", "has no drafter"),
    (EMU3, "", "--text-encoder {public}/janus-pro", "is not Emu3's"),
    (EMU35_IMAGE, "", "--height 512", "allowed, height x width: 1024 x 1024, 880 x 1168"),
    (EMU35_IMAGE, "", "IMAGE_SIZE=512", "try: --height 1024 --width 1024"),
    (EMU35_IMAGE, "-text", "", "Qwen/Qwen2.5-7B-Instruct"),
    (EMU35_IMAGE, "-Emu3.5-VisionTokenizer", "", "BAAI/Emu3.5-VisionTokenizer"),
    (EMU35_IMAGE, "-model-00002-of-00002.safetensors", "", "model-00002-of-00002.safetensors"),
    (EMU35_IMAGE, 'config.json:_name_or_path="BAAI/Emu3.5"', "", "interleaves text and pictures"),
    (EMU35_IMAGE, "config.json:head_dim=32", "", "head_dim is 32, where 16 is known"),
    (EMU35_IMAGE, "", "--text-encoder {public}/janus-pro", "is not Qwen2.5's"),
    (EMU35_IMAGE, "", "--vq {public}/anole/vqgan.ckpt", "8192 codes, the target draws 131072"),
    (EMU35_IMAGE, "", "--negative-prompt dog", "--negative-prompt cannot be used"),
    (EMU35_IMAGE, "", "--method eagle@chain", "has no drafter"),
    (SIMPLEAR, "", "IMAGE_SIZE=768", "no SimpleAR draws 768 pixels"),
    (SIMPLEAR, "", "--vq {public}/anole/vqgan.ckpt", "8192 codes, the target draws 64000"),
    (MAMMOTH, "", "", "makes no pictures"),
    (MAMMOTH, "", f"{STATES} --height 100", "multiples of 32"),
    (MAMMOTH, "-text", STATES, "Qwen/Qwen2.5-7B-Instruct"),
    (MAMMOTH, "-model-00002-of-00002.safetensors", STATES, "model-00002-of-00002.safetensors"),
    (MAMMOTH, 'config.json:llm_config.model_type="other"', STATES, "model_type is other"),
    (MAMMOTH, f'{MAMMOTH_NETWORK}.moe_type="attention-2:4"', STATES, "moe_type is attention-2:4"),
    (MAMMOTH, "", f"{STATES} --text-encoder {{public}}/simplear", "is not Qwen2.5's"),
    (GLM, "", f"{TOKENS} --height 100", "multiples of 32"),
    (GLM, "", f"{TOKENS} --height 64 --width 0", "--width is 0"),
    (GLM, "", f"{TOKENS} --height 96000 --width 3200", "4111 positions, 4096 were trained"),
    (GLM, "-vision_language_encoder/model-00002-of-00004.safetensors", "", "00002-of-00004"),
    (GLM, "-processor/tokenizer.json", "", "tokenizer.json"),
    (GLM, "-vae", "", "vae"),
    (
        GLM,
        'processor/processor_config.json:processor_class="Another"',
        "",
        "processor_class is Another",
    ),
    (
        GLM,
        "vision_language_encoder/config.json:image_start_token_id=7",
        "",
        "image_start_token_id is 7",
    ),
)


def there(public: Path, name: str) -> Path:
    if not (public / name).exists():
        pytest.skip("the installed transformers lacks it")
    return public / name


def loaded(path: Path, public: Path, options: str = "") -> ImageModel:
    vq = str(public / "llamagen-c2i/vq_ds16_c2i.pt") if options == VQ else None
    parts = find_parts(str(path), PartOverrides(vq=vq), optional=("pixels",))
    return open_model(parts).load(Placement())


def command_of(
    public: Path, model: Path, options: str, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The command line of options, of which those like `IMAGE_SIZE=512` become variables."""
    prompt = "hen" if "c2i" in model.name else "red"
    words = options.format(public=public).split()
    for name, _, value in (word.partition("=") for word in words if word[0] != "-" and "=" in word):
        monkeypatch.setenv(f"LANTERN_HPU_{name}", value)
    taken = [word for word in words if word[0] == "-" or "=" not in word]
    return ["--model", str(model), "--prompt", prompt, *taken]


def changed(folder: Path, goal: Path, change: str) -> Path:
    """A copy without a file or folder (`-name`), or with another value in a file (`file:section.key=json`)."""
    if not change:
        return folder
    shutil.copytree(folder, goal, copy_function=lambda a, b: Path(b).symlink_to(a))
    if change.startswith("-"):
        gone = goal / change[1:]
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        return goal
    name, _, setting = change.partition(":")
    path, _, value = setting.partition("=")
    content = json.loads((goal / name).read_text())
    section = content
    *outer, key = path.split(".")
    for part in outer:
        section = section[part]
    section[key] = json.loads(value)
    (goal / name).unlink()
    (goal / name).write_text(json.dumps(content))
    return goal


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that must not be read."""
    monkeypatch.setattr(Stored, "fill", lambda *_: pytest.fail("weights were read"))


@pytest.mark.parametrize(("model", "change", "options", "why"), REFUSED)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    public: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    unread: None,
    model: str,
    change: str,
    options: str,
    why: str,
) -> None:
    if model == GLM:
        pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    folder = changed(there(public, model), tmp_path / "copy", change)
    assert (
        generate.main([*command_of(public, folder, options, monkeypatch), "--device", "cpu"]) == 2
    )
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, C2I, T2I, ANOLE, JANUS, MAMMOTH))
def test_converted_it_is_the_same(public: Path, tmp_path: Path, name: str) -> None:
    """In every number and every framed prompt, with the settings of its family."""
    known, options = LAYOUTS[name]
    source = there(public, name)
    given = options.format(public=public).split() if options == VQ else []
    assert convert.main([str(source), str(tmp_path / "ours"), *given]) == 0
    before, after = loaded(source, public, options), loaded(tmp_path / "ours", public)
    assert after.fingerprint == before.fingerprint
    assert after.config == before.config
    assert vars(after.sampling) == vars(before.sampling) == entries()[known].sampling
    top_p_first = entries()[known].config.target.top_p_first
    assert after.config.target.top_p_first == top_p_first == ("anole" in name)
    for part in ("target", "drafter", "vq"):
        old, new = getattr(before, part), getattr(after, part)
        assert (old is None) == (new is None)
        if old is not None:
            tensors = new.state_dict()
            assert old.state_dict().keys() == tensors.keys()
            assert all(
                torch.equal(t.to(tensors[n].dtype), tensors[n]) for n, t in old.state_dict().items()
            )
    prompts = ["hen"] if "c2i" in name else ["a red apple", "dog"]
    requests = list(map(Request, prompts))
    rows = [model.condition.rows(requests, True)[:3] for model in (before, after)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*rows, strict=True))
    counted = sum(p.numel() for p in before.target.parameters())
    assert before.config.target.parameters == counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "device"),
    [("ar", "hpu"), ("sjd-pac@2:2x1", "cpu")],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_draws_one_token_a_step_and_by_windows(
    public: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    method: str,
    device: str,
) -> None:
    """Pictures of the size that was asked for, whose rows are closed where they must be."""
    monkeypatch.chdir(tmp_path)
    small_pictures(monkeypatch, (4, 4), (4, 6))
    options = LAYOUTS[name][1]
    how = ["--device", device, *(["--emulate"] if device == "hpu" else ["--graphs", "strict"])]
    command = command_of(public, there(public, name), options, monkeypatch)
    pictures = ["--output", "x.png"] if name not in (MAMMOTH, GLM) else []
    arguments = [*command, "--method", method, *how, *pictures, "--save-tokens", "x.npz"]
    assert cli.main(["generate", *arguments]) == 0
    vq = str(public / "llamagen-c2i/vq_ds16_c2i.pt") if options == VQ else None
    size = 512 if name == SIMPLEAR else None
    parts = find_parts(
        str(public / name), PartOverrides(vq=vq, image_size=size), optional=("pixels",)
    )
    opened = open_model(parts)
    words = options.split()
    config = opened.config.target
    if "--height" in words:
        height, width = (int(words[words.index(side) + 1]) for side in ("--height", "--width"))
        config = config.of_grid((height // opened.code_pixels, width // opened.code_pixels))
    if pictures:
        rows, columns = config.grid
        sides = (columns * opened.code_pixels, rows * opened.code_pixels)
        assert Image.open("x.png").size == sides
    drawn = np.load("x.npz")["tokens"][0]
    if config.row_ends:
        at_end = np.arange(1, config.tokens + 1) % config.columns == 0
        assert np.array_equal(drawn == config.codes, at_end)
    if name == MAMMOTH:
        states = load_file("x.safetensors")["0.hidden_states"]
        assert bool(states.isfinite().all()) and states.shape[1] == config.dim


def test_an_image_tokenizer_without_its_codes_is_refused(
    public: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    unread: None,
) -> None:
    state = torch.load(public / EMU35_IMAGE / "Emu3.5-VisionTokenizer" / "model.ckpt")["state_dict"]
    del state["quantize.embedding.weight"]
    torch.save(state, tmp_path / "model.ckpt")
    options = f"--vq {tmp_path / 'model.ckpt'} --output {tmp_path / 'x.png'}"
    assert generate.main(command_of(public, public / EMU35_IMAGE, options, monkeypatch)) == 2
    said = capsys.readouterr().err
    assert "model.ckpt is not a whole VQ tokenizer: it has no table of codes" in said
    assert "try: --vq with a whole one" in said


def test_servers_and_pixels_say_that_nothing_here_decodes_its_tokens(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unread: None
) -> None:
    codes = np.full((1, 32, 33), 16384)
    codes[:, :, :32] = 5
    np.save(tmp_path / "tokens.npy", codes.reshape(1, -1))
    model = ["--model", str(public / MAMMOTH)]
    assert serve.main([*model, "--port", "0"]) == 2
    assert "makes no pictures" in capsys.readouterr().err
    assert pixels.main([str(tmp_path / "tokens.npy"), *model, "--output", str(tmp_path / "x")]) == 2
    assert "makes no pictures" in capsys.readouterr().err
