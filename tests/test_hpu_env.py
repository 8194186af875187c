"""Gaudi's environment, on a machine without one: which flags are set when, what is found, what errors mean."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from lantern_hpu.backends.hpu import env
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.backends.hpu import errors as hpu_errors
from lantern_hpu.backends.hpu.env import LAZY, checks, prepare_flags
from lantern_hpu.cli import module_of
from lantern_hpu.errors import CaptureError, DeviceError

ROOT = Path(__file__).parent.parent
FORK, STOCK = "2.10.0a0+git1234567", "2.10.0+cpu"
FORKS, UPSTREAM = "_plugin 2_plugin", "2_plugin.upstream"


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Gaudi, no flags, nothing loaded, whatever machine this is."""
    for name in list(os.environ):
        if name.startswith(("PT_", "HABANA_", "HLS_", hpu_env.MARK)):
            monkeypatch.delenv(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "habana_frameworks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hpu_env, "DEV", tmp_path / "dev")
    monkeypatch.setattr(hpu_env, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(hpu_env, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(hpu_env, "SMI", str(tmp_path / "hl-smi"))


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """These distributions are installed and no other."""
    known = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(hpu_env, "version_of", known.get)


def load(monkeypatch: pytest.MonkeyPatch, lazy: bool) -> None:
    """Gaudi's software is imported already."""
    hpu = ModuleType("habana_frameworks.torch.hpu")
    hpu.wrap_in_hpu_graph = print  # type: ignore[attr-defined]  # 1.24 has the name in every mode
    internal = ModuleType("habana_frameworks.torch.utils.internal")
    internal.is_lazy = lambda: lazy  # type: ignore[attr-defined]
    for module in (hpu, internal):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def add_plugin(
    monkeypatch: pytest.MonkeyPatch, folder: Path, built_for: str = "", libraries: str = ""
) -> None:
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


def found(name: str) -> hpu_env.Check:
    (check,) = [check for check in checks() if check.name == name]
    return check


@pytest.mark.parametrize("mode", LAZY)
def test_a_named_mode_decides(mode: str) -> None:
    env: dict[str, str] = {}
    flags = prepare_flags(mode, environ=env)
    assert flags.lazy == LAZY[mode]
    assert mode in flags.why
    assert env["PT_HPU_LAZY_MODE"] == str(int(LAZY[mode]))
    assert flags.mode == ("hpu_graph" if LAZY[mode] else "compile")


@pytest.mark.parametrize(
    ("torch", "lazy"),
    [(FORK, True), ("2.10.0+hpu.1.24", True), (STOCK, False), ("2.10.0", False), (None, False)],
)
def test_auto_is_lazy_with_gaudis_own_torch_alone(
    monkeypatch: pytest.MonkeyPatch, torch: str | None, lazy: bool
) -> None:
    pretend(monkeypatch, **({"torch": torch} if torch else {}))
    flags = prepare_flags(environ={})
    assert flags.lazy == lazy
    assert str(torch) in flags.why


@pytest.mark.parametrize(("value", "lazy"), [("0", False), ("1", True)])
def test_auto_follows_the_users_flag(
    monkeypatch: pytest.MonkeyPatch, value: str, lazy: bool
) -> None:
    pretend(monkeypatch, torch=STOCK if lazy else FORK)
    env = {"PT_HPU_LAZY_MODE": value}
    flags = prepare_flags(environ=env)
    assert flags.lazy == lazy
    assert env["PT_HPU_LAZY_MODE"] == value
    assert flags.respected == {"PT_HPU_LAZY_MODE": value}
    assert "PT_HPU_LAZY_MODE" not in flags.chosen


def test_what_the_user_set_is_left_and_reported() -> None:
    mine = {"PT_HPU_WEIGHT_SHARING": "1", "PT_ENABLE_INT64_SUPPORT": "1", "HABANA_LOGS": "/tmp/x"}
    env = {**mine, "HOME": "/root"}
    flags = prepare_flags("compile", environ=env)
    assert flags.respected == mine
    assert {name: env[name] for name in mine} == mine
    assert not set(flags.chosen) & set(mine)


def test_every_flag_that_is_set_is_reported_and_none_else() -> None:
    env: dict[str, str] = {}
    flags = prepare_flags("hpu_graph", environ=env)
    del env[hpu_env.MARK]
    assert env == flags.chosen
    assert env["PT_HPU_WEIGHT_SHARING"] == "0"
    assert env["PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES"] == "0"


@pytest.mark.parametrize(("mode", "value"), [("hpu_graph", "0"), ("compile", "1")])
def test_a_mode_against_the_users_flag_is_refused_and_both_named(mode: str, value: str) -> None:
    env = {"PT_HPU_LAZY_MODE": value}
    with pytest.raises(DeviceError) as refused:
        prepare_flags(mode, environ=env)
    said = str(refused.value)
    assert mode in said and f"PT_HPU_LAZY_MODE={value}" in said and "unset" in said
    assert env == {"PT_HPU_LAZY_MODE": value}


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DeviceError, match="one of auto, hpu_graph, hpu_graph_split, compile"):
        prepare_flags("strict", environ={})


def test_a_plugin_for_any_torch_runs_in_lazy_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, torch=STOCK, habana_torch_plugin="1.24.0")
    add_plugin(monkeypatch, tmp_path, "any")
    flags = prepare_flags(environ={})
    assert flags.lazy and flags.mode == "hpu_graph"
    assert [hpu_env.unfit_plugin(lazy) for lazy in (True, False)] == [None, None]
    assert found("torch").ok


def test_our_own_flags_are_never_taken_for_the_users() -> None:
    """A second call, or one in a child process, may decide otherwise."""
    env = {"HABANA_LOGS": "/tmp/x"}
    prepare_flags("hpu_graph", environ=env)
    again = prepare_flags("compile", environ=dict(env))
    assert again.respected == {"HABANA_LOGS": "/tmp/x"}
    assert again.chosen["PT_HPU_LAZY_MODE"] == "0"
    env["PT_HPU_LAZY_MODE"] = "0"  # changed by someone after us: it is theirs now
    assert prepare_flags(environ=env).respected["PT_HPU_LAZY_MODE"] == "0"


@pytest.mark.parametrize("lazy", [True, False])
def test_what_is_loaded_already_is_followed(monkeypatch: pytest.MonkeyPatch, lazy: bool) -> None:
    """The flag's default differs between releases, so an unset flag says nothing."""
    pretend(monkeypatch, torch=STOCK if lazy else FORK)
    load(monkeypatch, lazy)
    env: dict[str, str] = {}
    flags = prepare_flags(environ=env)
    assert flags.lazy == lazy
    assert "already loaded" in flags.why
    assert flags.chosen == {} and env == {}


@pytest.mark.parametrize(
    ("mode", "env"), [("hpu_graph", {}), ("auto", {"PT_HPU_LAZY_MODE": "1"})], ids=["mode", "flag"]
)
def test_a_change_after_loading_comes_too_late(
    monkeypatch: pytest.MonkeyPatch, mode: str, env: dict[str, str]
) -> None:
    load(monkeypatch, lazy=False)
    with pytest.raises(DeviceError, match="comes too late") as refused:
        prepare_flags(mode, environ=env)
    assert "PT_HPU_LAZY_MODE=1 in the shell" in str(refused.value)


def test_flags_stay_reported_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    env: dict[str, str] = {}
    before = prepare_flags("hpu_graph", environ=env)
    load(monkeypatch, lazy=True)
    assert prepare_flags("hpu_graph", environ=env) == before


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_lazy_collectives_need_lazy_mode_and_several_processes(name: str) -> None:
    flag = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
    assert prepare_flags("hpu_graph", environ={name: "8"}).chosen[flag] == "true"
    assert flag not in prepare_flags("hpu_graph", environ={name: "1"}).chosen
    assert flag not in prepare_flags("hpu_graph", environ={}).chosen
    assert flag not in prepare_flags("compile", environ={name: "8"}).chosen


def test_recipe_cache_is_one_local_folder_for_all_ranks(tmp_path: Path) -> None:
    """The bare path: three fields are refused by some releases, four by others, this form by none."""
    kept = {
        prepare_flags("hpu_graph", environ={"XDG_CACHE_HOME": str(tmp_path), "RANK": rank}).chosen[
            "PT_HPU_RECIPE_CACHE_CONFIG"
        ]
        for rank in "01"
    }
    assert kept == {os.path.realpath(tmp_path / "lantern_hpu" / "recipes")}


@pytest.mark.parametrize(
    ("home", "kind", "reason"),
    [("/home/me", "nfs4", "network disk (nfs4)"), ("/home/me too", "ext4", "characters")],
)
def test_recipe_cache_is_off_where_it_would_fail(
    tmp_path: Path, home: str, kind: str, reason: str
) -> None:
    (tmp_path / "mounts").write_text(f"/dev/a / ext4 rw 0 0\nserver:/h /home {kind} rw 0 0\n")
    env = {"XDG_CACHE_HOME": home}
    assert "PT_HPU_RECIPE_CACHE_CONFIG" not in prepare_flags("hpu_graph", environ=env).chosen
    folder, why = hpu_env.recipe_folder(env)
    assert folder is None and reason in why


def test_neither_torch_nor_gaudi_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plugin that lies on the path raises when it is imported."""
    add_plugin(monkeypatch, tmp_path, FORK)
    script = (
        "import sys; from lantern_hpu.backends.hpu import env as e, errors\n"
        "e.prepare_flags(environ={}); assert e.checks()[0].ok\n"
        "sys.exit(bool({'torch', 'habana_frameworks'} & set(sys.modules)))"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environ).returncode == 0


def test_a_machine_with_nothing_is_described_without_an_error() -> None:
    results = {check.name: check for check in checks()}
    assert not any(results[name].ok for name in ("plugin", "device nodes", "driver", "cards"))
    assert results["torch"].ok
    assert all(check.detail for check in results.values())


def test_a_name_without_a_plugin_behind_it_is_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "habana_frameworks", ModuleType("habana_frameworks"))
    assert not found("plugin").ok


def test_plugin_is_found_with_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_plugin(monkeypatch, tmp_path)
    pretend(monkeypatch, torch=FORK, habana_torch_plugin="1.24.0.1007")
    assert found("plugin").ok and "1.24.0.1007" in found("plugin").detail


@pytest.mark.parametrize(
    ("torch", "built_for", "libraries", "replaced"),
    [
        (FORK, FORK, FORKS, False),
        (FORK, "2.9.0a0+git7654321", FORKS, True),
        (FORK, FORK, UPSTREAM, True),
        ("2.13.0", FORK, FORKS, True),
        ("2.13.0", FORK, UPSTREAM, True),
        (STOCK, FORK, FORKS, True),
        ("2.10.0", STOCK, UPSTREAM, True),
        ("2.10.0+cu128", STOCK, UPSTREAM, True),
        (STOCK, STOCK, UPSTREAM, False),
    ],
)
def test_a_replaced_torch_is_told_from_gaudis_two_kinds(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    torch: str,
    built_for: str,
    libraries: str,
    replaced: bool,
) -> None:
    add_plugin(monkeypatch, tmp_path, built_for, libraries)
    pretend(monkeypatch, torch=torch)
    check = found("torch")
    assert check.ok != replaced
    assert ("REPLACED" in check.detail) == replaced
    assert torch in check.detail


@pytest.mark.parametrize(
    ("torch", "libraries", "lazy", "said"),
    [
        (FORK, FORKS, True, None),
        (FORK, "2_plugin", True, "lib/libhabana_pytorch_plugin.so"),
        (FORK, "_plugin", False, "lib/libhabana_pytorch2_plugin.so"),
        (STOCK, UPSTREAM, False, None),
        (STOCK, UPSTREAM, True, "lazy mode needs Gaudi's own"),
        ("2.10.0+cu128", UPSTREAM, False, "neither Gaudi's own build nor a +cpu build"),
        ("2.10.0", UPSTREAM, False, "neither Gaudi's own build nor a +cpu build"),
    ],
)
def test_what_lacks_for_a_mode_is_named_before_the_plugin_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    torch: str,
    libraries: str,
    lazy: bool,
    said: str | None,
) -> None:
    add_plugin(monkeypatch, tmp_path, torch, libraries)
    pretend(monkeypatch, torch=torch)
    why = hpu_env.unfit_plugin(lazy)
    assert (why is None) == (said is None)
    assert said is None or said in str(why)


@pytest.mark.parametrize(
    ("torch", "libraries", "said"),
    [
        (FORK, "2_plugin", "lacks lib/libhabana_pytorch_plugin.so: no HPU graphs"),
        (FORK, "_plugin", "lacks lib/libhabana_pytorch2_plugin.so: no compile and eager"),
        (STOCK, FORKS, "lacks lib/libhabana_pytorch2_plugin.upstream.so"),
        ("2.10.0+cu128", UPSTREAM, "a stock torch must be a +cpu build"),
    ],
)
def test_doctor_names_the_library_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch: str, libraries: str, said: str
) -> None:
    add_plugin(monkeypatch, tmp_path, torch, libraries)
    pretend(monkeypatch, torch=torch)
    check = found("torch")
    assert not check.ok and said in check.detail


def test_without_the_lazy_library_the_default_is_compile_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add_plugin(monkeypatch, tmp_path, FORK, "2_plugin")
    pretend(monkeypatch, torch=FORK)
    flags = prepare_flags(environ={})
    assert not flags.lazy and "libhabana_pytorch_plugin.so" in flags.why
    assert not found("torch").ok and "no HPU graphs" in found("torch").detail


@pytest.mark.parametrize(
    ("version", "release"),
    [("1.19.0.561", "1.19"), ("1.24.0.1007", "1.24"), ("1.23.1", "1.24"), ("1.20.0", "1.19")],
)
def test_the_plugins_version_picks_the_release(
    monkeypatch: pytest.MonkeyPatch, version: str, release: str
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
    ("version", "flag"),
    [
        ("1.19.0", "PT_HPU_USE_INPLACE_INDEX_COPY"),
        ("1.24.0", "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE"),
    ],
)
def test_compile_mode_sets_what_keeps_state_right(
    monkeypatch: pytest.MonkeyPatch, version: str, flag: str
) -> None:
    pretend(monkeypatch, torch=FORK, habana_torch_plugin=version)
    assert prepare_flags("compile", environ={}).chosen[flag] == "0"
    assert flag not in prepare_flags("hpu_graph", environ={}).chosen
    mine = prepare_flags("compile", environ={flag: "1"})
    assert flag not in mine.chosen and mine.respected == {flag: "1"}
    assert any(setting.name == flag and setting.otherwise for setting in mine.settings)


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("PT_HPU_LAZY_MODE", "2", "0 or 1"),
        ("PT_HPU_ENABLE_LAZY_COLLECTIVES", "on", "0, 1, true, false"),
        ("PT_ENABLE_INT64_SUPPORT", "yes", "0, 1, true, false"),
        ("PT_HPU_USE_EAGER_FALLBACK", "never", "on, off"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/a,yes,1024", "PATH[,true|false"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/a~b", "characters"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "{link}", "symbolic link"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "{file}", "no directory"),
    ],
)
def test_a_value_that_ends_the_process_is_refused_first_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: str, value: str, why: str
) -> None:
    """backend/synapse_helpers/env_flags_impl.cpp of 1.24; 1.19 has no such checks."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    value = value.format(link=tmp_path / "link", file=tmp_path / "file")
    pretend(monkeypatch, torch=FORK, habana_torch_plugin="1.24.0")
    with pytest.raises(DeviceError) as refused:
        prepare_flags(environ={flag: value})
    assert f"{flag}={value}" in refused.value.what and why in refused.value.why
    pretend(monkeypatch, torch=FORK, habana_torch_plugin="1.19.0")
    prepare_flags(environ={flag: value})


def test_good_values_are_let_through() -> None:
    good = {
        "PT_HPU_ENABLE_LAZY_COLLECTIVES": "TRUE",
        "PT_HPU_RECIPE_CACHE_CONFIG": "/tmp,false,1024,true",
    }
    assert prepare_flags("hpu_graph", environ=dict(good)).respected == good


@pytest.mark.parametrize("node", ["accel/accel0", "hl0"])
def test_device_nodes_are_found_and_control_nodes_are_not_counted(
    tmp_path: Path, node: str
) -> None:
    for name in (node, "accel/accel_controlD0", "hl_controlD0"):
        file = tmp_path / "dev" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert found("device nodes") == hpu_env.Check(
        "device nodes", True, str(tmp_path / "dev" / node)
    )


@pytest.mark.parametrize(("driver", "ok"), [("1.24.0-482", True), ("1.22.1-6ddefa6", False)])
def test_driver_and_plugin_must_be_of_one_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str, ok: bool
) -> None:
    (tmp_path / "driver").write_text(driver + "\n")
    pretend(monkeypatch, habana_torch_plugin="1.24.0.1007")
    check = found("driver")
    assert check.ok == ok
    assert driver in check.detail


def test_another_patch_release_of_the_driver_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """1.24.2 came within weeks of 1.24.0; both are held to one contract, and only the driver's host has the choice."""
    (tmp_path / "driver").write_text("1.24.2-31\n")
    pretend(monkeypatch, habana_torch_plugin="1.24.0.1007")
    assert (
        found("driver").ok
        and "another patch release than the plugin's 1.24.0" in found("driver").detail
    )
    pretend(monkeypatch, habana_torch_plugin="1.24.2.44")
    assert found("driver").detail == "habanalabs 1.24.2-31"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hpu_env.nearest_release("1.24.2").name == hpu_env.DEFAULT.name == "1.24"


def test_visibility_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HABANA_VISIBLE_DEVICES", "all")
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0,3")
    shown = "HABANA_VISIBLE_DEVICES=all, HABANA_VISIBLE_MODULES=0,3"
    assert found("visible cards").detail == shown


@pytest.mark.parametrize(
    ("rows", "visible", "ok", "detail"),
    [
        ("0, 768\n1, 768\n", None, True, "2, 2 free"),
        ("0, 60000\n1, 768\n", None, True, "2, 1 free (modules 0 look taken)"),
        ("0, 60000 MiB\n1, 60000 MiB\n", None, False, "all 2 look taken (by their memory)"),
        ("0, 60000\n1, 768\n", "0", False, "all 1 look taken (by their memory)"),
        ("driver is not loaded\n", None, False, "lists none: driver is not loaded"),
    ],
)
def test_taken_cards_are_told_by_their_memory(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rows: str,
    visible: str | None,
    ok: bool,
    detail: str,
) -> None:
    if visible is not None:
        monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)
    write_smi(tmp_path, f"cat <<END\n{rows}END")
    assert found("cards").ok == ok
    assert found("cards").detail.endswith(detail)


def test_a_program_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hpu_env, "SMI_SECONDS", 0.05)
    write_smi(tmp_path, "exec sleep 9")
    assert not found("cards").ok
    assert "timed out" in found("cards").detail


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
    "module 'habana_frameworks.torch.hpu' has no attribute 'wrap_in_hpu_graph'",
    "HPUGraph class is available in lazy mode only.",
    "Invalid backend: 'hpu_backend', see `torch._dynamo.list_backends()` for available backends.",
    "Flags name: PT_HPU_RECIPE_CACHE_CONFIG,/tmp,true,1 does not match expected format.",
    "Flags name: PT_HPU_LAZY_MODE,Value '2' is not allowed. Allowed values: 0 | 1.",
    "synLaunch failed with synStatus 7 [Failed to submit].",
]


def test_every_known_error_has_a_message_here() -> None:
    assert len(MESSAGES) == len(hpu_errors.KNOWN)


@pytest.mark.parametrize("index", range(len(MESSAGES)))
def test_known_errors_are_explained_with_something_to_try(index: int) -> None:
    known, message = hpu_errors.KNOWN[index], MESSAGES[index]
    error = hpu_errors.explain_gaudi(RuntimeError(f"first line\n  {message}\nlast line"))
    assert error is not None
    assert (error.what, error.hint) == (known.what, known.hint)
    assert error.why == message + (f" (bridge {known.only})" if known.only else "")


@pytest.mark.parametrize(
    ("message", "index"),
    [
        ("synDeviceAcquire(&handle, nullptr) failed with synapse error: 20", 0),
        ("synDeviceAcquire failed", 3),
        ("capture must end on the stream it began on", 8),
        ("synNodeCreateWithId failed for node: batch_gemm with synStatus 26", 9),
        ("synStatus=4 [Out of device memory]", 4),
        ("Upstream PyTorch version 2.10.0+cpu is not supported in Lazy mode.", 13),
        ("Context-manager for HPUGraph is available in lazy mode only.", 21),
    ],
)
def test_other_wordings_mean_the_same(message: str, index: int) -> None:
    error = hpu_errors.explain_gaudi(message)
    assert error is not None and error.what == hpu_errors.KNOWN[index].what


def test_the_cause_of_an_error_is_looked_at() -> None:
    outer = ImportError("cannot load the device")
    outer.__cause__ = OSError(next(m for m in MESSAGES if "undefined symbol" in m))
    error = hpu_errors.explain_gaudi(outer)
    assert error is not None and "torch was replaced" in error.what


@pytest.mark.parametrize(
    "error", ["shape mismatch", ValueError(""), CaptureError("x", MESSAGES[6])], ids=repr
)
def test_other_errors_are_not_claimed(error: BaseException | str) -> None:
    """Our own errors have said what they have to say."""
    assert hpu_errors.explain_gaudi(error) is None


def test_hints_name_what_exists() -> None:
    """Graph modes and files that a hint sends the user to."""
    for known in hpu_errors.KNOWN:
        for mode in re.findall(r"--graphs (\w+)", known.hint):
            assert mode in LAZY
        for file in re.findall(r"docs/\S+\.md", known.hint):
            assert (ROOT / file).is_file()


def test_commands_of_the_gaudi_page_have_options_that_exist() -> None:
    """They need a card to run, but none to be parsed."""
    text = (ROOT / "docs" / "gaudi.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"(?:lantern-hpu |python -m lantern_hpu\.)(\w+)([^`\n|>&]*)", text)
    assert len(commands) >= 8
    for name, args in commands:
        words = shlex.split(re.sub(r"\$(card|{card})|--emulate|--bridge 1.19", "", args))
        import_module(module_of(name)).make_parser().parse_args(words)


# At the command line: one line, exit code 2


def asked_to_draw(capsys: pytest.CaptureFixture[str], output: Path, *options: str) -> str:
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
    ("torch", "libraries", "mode", "why"),
    [
        (FORK, "2_plugin", "hpu_graph", "lacks lib/libhabana_pytorch_plugin.so"),
        (FORK, "_plugin", "compile", "lacks lib/libhabana_pytorch2_plugin.so"),
        (STOCK, "", "compile", "lacks lib/libhabana_pytorch2_plugin.upstream.so"),
        (STOCK, UPSTREAM, "hpu_graph", "stock build, and lazy mode needs Gaudi's own"),
        ("2.10.0+cu128", UPSTREAM, "compile", "neither Gaudi's own build nor a +cpu build"),
        ("2.10.0", UPSTREAM, "compile", "neither Gaudi's own build nor a +cpu build"),
    ],
)
def test_plugin_without_its_library_and_torch_of_the_wrong_flavour_end_with_code_2(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    torch: str,
    libraries: str,
    mode: str,
    why: str,
) -> None:
    pretend(monkeypatch, torch=torch, habana_torch_plugin="1.24.0")
    add_plugin(monkeypatch, tmp_path, torch, libraries)
    assert why in asked_to_draw(capsys, tmp_path / "x.png", "--graphs", mode)


@pytest.mark.parametrize(
    ("flag", "value"), [("PT_HPU_LAZY_MODE", "2"), ("PT_HPU_ENABLE_H2D_SCALES", "on")]
)
def test_fatal_flag_ends_with_code_2_before_the_plugin_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    value: str,
) -> None:
    pretend(monkeypatch, torch=FORK, habana_torch_plugin="1.24.0")
    add_plugin(monkeypatch, tmp_path, FORK, FORKS)
    monkeypatch.setenv(flag, value)
    for options in ((), ("--emulate",)):
        line = asked_to_draw(capsys, tmp_path / "x.png", *options)
        assert (
            f"{flag}={value} would end Gaudi's software" in line and "bridge 1.24: it takes" in line
        )


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ("synStatus=20 [Device already acquired] Device acquire failed.", "already taken"),
        ("synStatus=8 [Device not found] Device acquire failed.", "no free Gaudi card"),
    ],
)
def test_busy_or_missing_card_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    message: str,
    what: str,
) -> None:
    pretend(monkeypatch, torch=FORK, habana_torch_plugin="1.24.0")
    add_plugin(monkeypatch, tmp_path, FORK, FORKS)
    init = tmp_path / "site" / "habana_frameworks" / "__init__.py"
    init.write_text(f"raise RuntimeError({message!r})\n")
    assert what in asked_to_draw(capsys, tmp_path / "x.png")


def test_reports_do_not_name_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hpu_env.without_home(f"{tmp_path}/recipes,false,1024") == "~/recipes,false,1024"
    for value in ("1", "", "/elsewhere", f"{tmp_path}-2/recipes"):
        assert hpu_env.without_home(value) == value
