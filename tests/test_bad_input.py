"""What commands are given by mistake or with malice: one clear error each, and nothing is left behind."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from lantern_hpu import cli
from lantern_hpu.backends import DeviceOptions
from lantern_hpu.commands import convert, generate, pixels
from lantern_hpu.errors import LanternError, OptionError, WeightsError
from lantern_hpu.models.files.checkpoint import Stored, open_checkpoint, shapes_only
from lantern_hpu.models.files.load import OpenedModel, open_model
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.text.t5 import check_t5_files
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.prompts import read_prompts
from lantern_hpu.zoo.find import find_parts

ROOT = Path(__file__).parent.parent
LONG = "x" * 300  # longer than file systems allow a name to be
CAT = "--model MODEL --prompt cat"
# Commands with a name that is too long, and with a file of brackets
ODD = [
    f"generate {CAT} --output {LONG}.png",
    f"generate {CAT} --output {LONG}",
    f"generate {CAT} --report {LONG}.json",
    f"generate {CAT} --method eagle@{LONG}.json",
    f"generate --model MODEL --prompts-file {LONG}.txt",
    f"generate --from-png {LONG}.png",
    f"generate --model {LONG} --prompt cat",
    f"pixels {LONG}.npz",
    f"convert MODEL {LONG}",
    f"lint --script {LONG}.py",
    f"compare {LONG}.json --output o",
    f"train drafter --data {LONG}.txt --output o",
    f"bench --output {LONG}.json",
    f"fidelity --output {LONG}.json",
    f"download llamagen-t2i-256 --to {LONG}",
    f"generate {CAT} --method eagle@brackets.json",
    "generate --model MODEL --prompts-file brackets.json",
    "generate --model brackets --prompt cat",
    "compare brackets.json --output o",
    "pixels brackets.json",
    "lint --script brackets.json",
    "lint --script binary.py",
    "generate --prompts-file binary.py",
    f"generate {CAT} --num-images 999999999999",
    "fidelity --num-images 999999999999",
    "evaluate --preset scenes --output o --num-images 999999999999",
]

WHERE = "--output out"
# What is not a value of an option, or not with the others: all that needs no weights, or few
REFUSED: dict[str, dict[str, str]] = {
    f"generate {CAT}": {
        "--method eagle@oak": "naive_extend_57",
        "--method ar@chain": "drafts nothing",
        "--prompts-file nowhere.txt": "nowhere.txt",
        "--prompt '   '": "empty",
        "--from-png x.png": "exclude each other",
        "--quantize int2": "int8",
        "--num-images 2 --output one.png": "--grid",
        "--image nowhere.png": "No such file",
        "--image brackets.json": "it is not PNG",
        "--image cat.png": "--image cannot be used",
        # What workers cannot leave
        "--workers 0": "--workers is 0",
        "--workers 2 --grid": "--workers excludes --grid",
        "--workers 2 --report x": "--report",
        "--workers 2 --save-tokens x": "--save-tokens",
        "--output image.jpg": ".png",
        "--output x.png --report x.png": "two results",
        "--output binary.py/x.png": "cannot write",
        "--output cat.png": "--force",
        # Windows: longer than the picture, and than any
        "--method scd@16": "the window is 16",
        "--method scd@999": "scd takes 1 to 256",
        "--method scd@8:2x2": "one draft at each place",
        "--method sjd-pac@2:2x3": "0 to 2 levels",
        "--method sjd-pac@8:wide": "cannot read",
        "--method sjd-pac@8:33x2": "at most 32 children",
        "--method scd@jacobi:8": "does not fit scd",
        "--method scd@8:commit=9": "1 to 8",
        "--method jacobi@0:commit=1": "no drafts to accept",
        "--method sjd-pac@8:2x2:commit=4": "exclude each other",
        "--method scd:lambda-5@8:commit=4": "commit takes no relaxation",
    },
    "generate --from-png x.png": {
        "--seed 1": "--from-png and --seed exclude each other",
        "--temperature 0": "--temperature exclude",
        "--method 1 --top-k 1": "--method, --top-k exclude",
    },
    "serve": {
        "--port 0 --slots 0": "1 to 256",
        "--port 0 --method magic": "unknown method",
        "--port 0 --allow all": "greedy, top_k, top_p",
        "--port 0 --queue 0": "--queue",
        "--port 99999": "--port",
        "--port 0 --host 203.0.113.7": "cannot listen",
        "--port 0 --model nowhere": "unknown model",
        "--port 0 --api-key schl\u00fcssel": "cannot be sent",
        "--port 0 --api-key ''": "cannot be sent",
        "--port 0 --replicas 0": "--replicas",
        "--port 0 --device toaster": "cpu",
        "--port 0 --sizes 64x64": "generates one size",
        "--port 0 --sources 1": "--sources 1 cannot be served",
        "--port 0 --sglang": "--sglang cannot serve builtin",
        "--port 0 --sglang --api-key secret": "--api-key cannot be used with --sglang",
        "--port 0 --model PUBLIC/emu3 --method lantern++": "has no drafter",
        "--port 0 --model PUBLIC/emu3 --method ar,eagle": "has no drafter",
        "--port 0 --model PUBLIC/glm-image --sizes 100x100": "multiples of 32",
        "--port 0 --model PUBLIC/glm-image --sizes 96000x3200": "positions",
        "--port 0 --model PUBLIC/glm-image --sizes square": "width x height",
        "--port 0 --model PUBLIC/glm-image --sizes 0x64": "width x height",
    },
    "bench --model MODEL": {
        "--method magic": "unknown method 'magic'",
        "--quantize int2": "int8",
        "--method ar,ar": "--method names ar twice",
        "--graphs magic": "unknown graph mode 'magic'",
        "--graphs hpu_graph": "does not offer graph mode 'hpu_graph'",
        "--batch-sizes 1,0": "--batch-sizes is 1,0",
        "--batch-sizes some": "numbers from 1, such as 1,8",
        "--num-images 0": "--num-images is 0",
        "--seed -1": "--seed is -1",
        "--method eagle@nowhere": "unknown tree 'nowhere'",
        "--method ,": "--method is empty",
        "--output brackets.json": "brackets.json exists",
    },
    "tune": {
        "--method eagle2": "--method eagle2 cannot be tuned",
        "--num-images 0": "--num-images is 0",
        "--output tree.txt": "cannot write tree.txt",
    },
    "fidelity": {
        "--method magic": "unknown method 'magic'",
        "--method lantern:gsd": "no clusters with a dynamic tree",
        "--num-images 0": "--num-images is 0",
        "--output binary.py/x.json": "binary.py",
    },
    f"race --model MODEL {WHERE}": {
        "--method scd@0": "invalid window 0",
        "--method magic": "unknown method 'magic'",
        "--turns 0": "--turns is 0",
        "--seed -1": "--seed is -1",
        "--prompt ' '": "empty",
        "--device abacus": "unknown device 'abacus'",
        "--model llamagen-zz": "llamagen-zz",
        "--output brackets": "brackets exists",
    },
    f"evaluate {WHERE}": {
        "--method magic": "unknown method 'magic'",
        "--num-images 30": "--num-images is 30",
        "--batch-size 0": "--batch-size is 0",
        "--model x": "--preset is missing",
        "--preset magic": "unknown preset 'magic'",
        "--preset lantern --quick": "--quick has no meaning for --preset lantern",
        "--preset lantern": "--prompts-file is missing",
        "--reference here": "--reference has no meaning for --preset scenes",
        "--preset scenes --workers 0": "--workers is 0",
        "--preset scenes --workers 2 --places 4": "--workers excludes --places",
        "--preset scenes --workers 2 --method eagle@auto": "--workers",
    },
    "lint": {
        "--method magic": "unknown method 'magic'",
        "--script none.py": "there is no none.py",
        "none.py --config none.toml": "there is no none.py",
        "-m no_such.module": "there is no module no_such.module",
        "--profile magic": "--profile is magic\n  try: lazy, compile",
        "--timeout 0": "--timeout is 0.0",
    },
    "verify": {
        "--device abacus": "unknown device 'abacus'",
        "--device cpu --emulate": "cpu cannot be emulated",
        "--minutes 0": "--minutes is 0.0",
        "--output card.txt": "a name that ends in .json",
    },
}
EACH_REFUSED = [
    pytest.param(line, "", "error: ", id=line.replace(LONG, "LONG")[:60]) for line in ODD
] + [
    pytest.param(command, options, said, id=f"{command.split()[0]} {options}")
    for command, cases in REFUSED.items()
    for options, said in cases.items()
]


@pytest.fixture
def odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that nobody means to write, as the current one."""
    brackets = "[" * 100_000
    for place in ("brackets.json", "brackets/model.json", "brackets/config.json"):
        file = tmp_path / place
        file.parent.mkdir(exist_ok=True)
        file.write_text(brackets)
    (tmp_path / "binary.py").write_bytes(np.random.default_rng(0).bytes(4000))
    Image.new("RGB", (20, 20)).save(tmp_path / "cat.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files_of(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "options", "said"), EACH_REFUSED)
def test_what_a_command_refuses_is_one_clear_error_and_nothing_is_written(
    command: str,
    options: str,
    said: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    odd_files: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server reads no weights before."""
    before, line = files_of(odd_files), f"{command} {options}"
    for name in ("MODEL", "PUBLIC"):
        if name in line:
            line = line.replace(name, str(request.getfixturevalue(name.lower())))
    if command == "serve":
        for owner, name in ((OpenedModel, "load"), (Stored, "fill")):
            monkeypatch.setattr(owner, name, lambda *_: pytest.fail("weights were read"))
    assert cli.main(shlex.split(line)) == 2
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown
    assert [line.startswith("error: ") for line in shown.splitlines()].count(True) == 1
    assert shown.count("error: ") == 1 and files_of(odd_files) == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("generate --ouput x.png", "unknown option --ouput\n  try: --output\n"),
        (
            "generate --steps 20",
            "try: --method; the number of steps follows from its window or tree\n",
        ),
        ("generate --guidance-scale=3", "try: --cfg-scale\n"),
        ("generate --method scd --window 8 --relax tv=0.1", "try: --method scd:tv=0.1@8\n"),
        (
            "race --window=8",
            "--window 8 is a part of --method: a setting has one written form\n  try: --method scd@8\n",
        ),
        ("serve --relax lambda-5", "try: --method auto:lambda-5\n"),
        ("tune --method eagle --tree chain", "try: --method eagle@chain\n"),
        ("bench --methods ar", "try: --method\n"),
        ("fidelity --images 8", "try: --num-images\n"),
        ("serve builtin", "unknown option builtin\n  try: --model builtin\n"),
        ("lint --strct mine.py", "unknown option --strct\n  try: --strict\n"),
        ("generate a cat --seed 1", "try: --prompt 'a cat'\n"),
        ("tune --zzz", "unknown option --zzz\n  try: lantern-hpu tune --help\n"),
        (
            "generate --seed x",
            "argument --seed: invalid int value: 'x'\n  try: lantern-hpu generate --help\n",
        ),
        *(
            (
                f"generate {option} ''",
                f"argument {option}: it is empty\n  try: lantern-hpu generate --help\n",
            )
            for option in ("--output", "--report", "--save-tokens", "--prompts-file")
        ),
    ],
)
def test_an_unknown_option_is_one_line_with_the_nearest(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(line))
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.startswith("error: ") and shown.endswith(said)
    assert shown.count("\n") == 2


def test_a_prompt_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    for content in ('["cat", null]', '[{"prompt": null}]', '["cat", 7]'):
        file.write_text(content)
        with pytest.raises(OptionError, match="not text"):
            read_prompts(file)


def test_prompts_of_a_file_and_of_the_command_line_are_read_alike(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("  a cat  \n")
    made = [["--prompt", "  a cat  "], ["--prompts-file", str(file)]]
    outs = [tmp_path / f"{i}.png" for i in range(2)]
    for words, out in zip(made, outs, strict=True):
        assert generate.main(["--model", str(model), *words, "--output", str(out)]) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_a_negative_prompt_that_is_cut_is_reported(public: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(public / "emu3"))
    words = pipeline("cat", negative_prompt="dog " * 600, method="ar", output_type="tokens").notes
    assert any("the negative prompt has" in note and "left out" in note for note in words)
    fitting = pipeline("cat", negative_prompt="dog", method="ar", output_type="tokens").notes
    assert not any("negative" in note for note in fitting)


# Tokens and converted folders


@pytest.mark.slow
def test_tokens_are_decoded_by_the_same_model_before_and_after_convert(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published, ours = public / "lumina-mgpt", tmp_path / "ours"
    assert convert.main([str(published), str(ours)]) == 0
    for drew, decodes in ((published, ours), (ours, published)):
        place = tmp_path / drew.name
        options = f"--model {drew} --prompt cat --save-tokens {place}.npz --output {place}.png"
        assert generate.main(options.split()) == 0
        options = f"{place}.npz --model {decodes} --output {place}-again.png"
        assert pixels.main(options.split()) == 0, capsys.readouterr().err
        files = [Path(f"{place}.png"), Path(f"{place}-again.png")]
        assert len({file.read_bytes() for file in files}) == 1


def test_a_fingerprint_is_of_what_is_read_alone(tmp_path: Path) -> None:
    """Published tokenizers hold tensors of their training too; PNG files name those that are read."""
    module, digests = nn.Linear(3, 2), []
    for more in ({}, {"training.weight": torch.ones(2)}):
        file = tmp_path / f"{len(more)}.safetensors"
        save_file({**module.state_dict(), **more}, file)
        stored = Stored(open_checkpoint(file), ignored=("training",))
        with shapes_only():
            empty = nn.Linear(3, 2)
        digests += [stored.fill(empty, None, None), stored.fingerprint(empty)]
    assert len(set(digests)) == 1


@pytest.mark.slow
def test_tokens_whose_rows_do_not_end_are_refused(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, file = str(public / "lumina-mgpt"), tmp_path / "tokens.npz"
    given = ["--model", name, "--prompt", "cat", "--save-tokens", str(file)]
    assert generate.main([*given, "--output", str(tmp_path / "x.png")]) == 0
    tokens = np.load(file)["tokens"]
    config = LanternPipeline.from_pretrained(name).model.target.config
    tokens[0, config.grid[1]] = 0
    np.save(tmp_path / "wrong.npy", tokens)
    words = [str(tmp_path / "wrong.npy"), "--model", name, "--output", str(tmp_path / "y.png")]
    assert pixels.main(words) == 2
    assert "does not end" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../tiny/target.safetensors", "/etc/hostname"])
def test_a_description_names_no_file_outside_its_folder(
    name: str, model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "tiny"))
    about = json.loads((folder / "model.json").read_text())
    about["files"][name] = about["files"]["target.safetensors"]
    (folder / "model.json").write_text(json.dumps(about))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightsError, match="cannot be in it"):
        open_model(find_parts(str(folder)))
    with pytest.raises(WeightsError, match="cannot be in it"):
        open_checkpoint(folder)
    with pytest.raises(WeightsError, match="cannot be in it"):
        check_t5_files(folder)


@pytest.mark.parametrize("name", ["~\0", "~\0/x", "~\ud800", "a/b\0c", "\0"])
def test_names_that_no_file_can_have_are_one_error(name: str) -> None:
    """By themselves, and as a part of a model."""
    with pytest.raises(LanternError):
        find_parts(name)
    with pytest.raises(LanternError):
        open_model(find_parts("builtin", PartOverrides(vq=name)))


KILLED = """
import sys, time
from lantern_hpu.models.files import load
def slow(*_):
    print("writing", flush=True)
    time.sleep(60)
load.model_json = slow
from lantern_hpu.commands.convert import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_what_a_killed_convert_left_is_cleared_by_the_next(model: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED, str(model), str(tmp_path / "ours")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment) as running:
        assert running.stdout is not None and running.stdout.readline()
        other = tmp_path / ".ours.friend"  # no folder of ours
        other.mkdir()
        assert len(list(tmp_path.iterdir())) == 2
        # One that still writes is left alone
        assert convert.main([str(model), str(tmp_path / "ours")]) == 0
        assert len(list(tmp_path.iterdir())) == 3
        running.send_signal(signal.SIGKILL)
    (tmp_path / "ours").rename(tmp_path / "first")
    assert convert.main([str(model), str(tmp_path / "ours")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "first", ".ours.friend"}


NOWHERE = """
import sys
from lantern_hpu.console import open_streams
open_streams()
with open(sys.argv[1], "w") as file:
    print("said", file=sys.stderr)
    print("said", flush=True)
    sys.exit(file.fileno() < 3)
"""


@pytest.mark.parametrize("shell", ["2>&-", ">&- 2>&- <&-", "2>/dev/full"])
def test_what_cannot_be_said_on_stderr_is_left_out(tmp_path: Path, shell: str) -> None:
    """And no file takes the number of a closed stream, which libraries write to."""
    words = [sys.executable, "-c", NOWHERE, str(tmp_path / "file")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", f'exec {shell}; exec "$@"', "-", *words], env=environment)
    assert done.returncode == 0 and not (tmp_path / "file").read_text()


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("stream", [None, Full()])
def test_a_picture_is_drawn_where_nothing_can_be_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: Full | None
) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model))
    want = pipeline("cat").tokens
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", None)
    pipeline.set_progress_bar_config(disable=False)
    assert np.array_equal(pipeline("cat").tokens, want)
    pipeline.save_pretrained(tmp_path / "copy")
    file = tmp_path / "cat.png"
    words = ["--model", str(model), "--prompt", "an unknown thing", "--output", str(file)]
    assert cli.main(["generate", *words]) == 0 and Image.open(file).size == (8, 8)


def test_a_value_that_is_no_text_has_no_nearest_name() -> None:
    with pytest.raises(OptionError, match="kernels is None"):
        DeviceOptions(kernels=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("generat", "generate"),
        ("generate --prompt x --model builtn", "builtin"),
        ("generate --prompt x --model llamagen-t2i-521", "llamagen-t2i-512"),
        ("generate --prompt x --dtype bf16", "bfloat16"),
        ("generate --prompt x --method egle", "eagle"),
        ("generate --prompt x --method scd:lamda-5", "lambda-5"),
        ("generate --prompt x --overwrite", "--force"),
        ("models plan llamagen-t2i-521", "llamagen-t2i-512"),
        ("models convert builtin out --dtype float", "float32"),
    ],
)
def test_the_nearest_name_is_offered_first(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):  # of argparse, whose errors end the process
        assert cli.main(words.split()) == 2
    hint = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert re.fullmatch(rf"  try: {re.escape(meant)}(, or one of .*)?", hint), hint
