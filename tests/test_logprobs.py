"""Log-probabilities of drawn tokens are those of a plain pass over them; weights that a trainer changed are drawn with
as if they were loaded."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from lantern_hpu import cli
from lantern_hpu.core import ImageRecord, Request, Sampling
from lantern_hpu.decode.common import make_grammar, sampling_params
from lantern_hpu.errors import LanternError, OptionError, WeightsError
from lantern_hpu.methods.setting import METHODS, Setting
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.model import ImageModel
from lantern_hpu.ops.sampling import apply_guidance, to_probs
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import GenerationResult
from tests.emulated import emulated
from tests.folder import write_folder
from tests.marks import mostly_slow
from tests.published import EMU3, JANUS, LUMINA2, SIMPLEAR, one_pass

PLAIN: dict[str, Any] = {
    "layout": "plain",
    "kernels": "plain",
    "graphs": "eager",
    "dtype": "float32",
}
LOSSLESS = {
    "ar": ("ar",),
    "eagle": ("eagle@chain", "eagle@deep_7", "eagle:verify=token@deep_7"),
    "eagle2": ("eagle2@dynamic:3x2x8",),
    "jacobi": ("jacobi@4", "jacobi@4:commit=1"),
    "scd": ("scd@4", "scd@4:commit=1"),
    "sjd-pac": ("sjd-pac@3:2x2", "sjd-pac@4:commit=1"),
}
SETTINGS = [setting for several in LOSSLESS.values() for setting in several]
SAMPLINGS = (
    Sampling(3.0),
    Sampling(1.0, temperature=0.7),
    Sampling(2.0, top_k=6),
    Sampling(2.0, temperature=1.3, top_p=0.8),
    Sampling(2.0, temperature=0.0),
)
REQUESTS = [
    Request(prompt, 30 + i, sampling, logprobs=True)
    for i, (sampling, prompt) in enumerate(
        zip(SAMPLINGS, ["red apple", "cat on blue", "cat", "red", "blue"], strict=True)
    )
]


@torch.no_grad()
def of_one_pass(model: ImageModel, record: ImageRecord) -> tuple[Tensor, Tensor]:
    """Of each token of an image [N], by one pass of a plain target over all of them: as drawn, and the model's own."""
    request = record.request
    sampling, config = request.sampling, model.sizes([request])
    guided = sampling.cfg_scale != 1
    prefix = model.condition.sized(config).rows([request], guided)
    tokens = torch.from_numpy(record.token_ids).expand(len(prefix.valid), -1)
    hidden = one_pass(model, prefix, tokens[:, :-1])[:, config.prefix - 1 :]
    logits = model.target.head(hidden)
    own = logits[0].log_softmax(-1)
    grammar = make_grammar(config)
    if grammar is not None:
        logits = grammar(logits, torch.arange(config.tokens).expand(len(tokens), -1))
    params = sampling_params([sampling], config.vocab_size)
    filters = min(sampling.top_k, config.vocab_size), sampling.top_p < 1, config.top_p_first
    drawn = to_probs(apply_guidance(logits, params, guided), params, *filters)[0].log()
    drawn, own = (table.gather(1, tokens[0, :, None])[:, 0] for table in (drawn, own))
    return torch.zeros_like(own) if sampling.greedy else drawn, own


def check(model: ImageModel, result: GenerationResult, bound: float = 1e-5) -> None:
    for record in result.records:
        assert record.logprobs is not None and record.model_logprobs is not None
        drawn, own = of_one_pass(model, record)
        assert record.logprobs.dtype == np.float32 and record.logprobs.shape == (record.tokens,)
        assert np.abs(record.logprobs - drawn.numpy()).max() < bound
        assert np.abs(record.model_logprobs - own.numpy()).max() < bound


def draw(
    pipeline: LanternPipeline, setting: str, requests: Sequence[Request] = REQUESTS
) -> GenerationResult:
    """In batches that images join while others go on."""
    return pipeline.draw(requests, pipeline.resolve(setting), 3, decode=False)


@pytest.fixture(scope="module")
def plain(model: Path) -> ImageModel:
    return LanternPipeline.from_pretrained(str(model), **PLAIN).model


# ------------------------------------------------------------------------------------------ logprobs

BACKENDS: dict[str, dict[str, Any]] = {
    "native": {"layout": "native"},
    "strict": {"layout": "plain", "kernels": "plain", "graphs": "strict"},
    "hpu_graph": {"device": "hpu"},
    "compile": {"device": "hpu"},
}
CASES = [(setting, name) for name in BACKENDS for setting in SETTINGS]
QUICK = [(several[0], "native") for several in LOSSLESS.values()]
QUICK += [
    ("scd@4:commit=1", "native"),
    ("ar", "hpu_graph"),
]


@pytest.fixture(scope="module")
def opened(model: Path) -> Iterator[Callable[[str], LanternPipeline]]:
    """A pipeline of each backend, made when first asked for."""
    made: dict[str, LanternPipeline] = {}
    with ExitStack() as stack:

        def get(name: str) -> LanternPipeline:
            if name not in made:
                how = BACKENDS[name]
                made[name] = LanternPipeline.from_pretrained(str(model), dtype="float32", **how)
                stack.callback(made[name].close)
            return made[name]

        yield get


def test_every_lossless_method_is_in_the_table() -> None:
    assert LOSSLESS.keys() == {name for name, method in METHODS.items() if not method.relaxation}


@pytest.mark.parametrize(("setting", "name"), mostly_slow(CASES, *QUICK))
def test_they_are_those_of_a_plain_pass(
    model: Path,
    opened: Callable[[str], LanternPipeline],
    plain: ImageModel,
    setting: str,
    name: str,
) -> None:
    """Guided or not, tempered, filtered and greedy in one batch; the tokens are those of a run without them."""
    with ExitStack() as stack:
        if name in ("native", "strict"):
            pipeline = opened(name)
        else:
            pipeline, _ = stack.enter_context(emulated(model, name))
        result = draw(pipeline, setting)
        check(plain, result)
        if name in ("hpu_graph", "compile"):
            assert result.graph["recompiles_after_warmup"] == 0
        else:
            others = [Request(r.prompt, r.seed, r.sampling) for r in REQUESTS]
            without = draw(pipeline, setting, others)
            assert np.array_equal(without.tokens, result.tokens) and without.logprobs is None


FAMILIES: dict[str, dict[str, Any]] = {
    "llamagen-c2i/c2i_B_256.pt": {"prompt": "hen"},
    "llamagen-t2i-256": {},
    "anole": {},
    "lumina-mgpt": {},
    LUMINA2: {"size": (64, 96)},
    JANUS: {},
    EMU3: {},
    SIMPLEAR: {},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "scd@3"])
@pytest.mark.parametrize("name", FAMILIES)
def test_those_of_a_family_are_those_of_a_plain_pass(public: Path, name: str, method: str) -> None:
    """With the family's own sampling and grammar, in its own order of filters.

    Guidance by s multiplies what two ways to sum a logit differ by: by s, and by s - 1.
    """
    given = PartOverrides(image_size=512 if name == SIMPLEAR else None)
    make = partial(LanternPipeline.from_pretrained, str(public / name), given=given, device="cpu")
    pipeline, plain = make(dtype="float32"), make(**PLAIN).model
    asked = {"prompt": "a red apple", "size": None} | FAMILIES[name]
    request = Request(**asked, sampling=pipeline.model.sampling, logprobs=True)
    bound = 1e-5 * (2 * request.sampling.cfg_scale - 1)
    check(plain, draw(pipeline, method, [request]), bound)


def test_a_call_returns_them_by_image(pipeline: LanternPipeline, plain: ImageModel) -> None:
    call = partial(pipeline, ["cat", "red"], seed=4, method="scd@4")
    result = call(logprobs=True)
    assert result.logprobs is not None and result.logprobs.shape == result.tokens.shape
    drawn, own = kept(result)
    assert not np.array_equal(drawn, own)
    check(plain, result)
    without = call()
    assert without.logprobs is None and without.model_logprobs is None
    assert [one.tobytes() for one in without.images] == [one.tobytes() for one in result.images]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"method": "lantern++"}, "relaxed acceptance draws from no distribution that is known"),
        ({"method": "lantern"}, "relaxed acceptance"),
        ({"method": "scd:tv=0.1@4"}, "relaxed acceptance"),
        ({"method": "scd@4:commit=2"}, "distributions a step old"),
        ({"logprobs": "model"}, "allowed: true or false"),
    ],
)
def test_what_has_none_refuses_them(
    pipeline: LanternPipeline, asked: dict[str, Any], why: str
) -> None:
    with pytest.raises(OptionError, match=why):
        pipeline("cat", **{"logprobs": True} | asked)


def test_a_report_has_them(
    model: Path, plain: ImageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    command = ["generate", "--model", str(model), "--prompt", "cat", "--seed", "5"]
    monkeypatch.setenv("LANTERN_HPU_LOGPROBS", "true")
    assert cli.main([*command, "--output", str(tmp_path / "a.png")]) == 2
    assert "try: --report FILE.json" in capsys.readouterr().err
    report = tmp_path / "report.json"
    again = ["--output", str(tmp_path / "a.png"), "--report", str(report)]
    assert cli.main([*command, *again]) == 0
    (image,) = json.loads(report.read_text())["images"]
    result = LanternPipeline.from_pretrained(str(model))("cat", seed=5, logprobs=True)
    assert [image["logprobs"], image["model_logprobs"]] == [one[0].tolist() for one in kept(result)]


@pytest.mark.slow
def test_the_page_for_trainers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model's trainer finds the probabilities that its images were drawn with, after each step."""
    page = Path(__file__).parent.parent / "docs" / "guides" / "reinforcement-learning.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    exec(code, {})
    apart = [float(one) for one in re.findall(r"differs by (\S+)", capsys.readouterr().out)]
    assert len(apart) == 3 and max(apart) < 1e-4


# ------------------------------------------------------------------------------------ update_weights


def folder_of(model: Path, weights: dict[str, Tensor], goal: Path) -> Path:
    """A copy of a model's folder whose target has other weights."""
    shutil.copytree(model, goal)
    file = goal / "target.safetensors"
    news = {f"target.{name}": tensor.detach().contiguous() for name, tensor in weights.items()}
    save_file(load_file(file) | news, file)
    config = json.loads((goal / "model.json").read_text())
    config["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (goal / "model.json").write_text(json.dumps(config))
    return goal


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose numbers float16 holds, which a processor packs into it; trained ones are not."""
    folder = tmp_path_factory.mktemp("halves")
    first = write_folder(folder / "first")
    stored = load_file(first / "target.safetensors").items()
    held = {n.removeprefix("target."): t.half().float() for n, t in stored if n[:7] == "target."}
    return folder_of(first, held, folder / "held")


UPDATED: dict[str, dict[str, Any]] = {
    "native": {"layout": "native"},
    "strict": {"layout": "plain", "graphs": "strict"},
    "int8 native": {"layout": "native", "quantize": "int8"},
    "int8 plain": {"layout": "plain", "quantize": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "hpu_graph": {"device": "hpu", "graphs": "hpu_graph"},
    "hpu int8": {"device": "hpu", "graphs": "hpu_graph", "quantize": "int8"},
    "int4": {"quantize": "int4"},
    "hpu int4": {"device": "hpu", "graphs": "hpu_graph", "quantize": "int4"},
    "hpu compile": {"device": "hpu", "graphs": "compile"},
}


@pytest.mark.parametrize("name", mostly_slow(UPDATED, "native", "int8 native"))
def test_a_trainer_draws_with_its_weights(halves: Path, tmp_path: Path, name: str) -> None:
    """Three steps of policy gradient, each over images of the weights before it; then all is as if loaded."""
    how = {"dtype": "float32"} | UPDATED[name]
    trainer = LanternPipeline.from_pretrained(str(halves), **PLAIN).model
    policy = trainer.target.requires_grad_(True)
    optimiser = torch.optim.SGD(policy.parameters(), lr=0.3)
    with ExitStack() as stack:
        if how.get("device") == "hpu":
            pipeline, _ = stack.enter_context(emulated(halves, **how))
        else:
            pipeline = LanternPipeline.from_pretrained(str(halves), **how)
        draws = partial(draw, requests=REQUESTS[:3])
        before = {setting: draws(pipeline, setting) for setting in ("ar", "scd@4")}
        for step in range(3):
            asked = Request("red apple", step, Sampling(1.0), logprobs=True)
            (record,) = draw(pipeline, "scd@4", [asked]).records
            optimiser.zero_grad()
            policy_loss(trainer, record).backward()
            optimiser.step()
            pipeline.update_weights(policy.state_dict())
        fresh = folder_of(halves, policy.state_dict(), tmp_path / "fresh")
        loaded = LanternPipeline.from_pretrained(str(fresh), **how)
        for setting in ("ar", "scd@4", "eagle@chain_2", "scd:distance=3@4"):
            requests = REQUESTS[:3] if "distance" not in setting else relaxed(REQUESTS[:3], setting)
            mine, theirs = (draw(one, setting, requests) for one in (pipeline, loaded))
            assert np.array_equal(mine.tokens, theirs.tokens)
            for own, other in zip(kept(mine), kept(theirs), strict=True):
                assert np.array_equal(own, other)
            assert mine.graph["recompiles_after_warmup"] == 0
        for setting, old in before.items():
            now = draws(pipeline, setting)
            assert now.graph["captures"] == old.graph["captures"]  # its engine stays
            assert not np.array_equal(now.tokens, old.tokens)
            assert not any(np.array_equal(*pair) for pair in zip(kept(now), kept(old), strict=True))


def kept(result: GenerationResult) -> list[NDArray[np.float32]]:
    """Both log-probabilities; none of relaxed images."""
    return [one for one in (result.logprobs, result.model_logprobs) if one is not None]


def relaxed(requests: Sequence[Request], setting: str) -> list[Request]:
    """The same relaxed, which have no log-probabilities."""
    relaxation = Setting.parse(setting).relaxation
    assert relaxation is not None
    return [Request(r.prompt, r.seed, r.sampling, relaxation) for r in requests]


def policy_loss(model: ImageModel, record: ImageRecord) -> Tensor:
    """That makes an image's tokens more likely, weighed against those it was drawn with."""
    prefix = model.condition.rows([record.request], False)
    tokens = torch.from_numpy(record.token_ids)[None]
    hidden = one_pass(model, prefix, tokens[:, :-1])[:, model.target.config.prefix - 1 :]
    found = -F.cross_entropy(model.target.head(hidden)[0], tokens[0], reduction="none")
    assert record.logprobs is not None
    return -(found - torch.from_numpy(record.logprobs)).exp().mean()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state.pop("norm.weight"), "1 tensors missing .norm.weight"),
        (lambda state: state.update({"lm_head": torch.ones(1)}), "1 unknown .lm_head"),
        (
            lambda state: state.update({"norm.weight": torch.ones(3)}),
            r"norm.weight \[3\] for \[64\]",
        ),
        (lambda state: state.update({"norm.weight": torch.ones(64).int()}), "holds torch.int32"),
        (lambda state: state.update({"norm.weight": None}), "norm.weight are no tensors"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    model: Path, plain: ImageModel, change: Callable[[dict[str, Any]], Any], why: str
) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model))
    state: dict[str, Any] = {name: 2 * tensor for name, tensor in plain.target.state_dict().items()}
    change(state)
    before = draw(pipeline, "ar").tokens
    with pytest.raises(WeightsError, match=why):
        pipeline.update_weights(state)
    assert np.array_equal(draw(pipeline, "ar").tokens, before)


def test_weights_wait_for_no_run_and_their_files_do_not_stand_for_them(
    model: Path, plain: ImageModel, tmp_path: Path
) -> None:
    pipeline, state = LanternPipeline.from_pretrained(str(model)), plain.target.state_dict()
    engine = pipeline.engines.get(pipeline.spec(REQUESTS, pipeline.resolve("ar").tree, 3))
    with engine.pinned(), pytest.raises(OptionError, match="a run that has not ended"):
        pipeline.update_weights(state)
    files = [pipeline.describe(pipeline.resolve("ar"))["weights"]]
    for _ in range(2):
        pipeline.update_weights(state)
        files.append(pipeline.describe(pipeline.resolve("ar"))["weights"])
    assert len({one["target.safetensors"] for one in files}) == 3
    for reads in (
        partial(pipeline.to, dtype="bfloat16"),
        partial(pipeline.save_pretrained, tmp_path),
    ):
        with pytest.raises(LanternError, match="other weights than they have"):
            reads()
