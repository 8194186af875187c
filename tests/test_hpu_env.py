"""Gaudi's environment, on a machine without one: which flags are set when, what is found, what errors mean."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from lantern_hpu.backends.hpu import env
from lantern_hpu.backends.hpu import errors as hpu_errors
from lantern_hpu.backends.hpu.env import LAZY, checks, prepare_flags
from lantern_hpu.errors import CaptureError, DeviceError

ROOT = Path(__file__).parent.parent
FORK, STOCK = "2.10.0a0+git1234567", "2.10.0+cpu"
Patch = pytest.MonkeyPatch
Printed = pytest.CaptureFixture[str]
FORKS, UPSTREAM = "_plugin 2_plugin", "2_plugin.upstream"
LAZY_LIBRARY, LIBRARY = "lib/libhabana_pytorch_plugin.so", "lib/libhabana_pytorch2_plugin.so"
STOCK_LIBRARY = "lib/libhabana_pytorch2_plugin.upstream.so"
FLAVOUR = "neither Gaudi's own build nor a +cpu build"
STOCK_BUILD = "stock build, and lazy mode needs Gaudi's own"


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: Patch, tmp_path: Path) -> None:
    """No Gaudi, no flags, nothing loaded, whatever machine this is."""
    for name in list(os.environ):
        if name.startswith(("PT_", "HABANA_", "HLS_", env.MARK)):
            monkeypatch.delenv(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "habana_frameworks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(env, "DEV", tmp_path / "dev")
    monkeypatch.setattr(env, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(env, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(env, "SMI", str(tmp_path / "hl-smi"))


def pretend(monkeypatch: Patch, **versions: str) -> None:
    """These distributions are installed and no other."""
    known = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(env, "version_of", known.get)


def load(monkeypatch: Patch, lazy: bool) -> None:
    """Gaudi's software is imported already."""
    hpu = ModuleType("habana_frameworks.torch.hpu")
    hpu.wrap_in_hpu_graph = print  # type: ignore[attr-defined]  # 1.24 has the name in every mode
    internal = ModuleType("habana_frameworks.torch.utils.internal")
    internal.is_lazy = lambda: lazy  # type: ignore[attr-defined]
    for module in (hpu, internal):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def add_plugin(monkeypatch: Patch, folder: Path, built_for: str = "", libraries: str = "") -> None:
    """Gaudi's package lies on the path and is not imported; `libraries` are those of FORKS and UPSTREAM."""
    torch = folder / "site" / "habana_frameworks" / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (torch / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if built_for:
        (torch / "required_version.txt").write_text(built_for + "\n")
    for name in libraries.split():
        (torch / "lib" / f"libhabana_pytorch{name}.so").touch()
    monkeypatch.syspath_prepend(str(folder / "site"))


def found(name: str) -> env.Check:
    (check,) = [check for check in checks() if check.name == name]
    return check


@pytest.mark.parametrize(
    ("torch", "given", "mode", "lazy"),
    [
        *((None, None, mode, needs) for mode, needs in LAZY.items()),
        (FORK, None, "auto", True),  # which HPU graphs need
        ("2.10.0+hpu.1.24", None, "auto", True),
        (STOCK, None, "auto", False),
        ("2.10.0", None, "auto", False),
        (None, None, "auto", False),
        (FORK, "0", "auto", False),  # the user's own flag
        (STOCK, "1", "auto", True),
    ],
)
def test_the_mode_follows_the_graph_mode_the_flag_and_torch(
    monkeypatch: Patch, torch: str | None, given: str | None, mode: str, lazy: bool
) -> None:
    pretend(monkeypatch, **({"torch": torch} if torch else {}))
    environ = {} if given is None else {"PT_HPU_LAZY_MODE": given}
    flags = prepare_flags(mode, environ=environ)
    assert flags.lazy == lazy and environ["PT_HPU_LAZY_MODE"] == str(int(lazy))
    assert ("PT_HPU_LAZY_MODE" in flags.respected) == (given is not None)
    assert (mode if mode != "auto" else given or str(torch)) in flags.why


def test_flags_of_the_user_are_left_and_ours_are_reported(monkeypatch: Patch) -> None:
    good = {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "TRUE", "HABANA_LOGS": "/tmp/x"}
    good["PT_HPU_RECIPE_CACHE_CONFIG"] = "/tmp,false,1024,true"
    environ = dict(good)
    flags = prepare_flags("hpu_graph", environ=environ)
    assert flags.respected == good and not set(flags.chosen) & set(good)
    assert environ.items() >= good.items() and environ["PT_HPU_WEIGHT_SHARING"] == "0"
    assert {n: v for n, v in environ.items() if n != env.MARK} == flags.chosen | good
    again = prepare_flags("compile", environ=dict(environ))  # as in a child process
    assert again.respected == good and again.chosen["PT_HPU_LAZY_MODE"] == "0"
    changed = environ | {"PT_HPU_LAZY_MODE": "0"}  # by someone after us: it is theirs now
    assert prepare_flags(environ=changed).respected["PT_HPU_LAZY_MODE"] == "0"
    load(monkeypatch, lazy=True)
    assert prepare_flags("hpu_graph", environ=environ) == flags


@pytest.mark.parametrize(
    ("loaded", "mode", "given", "parts"),
    [
        (None, "hpu_graph", "0", ("'hpu_graph'", "PT_HPU_LAZY_MODE=0", "unset")),
        (None, "compile", "1", ("'compile'", "PT_HPU_LAZY_MODE=1", "unset")),
        (None, "strict", None, ("one of auto, hpu_graph, hpu_graph_split, compile",)),
        (False, "hpu_graph", None, ("comes too late", "PT_HPU_LAZY_MODE=1 in the shell")),
        (False, "auto", "1", ("comes too late", "PT_HPU_LAZY_MODE=1 in the shell")),
    ],
)
def test_a_mode_that_cannot_be_is_refused(
    monkeypatch: Patch, loaded: bool | None, mode: str, given: str | None, parts: tuple[str, ...]
) -> None:
    if loaded is not None:
        load(monkeypatch, loaded)
    environ = {} if given is None else {"PT_HPU_LAZY_MODE": given}
    before = dict(environ)
    with pytest.raises(DeviceError) as refused:
        prepare_flags(mode, environ=environ)
    assert all(part in str(refused.value) for part in parts) and environ == before


@pytest.mark.parametrize("lazy", [True, False])
def test_what_is_loaded_already_is_followed(monkeypatch: Patch, lazy: bool) -> None:
    """The flag's default differs between releases, so an unset flag says nothing."""
    pretend(monkeypatch, torch=STOCK if lazy else FORK)
    load(monkeypatch, lazy)
    environ: dict[str, str] = {}
    flags = prepare_flags(environ=environ)
    assert flags.lazy == lazy and "already loaded" in flags.why
    assert flags.chosen == {} and environ == {}


COLLECTIVES = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
REUSE = env.INPUT_REUSE.name


@pytest.mark.parametrize(
    ("flag", "mode", "version", "environ", "value"),
    [
        (COLLECTIVES, "hpu_graph", "1.24.0", {"WORLD_SIZE": "8"}, "true"),
        (COLLECTIVES, "hpu_graph", "1.24.0", {"OMPI_COMM_WORLD_SIZE": "8"}, "true"),
        (COLLECTIVES, "hpu_graph", "1.24.0", {"WORLD_SIZE": "1"}, None),
        (COLLECTIVES, "hpu_graph", "1.24.0", {}, None),
        (COLLECTIVES, "compile", "1.24.0", {"WORLD_SIZE": "8"}, None),
        (REUSE, "compile", "1.19.0", {}, None),
        (REUSE, "compile", "1.24.0", {}, "0"),
        (REUSE, "compile", "1.24.0", {REUSE: "1"}, None),
        (REUSE, "hpu_graph", "1.24.0", {}, None),
    ],
)
def test_a_flag_is_set_where_it_is_needed(
    monkeypatch: Patch,
    flag: str,
    mode: str,
    version: str,
    environ: dict[str, str],
    value: str | None,
) -> None:
    """Of several processes, and what keeps state right outside lazy mode; not over the user's own."""
    pretend(monkeypatch, torch=FORK, habana_torch_plugin=version)
    flags = prepare_flags(mode, environ=dict(environ))
    assert flags.chosen.get(flag) == value
    assert flags.respected == {name: own for name, own in environ.items() if name == flag}
    wanted = value is not None or flag in environ
    assert any(setting.name == flag for setting in flags.settings) == wanted


def test_recipe_cache_is_one_local_folder_for_all_ranks_or_off(tmp_path: Path) -> None:
    """The bare path: three fields are refused by some releases, four by others, this form by none."""

    def kept(home: str, **more: str) -> str | None:
        environ = {"XDG_CACHE_HOME": home, **more}
        return prepare_flags("hpu_graph", environ=environ).chosen.get("PT_HPU_RECIPE_CACHE_CONFIG")

    ours = os.path.realpath(tmp_path / "lantern_hpu" / "recipes")
    assert {kept(str(tmp_path), RANK=rank) for rank in "01"} == {ours}
    for home, kind, reason in (
        ("/home/me", "nfs4", "network disk (nfs4)"),
        ("/home/me too", "ext4", "characters"),
    ):
        (tmp_path / "mounts").write_text(f"/dev/a / ext4 rw 0 0\nserver:/h /home {kind} rw 0 0\n")
        folder, why = env.recipe_folder({"XDG_CACHE_HOME": home})
        assert kept(home) is None and folder is None and reason in why


def test_neither_torch_nor_gaudi_is_imported(monkeypatch: Patch, tmp_path: Path) -> None:
    """The plugin that lies on the path raises when it is imported."""
    add_plugin(monkeypatch, tmp_path, FORK)
    script = (
        "import sys; from lantern_hpu.backends.hpu import env as e, errors\n"
        "e.prepare_flags(environ={}); assert e.checks()[0].ok\n"
        "sys.exit(bool({'torch', 'habana_frameworks'} & set(sys.modules)))"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environ).returncode == 0


@pytest.mark.parametrize(
    ("version", "release"),
    [("1.19.0.561", "1.19"), ("1.24.0.1007", "1.24"), ("1.23.1", "1.24"), ("1.20.0", "1.19")],
)
def test_the_plugins_version_picks_the_release(
    monkeypatch: Patch, version: str, release: str
) -> None:
    pretend(monkeypatch, torch=FORK, habana_torch_plugin=version)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        env.nearest_release.cache_clear()
        for _ in range(2):  # said once
            assert prepare_flags(environ={}).release == release
    known = version.startswith(release)
    assert [str(w.message) for w in said] == (
        [] if known else [f"bridge {version[:4]} was not read; the contract of {release} is used"]
    )


@pytest.mark.parametrize(
    ("torch", "built_for", "libraries", "replaced", "lacks"),
    [
        (FORK, FORK, FORKS, False, {}),
        (FORK, "2.9.0a0+git7654321", FORKS, True, {}),
        (FORK, FORK, UPSTREAM, True, {True: LAZY_LIBRARY, False: LIBRARY}),
        (FORK, FORK, "2_plugin", False, {True: LAZY_LIBRARY}),
        (FORK, FORK, "_plugin", False, {False: LIBRARY}),
        ("2.13.0", FORK, FORKS, True, {True: FLAVOUR, False: FLAVOUR}),
        (STOCK, FORK, FORKS, True, {True: STOCK_BUILD, False: STOCK_LIBRARY}),
        (STOCK, STOCK, FORKS, True, {True: STOCK_BUILD, False: STOCK_LIBRARY}),
        (STOCK, STOCK, UPSTREAM, False, {True: STOCK_BUILD}),
        ("2.10.0", STOCK, UPSTREAM, True, {True: FLAVOUR, False: FLAVOUR}),
        ("2.10.0+cu128", STOCK, UPSTREAM, True, {True: FLAVOUR, False: FLAVOUR}),
        (STOCK, "any", "", False, {}),
    ],
)
def test_what_torch_and_plugin_can_do_together(
    monkeypatch: Patch,
    tmp_path: Path,
    capsys: Printed,
    torch: str,
    built_for: str,
    libraries: str,
    replaced: bool,
    lacks: dict[bool, str],
) -> None:
    """The doctor's line, what is said before the plugin is loaded, and the end of a command: one line, code 2."""
    add_plugin(monkeypatch, tmp_path, built_for, libraries)
    pretend(monkeypatch, torch=torch, habana_torch_plugin="1.24.0.1007")
    assert found("plugin").ok and "1.24.0.1007" in found("plugin").detail
    check = found("torch")
    assert ("REPLACED" in check.detail) == replaced and torch in check.detail
    missing = [why for lazy, why in lacks.items() if lazy or env.is_fork(torch)]
    assert check.ok == (not replaced and (not missing or not env.is_fork(torch)))
    for lazy, mode in ((True, "hpu_graph"), (False, "compile")):
        why = env.unfit_plugin(lazy)
        assert (why is None) == (lazy not in lacks) and (why is None or lacks[lazy] in why)
        if why is not None:
            assert lacks[lazy] in asked_to_draw(capsys, tmp_path / "x.png", "--graphs", mode)
    if libraries == "2_plugin" or built_for == "any":
        assert prepare_flags(environ={}).lazy == (built_for == "any")


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("PT_HPU_LAZY_MODE", "2", "0 or 1"),
        ("PT_HPU_ENABLE_LAZY_COLLECTIVES", "on", "0, 1, true, false"),
        ("PT_ENABLE_INT64_SUPPORT", "yes", "0, 1, true, false"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/a,yes,1024", "PATH[,true|false"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/a~b", "characters"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "{link}", "symbolic link"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "{file}", "not a directory"),
    ],
)
def test_a_value_that_ends_the_process_is_refused_first_with_the_reason(
    monkeypatch: Patch, tmp_path: Path, capsys: Printed, flag: str, value: str, why: str
) -> None:
    """backend/synapse_helpers/env_flags_impl.cpp of 1.24; 1.19 has no such checks."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    value = value.format(link=tmp_path / "link", file=tmp_path / "file")
    add_plugin(monkeypatch, tmp_path, FORK, FORKS)
    pretend(monkeypatch, torch=FORK, habana_torch_plugin="1.19.0")
    prepare_flags(environ={flag: value})
    pretend(monkeypatch, torch=FORK, habana_torch_plugin="1.24.0")
    monkeypatch.setenv(flag, value)
    for options in ((), ("--emulate",)):
        line = asked_to_draw(capsys, tmp_path / "x.png", *options)
        assert f"{flag}={value} would end Gaudi's software" in line
        assert "bridge 1.24: " in line and why in line


# The machine


def test_device_nodes_are_found_and_control_nodes_are_not_counted(tmp_path: Path) -> None:
    nodes = [tmp_path / "dev" / name for name in ("accel/accel0", "hl0")]
    controls = [tmp_path / "dev" / name for name in ("accel/accel_controlD0", "hl_controlD0")]
    for file in (*nodes, *controls):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for left in (nodes, nodes[1:]):
        shown = found("device nodes")
        assert shown.ok and str(left[0]) in shown.detail and "control" not in shown.detail
        left[0].unlink()
    assert not found("device nodes").ok


@pytest.mark.parametrize("closed", ["accel/accel0", "accel"])
def test_device_nodes_that_the_user_may_not_open_name_their_group(
    monkeypatch: Patch, tmp_path: Path, closed: str
) -> None:
    node = tmp_path / "dev" / "accel" / "accel0"
    node.parent.mkdir(parents=True)
    node.touch()
    assert found("device nodes").ok
    shut = tmp_path / "dev" / closed
    monkeypatch.setattr("os.access", lambda path, mode: not Path(path).is_relative_to(shut))
    shown = found("device nodes")
    group = f"docker run --group-add {shut.stat().st_gid} gives it, or run as root"
    assert not shown.ok and shown.detail == f"no permission to use {shut}: {group}"


@pytest.mark.parametrize(
    ("plugin", "driver", "ok", "detail"),
    [
        ("1.24.0.1007", "1.24.0-482", True, "habanalabs 1.24.0-482"),
        ("1.24.0.1007", "1.24.2-31", True, "another patch release than the plugin's 1.24.0"),
        ("1.24.2.44", "1.24.2-31", True, "habanalabs 1.24.2-31"),
        ("1.24.0.1007", "1.22.1-6ddefa6", False, "habanalabs 1.22.1-6ddefa6 does not match"),
    ],
)
def test_driver_and_plugin_must_be_of_one_release(
    monkeypatch: Patch, tmp_path: Path, plugin: str, driver: str, ok: bool, detail: str
) -> None:
    (tmp_path / "driver").write_text(driver + "\n")
    pretend(monkeypatch, habana_torch_plugin=plugin)
    assert found("driver").ok == ok and detail in found("driver").detail


def test_a_machine_with_nothing_is_described_without_an_error(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "habana_frameworks", ModuleType("habana_frameworks"))  # alone
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0,3")
    results = {check.name: check for check in checks()}
    assert not any(results[name].ok for name in ("plugin", "device nodes", "driver", "cards"))
    assert results["torch"].ok and all(check.detail for check in results.values())
    assert results["visible cards"].detail == "HABANA_VISIBLE_MODULES=0,3"


@pytest.mark.parametrize(
    ("rows", "visible", "ok", "detail"),
    [
        ("0, 768\n1, 768\n", None, True, "2, 2 free"),
        ("0, 60000\n1, 768\n", None, True, "2, 1 free (modules 0 look taken)"),
        ("0, 60000 MiB\n1, 60000 MiB\n", None, False, "all 2 look taken (by their memory)"),
        ("0, 60000\n1, 768\n", "0", False, "all 1 look taken (by their memory)"),
        ("driver is not loaded\n", None, False, "lists none: driver is not loaded"),
        ("", None, False, "timed out after 0.2 seconds"),
    ],
)
def test_taken_cards_are_told_by_their_memory(
    monkeypatch: Patch,
    tmp_path: Path,
    rows: str,
    visible: str | None,
    ok: bool,
    detail: str,
) -> None:
    if visible is not None:
        monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)
    if not rows:
        monkeypatch.setattr(env, "SMI_SECONDS", 0.2)
    write_smi(tmp_path, f"cat <<END\n{rows}END" if rows else "exec sleep 9")
    assert found("cards").ok == ok
    assert found("cards").detail.endswith(detail)


def write_smi(folder: Path, body: str) -> None:
    file = folder / "hl-smi"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


# A message of each entry of the table, in its order, as Gaudi's software or its users' reports have it.
MESSAGES = [
    "RuntimeError: synStatus=20 [Device already acquired] Device acquire failed.",
    "synStatus=8 [Device not found] Device acquire failed.",
    "synStatus=17 [Device in reset] Launch failed.",
    "synStatus=26 [Generic failure] Device acquire failed.",
    "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::939524096 (896)MB",
    "collective nonSFG is not supported during hpu graph capturing",
    "cpu fallback is not supported during hpu graph capturing",
    "FATAL ERROR :: MODULE:PT_DEVICE GRAPH:: graph Capture already in progress",
    "GRAPH:: Capture must end on the same stream it began on.",
    "Graph compile failed. synStatus=synStatus 26 [Generic failure].",
    "aten::_embedding_bag is not yet supported on HPU.",
    "Error when trying to cast Long to Int, Input values range [0, 4294967296] exceeds Int range",
    "Error: Compile-time major/minor PyTorch version 2.10.0 differs from run-time 2.13.0.",
    "Stock PyTorch version 2.10.0+cpu is not supported in Lazy mode.",
    "Current PyTorch version 2.10.0+cu128 is detected as neither HPU fork nor CPU upstream.",
    "/x/habana_frameworks/torch/lib/libhabana_pytorch_plugin.so not found.",
    "/x/habana_frameworks/torch/lib/libhabana_pytorch_plugin.so: undefined symbol: _ZN2at4_ops",
    "libSynapse.so: cannot open shared object file: No such file or directory",
    "No module named 'habana_frameworks'",
    "Failed to infer device type",
    "HPUGraph class is available in lazy mode only.",
    "Invalid backend: 'hpu_backend', see `torch._dynamo.list_backends()` for available backends.",
    "Flags name: PT_HPU_RECIPE_CACHE_CONFIG,/tmp,true,1 does not match expected format.",
    "Flags name: PT_HPU_LAZY_MODE,Value '2' is not allowed. Allowed values: 0 | 1.",
    "synLaunch failed with synStatus 7 [Failed to submit].",
]


def test_known_errors_are_explained_with_something_to_try() -> None:
    for known, message in zip(hpu_errors.KNOWN, MESSAGES, strict=True):
        error = hpu_errors.explain_gaudi(RuntimeError(f"first line\n  {message}\nlast line"))
        assert error is not None
        assert (error.what, error.hint) == (known.what, known.hint)
        assert error.why == message


@pytest.mark.parametrize(
    ("message", "index"),
    [
        ("synDeviceAcquire(&handle, nullptr) failed with synapse error: 20", 0),
        ("synDeviceAcquire failed", 3),
        ("capture must end on the stream it began on", 8),
        ("synNodeCreateWithId failed for node: batch_gemm with synStatus 26", 9),
        ("synStatus=4 [Out of device memory]", 4),
        ("Upstream PyTorch version 2.10.0+cpu is not supported in Lazy mode.", 13),
        ("Context-manager for HPUGraph is available in lazy mode only.", 20),
        ("module 'habana_frameworks.torch.hpu' has no attribute 'wrap_in_hpu_graph'", 20),
        ("shape mismatch", None),
        (CaptureError("x", MESSAGES[6]), None),  # our own errors have said what they have to say
    ],
)
def test_other_wordings_mean_the_same(message: str | CaptureError, index: int | None) -> None:
    error = hpu_errors.explain_gaudi(message)
    wanted = None if index is None else hpu_errors.KNOWN[index].what
    assert (error and error.what) == wanted


def test_the_cause_of_an_error_is_looked_at() -> None:
    outer = ImportError("cannot load the device")
    outer.__cause__ = OSError(next(m for m in MESSAGES if "undefined symbol" in m))
    error = hpu_errors.explain_gaudi(outer)
    assert error is not None and "torch was replaced" in error.what


def test_hints_name_what_exists() -> None:
    """Graph modes and files that a hint sends the user to."""
    for known in hpu_errors.KNOWN:
        modes = [arg.value for arg in known.hint.args if arg.name == "graphs"]
        assert set(modes) <= set(LAZY)
        for file in re.findall(r"docs/\S+\.md", known.hint):
            assert (ROOT / file).is_file()


# At the command line: one line, exit code 2


def asked_to_draw(capsys: Printed, output: Path, *options: str) -> str:
    """The one line that `generate --device hpu` says when it cannot begin."""
    from lantern_hpu.cli import main

    code = main(
        ["generate", "--device", "hpu", "--prompt", "a sun", "--output", str(output), *options]
    )
    said = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in said if line.startswith("error: ")]
    assert (code, len(errors)) == (2, 1), said
    return errors[0]


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ("synStatus=20 [Device already acquired] Device acquire failed.", "already taken"),
        ("synStatus=8 [Device not found] Device acquire failed.", "no free Gaudi card"),
    ],
)
def test_busy_or_missing_card_ends_with_code_2(
    monkeypatch: Patch, tmp_path: Path, capsys: Printed, message: str, what: str
) -> None:
    pretend(monkeypatch, torch=FORK, habana_torch_plugin="1.24.0")
    add_plugin(monkeypatch, tmp_path, FORK, FORKS)
    init = tmp_path / "site" / "habana_frameworks" / "__init__.py"
    init.write_text(f"raise RuntimeError({message!r})\n")
    assert what in asked_to_draw(capsys, tmp_path / "x.png")
