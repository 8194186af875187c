"""Options: what is out of range or contradicts itself is refused, with its name, its value and the allowed ones."""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest

from lantern_hpu.backends import ACCELERATOR, DraftingDefaults
from lantern_hpu.backends.base import get_backend, load_backend
from lantern_hpu.backends.cpu import native
from lantern_hpu.backends.cuda.backend import CUDABackend
from lantern_hpu.commands.options import add_fields, from_args, given_fields
from lantern_hpu.core import Request, Sampling
from lantern_hpu.errors import OptionError
from lantern_hpu.fields import MAX_SEED, check_ranges, option
from lantern_hpu.methods.relaxation import (
    EXACT,
    PRESETS,
    Additive,
    Annealed,
    Blended,
    Clustered,
    Multiplicative,
    Relaxation,
    Residual,
)
from lantern_hpu.methods.setting import (
    AUTO,
    METHODS,
    Auto,
    ResolveContext,
    Resolved,
    Setting,
    resolve,
)
from lantern_hpu.tree import NAMED, DynamicTree, Tree, Window, load_tree

OUT_OF_RANGE: list[tuple[Callable[..., Any], str, list[float], str, str]] = [
    (Sampling, "cfg_scale", [0.9, 101, math.nan], "cfg_scale", "1 (off) to 100"),
    (Sampling, "temperature", [-0.1, 10.5], "temperature", "0 (greedy), or 0.01 to 10"),
    (Sampling, "top_k", [-1], "top_k", "0 (off) to 1000000000"),
    (Sampling, "top_p", [0.0, 1.1], "top_p", "1e-06 to 1 (off)"),
    (Multiplicative, "k", [-1], "k", "0 (exact) to 1e+09"),
    (partial(Additive, 1), "bound", [-0.1, 1.5], "delta", "0 (exact) to 1"),
    (partial(Multiplicative, 1), "lam", [0.5, math.nan], "lambda", "1 (exact) to 1e+09"),
    (Annealed, "omega", [-1], "omega", "0 to 1000; a weight up to 1 is exact"),
    (Annealed, "nu", [11], "nu", "-10 to 10"),
    (Annealed, "mu", [math.nan], "mu", "-10 to 10"),
    (Clustered, "distance", [-0.1, math.nan], "distance", "0 (exact) to 1e+09"),
    (Clustered, "ranks", [-1], "ranks", "0 (exact) to 1000"),
    (Clustered, "gap", [1.1], "gap", "0 (exact) to 1"),
    (partial(Request, "x"), "seed", [-1, MAX_SEED + 1], "seed", f"0 to {MAX_SEED}"),
]


@pytest.mark.parametrize(("make", "field", "values", "argument", "allowed"), OUT_OF_RANGE)
def test_values_out_of_range_are_refused_by_name(
    make: Callable[..., Any], field: str, values: list[float], argument: str, allowed: str
) -> None:
    for value in values:
        with pytest.raises(OptionError) as refused:
            make(**{field: value})
        assert str(refused.value) == f"{argument} is {value}: allowed: {allowed}"


def test_ends_of_every_range_are_allowed() -> None:
    for cfg_scale, temperature, top_p in ((1, 0, 1.0), (100, 10, 1e-6)):
        assert Sampling(cfg_scale, temperature, 0, top_p).greedy == (temperature == 0)
    for relaxation in (Additive(0, bound=0), Additive(1, bound=1), Multiplicative(1, lam=1)):
        assert relaxation.residual == "sound"
    assert Request("x", MAX_SEED).seed == MAX_SEED
    for prompt in ("", "  \n"):
        with pytest.raises(OptionError, match="the prompt is empty"):
            Request(prompt)


@pytest.mark.parametrize(
    ("method", "text", "meant"),
    [
        ("lantern", "k=5", Additive(5, bound=0.2)),
        ("lantern++", "delta=0.1", Additive(1000, bound=0.1)),
        ("lantern", "lambda-20:k=7", Multiplicative(7, lam=20.0)),
        ("lantern", "residual=official", Additive(1000, "official", 0.2)),
        ("lantern", "omega=1.5:nu=0.7", Annealed(omega=1.5, nu=0.7)),
        ("scd", "gsd", Clustered(0, "sound", 0.5, 7, 0.15)),
        ("scd", "distance=0.2:gap=0.1", Clustered(0, "sound", 0.2, 7, 0.1)),
        ("auto", "k=5", Multiplicative(5, lam=5.0)),
    ],
    ids=str,
)
def test_what_is_not_said_is_the_published_default(
    method: str, text: str, meant: Relaxation
) -> None:
    assert Setting.parse(f"{method}:{text}").relaxation == meant


def test_annealed_weights_fall_with_depth() -> None:
    weights = Annealed(omega=2.0, nu=0.5, mu=0.1).weights(4)
    want = [2.0 * math.exp(-0.5 * i - 0.1) for i in range(4)]
    assert weights == pytest.approx(want)
    assert Additive(3, bound=0.1).weights(2) == [1.0, 1.0]


EXACT_BY_VALUE = [
    *(EXACT, Multiplicative(10), Multiplicative(10, lam=1.0), Multiplicative(0, lam=5.0)),
    *(Additive(10, bound=0.0), Additive(0, bound=0.5), Annealed(omega=1.0)),
    *(Clustered(distance=0.0), Clustered(distance=0.5, ranks=0), Clustered(distance=0.5, gap=0.0)),
]
RELAXED = [
    *(Multiplicative(1, lam=1.01), Additive(1, bound=0.01), Annealed(omega=1.0, nu=0.1)),
    *(Annealed(omega=1.5), Clustered(distance=0.5)),
]


def test_relaxation_is_active_only_if_it_can_change_anything() -> None:
    assert not any(relaxation.active for relaxation in EXACT_BY_VALUE)
    assert all(relaxation.active for relaxation in RELAXED)


# ------------------------------------------------------------------------------------ settings

HERE = ResolveContext(codes=2000, tokens=256, has_drafter=True)
TOGETHER = replace(EXACT, verify="block")  # what static trees of several levels are verified by
# Of a card where windows are faster, and of a processor for a small model and a large one
WINDOWED = DraftingDefaults("scd", tree="chain")
SMALL = DraftingDefaults("ar", 2, idle_arithmetic=False)
LARGE = DraftingDefaults("eagle", 5, idle_arithmetic=False)


def resolved(text: str, context: ResolveContext = HERE) -> tuple[str, str, Relaxation]:
    setting = resolve(Setting.parse(text), context)
    return setting.method, setting.tree.name, setting.relaxation


@pytest.mark.parametrize(
    ("text", "method", "tree", "relaxation"),
    [
        ("ar", "ar", "root", EXACT),
        ("eagle", "eagle", "naive_extend_57", TOGETHER),
        ("auto", "eagle", "naive_extend_57", TOGETHER),
        ("lantern++", "lantern++", "naive_extend_57", Multiplicative(10, lam=5.0)),
        ("lantern++:lambda=2:k=3@chain", "lantern++", "chain", Multiplicative(3, lam=2.0)),
        ("lantern++:lambda=1", "lantern++", "naive_extend_57", replace(TOGETHER, k=10)),
        ("eagle:verify=token", "eagle", "naive_extend_57", replace(EXACT, verify="token")),
        ("auto:delta-0.1@broad_7", "lantern++", "broad_7", Additive(1000, bound=0.1)),
        ("eagle2", "eagle2", "dynamic:10x4x58", EXACT),
        ("lantern", "lantern", "dynamic:10x4x58", Additive(1000, bound=0.2)),
        ("scd", "scd", "scd:16", EXACT),
        ("scd:gsd:ranks=3@8", "scd", "scd:8", Clustered(distance=0.5, ranks=3)),
        ("sjd-pac:omega=2:nu=0.2@8:3x1", "sjd-pac", "sjd-pac:8:3x1", PRESETS["omega-2"]),
        ("jacobi@0", "jacobi", "jacobi:0", EXACT),
        ("scd:tv=0.25", "scd", "scd:16", Blended(tv=0.25)),
    ],
)
def test_settings_mean_what_is_written(
    text: str, method: str, tree: str, relaxation: Relaxation
) -> None:
    assert resolved(text) == (method, tree, relaxation)
    assert Setting.parse(str(Setting.parse(text))) == Setting.parse(text)


WRITTEN = [
    *("auto", "eagle", "scd@16", "lantern:delta-0.1", "lantern++:lambda=5:k=10@broad_7"),
    *("lantern@dynamic:4x3x12", "sjd-pac@8:3x1", "scd@8:commit=2", "eagle@auto"),
    *("lantern++:lambda=2:k=30:residual=official", "scd:distance=0.2:ranks=3:gap=0.5"),
    *("scd:tv=0.25:budget=4@8", "lantern++:tv=0.1@broad_7"),
]


def test_settings_are_written_as_they_are_read() -> None:
    assert [str(Setting.parse(text)) for text in WRITTEN] == WRITTEN


def test_a_result_names_the_setting_as_it_was_asked_for() -> None:
    """A record holds values alone: those of a published setting are named by it."""
    for text in ("scd:lambda-5@16", "lantern:delta-0.1@dynamic:4x3x12", "scd:lambda=2:k=30@8"):
        asked = Setting.parse(text)
        assert asked.relaxation is not None and isinstance(asked.tree, Tree)
        drew = Resolved(asked.method, asked.relaxation, asked.tree)
        assert str(Resolved.read(drew.as_json())) == text


def random_setting(random: Random) -> Setting:
    """Any method with any relaxation and any tree that it takes."""
    name = random.choice([AUTO, *METHODS])
    method = METHODS["lantern++" if name == AUTO else name]
    share, residual = random.random(), random.choice(get_args(Residual))
    relaxation: Relaxation | None = random.choice(
        [
            None,
            EXACT,
            random.choice(list(PRESETS.values())),
            Multiplicative(random.randrange(50), residual, lam=1 + 20 * share),
            Additive(random.randrange(50), residual, bound=share),
            Annealed(0, residual, omega=3 * share, nu=share - 0.5, mu=random.uniform(-1e-7, 1e-7)),
            Clustered(0, residual, distance=share, ranks=random.randrange(9), gap=share / 3),
            Blended(0, residual, tv=share, budget=random.choice([None, 9 * share])),
        ]
    )
    if relaxation is not None and not method.takes_relaxation(relaxation):
        relaxation = None
    width = random.randint(1, 64)
    front = (random.randint(1, 4), random.randint(0, width)) if method.rule == "sjd-pac" else None
    trees: list[Tree | Auto | None] = [None]
    if method.tunable:
        trees.append(AUTO)
    trees += [load_tree(named) for named in NAMED if method.tree == "static"]
    if method.rule is not None:
        trees.append(Window.of(method.rule, width, front))
    if method.tree == "dynamic":
        trees.append(DynamicTree(random.randint(2, 9), random.randint(0, 4), random.randint(1, 2)))
    return Setting(name, relaxation, random.choice(trees))


@pytest.mark.parametrize("seed", range(400))
def test_every_setting_is_read_as_it_was_written(seed: int) -> None:
    setting = random_setting(Random(seed))
    again = Setting.parse(str(setting))
    assert again == setting and str(again) == str(setting)
    if setting.tree != AUTO:  # which depends on what was tuned
        drawn = resolve(setting, HERE)
        assert resolve(Setting.parse(str(drawn)), HERE) == drawn == Resolved.read(drawn.as_json())


def test_a_tree_of_a_file_is_written_as_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text("[[0], [1]]")
    setting = Setting.parse(f"eagle@{file}")
    assert str(setting) == f"eagle@{file}" and resolve(setting, HERE).tree.name == "mine"
    assert Setting.parse(str(setting)) == setting


def test_published_settings_and_usual_windows_fit_small_models() -> None:
    """What is the user's own is not lowered: it is refused where it is used."""
    small = replace(HERE, codes=32, tokens=9)
    assert resolved("lantern", small)[2] == Additive(31, bound=0.2)
    assert resolved("lantern:delta=0.1", small)[2] == Additive(31, bound=0.1)
    assert resolved("lantern:delta=0.1:k=99", small)[2] == Additive(99, bound=0.1)
    assert resolved("scd", small)[1] == "scd:8"
    assert resolved("scd@16", small)[1] == "scd:16"


def test_auto_with_a_relaxation_or_tree_takes_a_method_that_has_it() -> None:
    here = replace(HERE, fastest=("scd", "scd:8"))
    assert resolved("auto:lambda-5", here)[:2] == ("lantern++", "naive_extend_57")
    assert resolved("auto@chain", here)[:2] == ("eagle", "chain")
    alone = replace(HERE, has_drafter=False)
    assert resolved("auto", replace(alone, fastest=("eagle", None)))[0] == "scd"
    assert resolved("auto:lambda-5", alone)[0] == "sjd-pac"


@pytest.mark.parametrize("fastest", [None, ("lantern++", None), ("lantern", None), ("ar", None)])
@pytest.mark.parametrize("defaults", [ACCELERATOR, WINDOWED, SMALL, LARGE])
@pytest.mark.parametrize("has_drafter", [True, False])
@pytest.mark.parametrize("images", [1, 8])
def test_auto_is_lossless_everywhere(
    fastest: tuple[str, None] | None, defaults: DraftingDefaults, has_drafter: bool, images: int
) -> None:
    here = replace(HERE, images=images, fastest=fastest, defaults=defaults, has_drafter=has_drafter)
    assert not resolve(Setting.parse("auto"), here).relaxation.active


def test_processors_have_small_trees() -> None:
    here = replace(HERE, defaults=SMALL)
    assert resolved("eagle", here)[1] == resolved("lantern++", here)[1] == "chain_2"
    assert resolved("eagle2", here)[1] == resolved("lantern", here)[1] == "dynamic:1x0x1"
    assert resolved("scd", here)[1] == "scd:2" and resolved("ar", here)[1] == "root"
    assert resolved("sjd-pac", here)[1] == "sjd-pac:2:2x1"
    large = replace(HERE, defaults=LARGE)
    assert resolved("eagle", large)[1] == "chain_2"
    assert resolved("scd", large)[1] == "scd:5"
    assert resolved("sjd-pac", large)[1] == "sjd-pac:4:2x1"  # as many drafts
    measured = replace(here, fastest=("scd", "scd:4"))  # whose length the others take
    assert resolved("jacobi", measured)[1] == "jacobi:4"
    assert resolved("sjd-pac:lambda-5", measured)[1] == "sjd-pac:3:2x1"
    assert resolved("eagle", measured)[1] == "chain_2"
    assert resolved("scd", replace(measured, defaults=ACCELERATOR))[1] == "scd:16"


def test_cuda_drafts_as_was_measured_fastest_on_a_card() -> None:
    """Windows of 16 where nothing was tuned, and a chain where a drafter is asked for; other devices keep the large
    tree."""
    assert CUDABackend().drafting_defaults(10**9) == WINDOWED
    here = replace(HERE, defaults=WINDOWED)
    assert resolved("auto", here)[:2] == ("scd", "scd:16")
    assert resolved("eagle", here)[1] == resolved("lantern++", here)[1] == "chain"
    assert resolved("eagle2", here)[1] == resolved("eagle2")[1] != "chain"
    assert resolved("eagle@broad_7", here)[1] == "broad_7"
    assert resolved("eagle")[1] == resolved("lantern++")[1] == "naive_extend_57"


def test_gaudi_drafts_as_its_projected_steps_have_it() -> None:
    here = replace(HERE, defaults=load_backend("hpu").drafting_defaults(10**9))
    assert resolved("auto", here)[:2] == ("scd", "scd:24")
    assert resolved("jacobi", here)[1] == "jacobi:24"
    assert resolved("sjd-pac", here)[1] == "sjd-pac:24:3x3"
    assert resolved("scd@16", here)[1] == "scd:16"
    assert resolved("eagle", here)[1] == resolved("lantern++", here)[1] == "mc_sim_7b_63"


SIZE = "fastest here for a model of this size"
DEVICE = "default on this device"
MEASURED = "fastest with this model when it was packaged"


@pytest.mark.parametrize(
    ("change", "setting", "why"),
    [
        ({}, "eagle@naive_extend_57", DEVICE),
        ({"has_drafter": False}, "scd@16", DEVICE),
        ({"defaults": WINDOWED}, "scd@16", DEVICE),
        ({"defaults": WINDOWED, "images": 8}, "scd@16", DEVICE),
        ({"defaults": SMALL}, "ar", SIZE),
        ({"defaults": SMALL, "images": 8}, "ar", SIZE),
        ({"defaults": LARGE}, "eagle@chain_2", SIZE),
        ({"defaults": LARGE, "has_drafter": False}, "scd@5", SIZE),
        ({"defaults": LARGE, "images": 8}, "ar", "fastest here for several images at once"),
        ({"defaults": LARGE, "fastest": ("ar", None)}, "ar", MEASURED),
        ({"fastest": ("scd", "scd:8")}, "scd@8", MEASURED),
    ],
)
def test_auto_says_what_it_took_and_why(change: dict[str, Any], setting: str, why: str) -> None:
    taken = resolve(Setting.parse("auto"), replace(HERE, **change))
    assert (str(taken), taken.why) == (setting, why)
    assert resolve(Setting.parse(setting), replace(HERE, **change)).why == ""


def test_a_processor_takes_ar_for_small_models_and_short_drafts_for_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer ones only where their rows cost little: with AVX2 or 8 bits they were slower than `ar`."""
    table = (
        ("avx512_amx", "scd", 16, 7),
        ("avx512_bf16", "eagle", 5, 2),
        ("avx2", "eagle", 2, 2),
        ("", "eagle", 2, 2),
    )
    for isa, method, window, quantized in table:
        monkeypatch.setattr(native, "isa", lambda isa=isa: isa)
        processor = get_backend("cpu")
        assert processor.drafting_defaults(10**8 - 1).method == "ar"
        assert processor.drafting_defaults(10**8) == DraftingDefaults(method, window, False)
        small = DraftingDefaults(method, quantized, False)
        assert processor.drafting_defaults(10**8, "int8") == small


def test_a_resolved_setting_is_not_resolved_again() -> None:
    setting = Resolved("lantern", Additive(9, bound=0.1), load_tree("dynamic:4x2x9"))
    assert resolve(setting, replace(HERE, codes=4)) is setting


BAD_SETTINGS = {
    **{"magic": "unknown method 'magic'", "": "unknown method ''"},
    "lantern++:kappa=3": "unknown value 'kappa'",
    "lantern++:lambda-6": "unknown relaxation 'lambda-6'",
    "lantern++:lambda=much": "lambda is 'much': a number was expected",
    "lantern++:lambda=0.5": ": lambda is 0.5: allowed: 1 (exact) to 1e+09",
    "lantern++:lambda=2:lambda=3": "lambda is given twice",
    "lantern++:lambda-5:gsd": "lambda-5 and gsd exclude each other",
    "lantern++:lambda=2:delta=0.1": "exclude each other",
    "lantern:omega=2:distance=0.5": "omega and distance exclude each other",
    **{f"lantern:{rule}:k=3": ": k is 3" for rule in ("omega=2", "distance=0.5", "gsd")},
    **{"lantern:ranks=3": "ranks belongs to distance", "lantern:nu=1": "nu belongs to omega"},
    "lantern++:residual=lumina": "unknown residual 'lumina'",
    **{"eagle:lambda-5": "eagle is exact", "jacobi:lambda-5": "jacobi takes no relaxation"},
    "lantern:gsd": "no clusters with a dynamic tree",
    **{"eagle@": "nothing follows @", "eagle@oak": "unknown tree 'oak'"},
    **{"eagle@16": "unknown tree '16'", "eagle@dynamic": "eagle drafts a static tree"},
    "lantern++@dynamic:4x2x9": "lantern++ drafts a static tree",
    **{f"{name}@chain": f"{name} drafts a dynamic tree" for name in ("eagle2", "lantern")},
    **{"eagle2@auto": "eagle2@auto cannot be used", "ar@chain": "ar takes no tree"},
    **{"scd@0": "scd takes 1 to 256", "scd@jacobi:4": "scd drafts a window of its own"},
    **{f"scd:tv={value}": f": tv is {value}" for value in ("1.5", "-0.1", "nan")},
    **{f"scd:tv=0.1:budget={value}": f": budget is {value}" for value in ("-1", "inf")},
    **{f"scd:{rule}budget=2": "budget belongs to tv" for rule in ("lambda=5:", "")},
    **{"scd:tv=0.1:k=3": ": k is 3", "scd:tv=0.1:lambda=5": "exclude each other"},
    **{"lantern:tv=0.1": "no tv with a dynamic tree", "ar:tv=0.1": "ar is exact"},
    **{"eagle2:tv=0.1": "eagle2 is exact", "jacobi:tv=0.1": "jacobi takes no relaxation"},
    "sjd-pac@8:x3": "cannot read the window 'sjd-pac:8:x3'",
    "eagle@nowhere.json": "cannot read the tree 'nowhere.json'",
}


@pytest.mark.parametrize(("text", "why"), BAD_SETTINGS.items())
def test_bad_settings_get_one_clear_error(text: str, why: str) -> None:
    with pytest.raises(OptionError, match=re.escape(why)) as refused:
        Setting.parse(text)
    assert refused.value.what == f"invalid setting {text!r}" and refused.value.hint


def test_a_tuned_tree_is_known_to_a_loaded_model_alone() -> None:
    with pytest.raises(OptionError, match="known to a loaded model alone"):
        resolve(Setting.parse("eagle@auto"), HERE)


# ------------------------------------------------------------------------------------ options of commands


@dataclass(frozen=True)
class Cake:
    layers: int = option(2, "of sponge", low=1, high=9, marks={1: "flat"})
    sugar: float | None = option(None, "grams", name="sweetness", metavar="G", low=0)
    iced: bool = option(False, "with icing")
    baker: str = "nobody"  # no option

    def __post_init__(self) -> None:
        check_ranges(self)


def test_options_are_declared_by_the_dataclass_that_they_fill() -> None:
    parser = ArgumentParser()
    add_fields(parser, Cake, layers="how many", sweetness="spoons")
    shown = " ".join(parser.format_help().split())
    assert "--layers LAYERS how many (1 (flat) to 9; 2)" in shown
    assert "--sweetness G spoons (0 or more)" in shown
    assert "--iced with icing" in shown and "baker" not in shown
    assert given_fields(Cake, parser.parse_args([])) == {}
    args = parser.parse_args(["--layers", "3", "--sweetness", "1.5", "--iced"])
    assert from_args(Cake, args) == Cake(3, 1.5, True)


@dataclass(frozen=True)
class Order:
    cakes: tuple[int, ...] = option(MISSING, "numbers of cakes", positional=True)
    to: Path = option(MISSING, "where it goes")
    names: tuple[str, ...] = option((), "of the guests")


def test_options_may_be_required_or_given_by_their_place() -> None:
    parser = ArgumentParser(exit_on_error=False)
    add_fields(parser, Order)
    args = parser.parse_args(["2", "5", "--to", "home", "--names", "Ada", "Max"])
    assert from_args(Order, args) == Order((2, 5), Path("home"), ("Ada", "Max"))
    assert from_args(Order, args, cakes=(1,)).cakes == (1,)
    for lacking in (["--to", "home"], ["2"]):
        with pytest.raises(SystemExit):
            parser.parse_args(lacking)


def test_options_out_of_range_are_refused_with_the_range() -> None:
    for options in ({"layers": 0}, {"layers": 10}, {"sugar": -1.0}):
        with pytest.raises(OptionError, match=r"^(layers|sweetness) is") as refused:
            Cake(**options)
        assert refused.value.why in ("allowed: 1 (flat) to 9", "allowed: 0 or more")
