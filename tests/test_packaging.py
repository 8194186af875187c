"""What gets installed: one package, whole, with its assets, and no torch that a device did not ask for."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from lantern_hpu.files import VERSION
from scripts.release.wheel import KINDS, build, environment, run, try_wheel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGES = ("lantern_hpu", "gaudi_emulator", "lantern_lab")
LINKS = ("backends", "graphs")
LINKED = {("lantern_hpu", name) for name in LINKS}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> list[str]:
    """Names in a wheel."""
    with zipfile.ZipFile(wheel_file) as archive:
        return archive.namelist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_released_draws_serves_and_stops(
    kind: str, wheel_file: Path, tmp_path: Path
) -> None:
    """Without a network: its libraries are those of this environment, whose own copy of the package comes after."""
    programs = environment(sys.executable, tmp_path)
    file = wheel_file if kind == "native" else build(tmp_path, kind)
    if kind == "sdist":
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
        run([*pip, "--wheel-dir", tmp_path, file])
        (file,) = tmp_path.glob(KINDS["native"])
    with zipfile.ZipFile(wheel_file) as native, zipfile.ZipFile(file) as archive:
        missing = set(native.namelist()) ^ set(archive.namelist())
    assert [Path(name).suffix for name in missing] == ([".so"] if kind == "pure" else [])
    run([programs / "python", "-m", "pip", "install", "--no-deps", file])
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"])
    where = run(
        [programs / "python", "-c", "import lantern_hpu; print(lantern_hpu.__file__)"], tmp_path
    )
    assert where.startswith(str(site))
    made = try_wheel(programs, tmp_path)
    assert made["bytes_served"] > 1000 and made["seconds_to_stop"] < 60


@pytest.mark.slow
def test_one_wheel_is_for_every_cpython(wheel_file: Path) -> None:
    """Of the stable ABI, and without a symbol of Python's."""
    assert "-cp310-abi3-" in wheel_file.name
    with zipfile.ZipFile(wheel_file) as archive:
        (decoder,) = [name for name in archive.namelist() if name.endswith(".so")]
        assert decoder.endswith("_decoder.abi3.so") and b"Py_" not in archive.read(decoder)


@pytest.mark.slow
def test_a_compiler_that_fails_stops_no_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel lacks the native decoder, and torch draws."""
    monkeypatch.setenv("CC", "false")
    with zipfile.ZipFile(build(tmp_path)) as archive:
        names = archive.namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert "lantern_hpu/backends/cpu/native/__init__.py" in names


@pytest.mark.parametrize("name", LINKS)
def test_links_are_relative_and_resolve(name: str) -> None:
    link = ROOT / "lantern_hpu" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert link.resolve() == (ROOT / name).resolve()
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKS)
def test_bare_import_is_refused(name: str) -> None:
    with pytest.raises(ImportError, match=f"import lantern_hpu.{name}, not {name}"):
        importlib.import_module(name)


def installed(pattern: str) -> Iterator[Path]:
    """Files of the packages by where they lie in a wheel, which holds what a link leads to once."""
    for top in PACKAGES:
        files = (file.relative_to(ROOT) for file in (ROOT / top).rglob(pattern))
        yield from (file for file in files if file.parts[:2] not in LINKED)
    for name in LINKS:
        for file in (ROOT / name).rglob(pattern):
            yield "lantern_hpu" / file.relative_to(ROOT)


def test_listed_packages_are_the_folders_on_disk(project: dict[str, Any]) -> None:
    setuptools = project["tool"]["setuptools"]
    folders = {file.parent for file in installed("__init__.py")}
    # Not data: a folder that the emulator puts on the path
    found = {".".join(folder.parts) for folder in folders if "vendor" not in folder.parts}
    assert set(setuptools["packages"]) == found
    for name, folder in setuptools["package-dir"].items():
        assert (ROOT / folder / "__init__.py").is_file(), name


@pytest.mark.slow
def test_the_wheel_holds_the_three_packages_whole_and_nothing_else(wheel: list[str]) -> None:
    (info,) = {name.split("/")[0] for name in wheel} - set(PACKAGES)
    assert info.endswith(".dist-info")
    assert not [name for name in wheel if "/tests/" in name or "/scripts/" in name]
    modules = sorted(file.as_posix() for file in installed("*.py"))
    assert sorted(name for name in wheel if name.endswith(".py")) == modules
    assets = {file.as_posix() for file in installed("*") if "assets" in file.parts}
    needed = {name for name in assets if (ROOT / name).is_file()}
    stand_in = (ROOT / "gaudi_emulator" / "vendor").rglob("*")
    needed |= {
        file.relative_to(ROOT).as_posix()
        for file in stand_in
        if file.is_file() and file.suffix in (".py", ".txt", "")
    }
    needed |= {"lantern_hpu/py.typed", "lantern_hpu/backends/cpu/native/decoder.h"}
    needed |= {f"{info}/licenses/{name}" for name in ("LICENSE", "NOTICE")}
    assert assets and needed <= set(wheel)


def test_torch_requirement_keeps_a_device_build(project: dict[str, Any]) -> None:
    """A vendor's torch is `2.5.1a0+...`: a pin, an upper bound or a third digit would replace it."""
    extras = project["project"]["optional-dependencies"].values()
    listed = [*project["project"]["dependencies"], *(line for extra in extras for line in extra)]
    torches = [r for r in map(Requirement, listed) if r.name == "torch"]
    assert len(torches) == 1
    for bound in torches[0].specifier:
        assert bound.operator == ">="
        assert len(bound.version.split(".")) == 2


def test_constraints_parse_and_cover_the_requirements(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for pin in pins:
        assert [bound.operator for bound in pin.specifier] == ["=="], pin
    listed = project["project"]["classifiers"]
    versions = [line.split()[-1] for line in listed if " :: 3." in line]
    assert versions == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    for version in versions:
        here = {"python_version": version}
        names = [
            p.name.lower().replace("_", "-")
            for p in pins
            if not p.marker or p.marker.evaluate(here)
        ]
        assert len(names) == len(set(names)), version
        extras = project["project"]["optional-dependencies"].values()
        lines = [
            *project["project"]["dependencies"],
            *(line for extra in extras for line in extra),
        ]
        asked = map(Requirement, lines)
        cuda = {"platform_system": "Linux"}  # the extra's wheels are for Linux alone
        wanted = {r.name for r in asked if not r.marker or r.marker.evaluate(here | cuda)}
        assert wanted - {"lantern-hpu"} <= set(names), version


def test_a_release_has_the_addresses_of_its_repository(tmp_path: Path) -> None:
    """The workflow's step writes them: the repository has no address of its own."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = workflow["jobs"]["build"]["steps"]
    (script,) = [step["run"] for step in steps if "addresses" in step.get("name", "")]
    files = ("pyproject.toml", "comfyui/pyproject.toml")
    (tmp_path / "comfyui").mkdir()
    for name in files:
        (tmp_path / name).write_text((ROOT / name).read_text())
    names = {"GITHUB_REPOSITORY": "someone/lantern", "GITHUB_REF_NAME": "v1"}
    bash = ["bash", "-euo", "pipefail", "-c", script]
    subprocess.run(bash, cwd=tmp_path, env={**os.environ, **names}, check=True)
    for name in files:
        before, after = (tomllib.loads((top / name).read_text()) for top in (ROOT, tmp_path))
        urls = after["project"].pop("urls")
        assert urls["Repository"] == "https://github.com/someone/lantern"
        before["project"].pop("urls", None)
        assert after == before


def test_commands_are_installed_under_their_names(project: dict[str, Any]) -> None:
    scripts = project["project"]["scripts"]
    assert scripts.keys() == {"lantern-hpu", "gaudi-emulator"}
    for script in scripts.values():
        module, _, function = script.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_emulators_own_wheel_is_what_the_product_has_of_it(project: dict[str, Any]) -> None:
    """Version, command, plugin and files, of the same names, so that neither loads anything twice."""
    alone = tomllib.loads((ROOT / "gaudi_emulator" / "pyproject.toml").read_text())
    assert alone["project"]["version"] == VERSION
    assert alone["project"]["dependencies"] == [project["project"]["dependencies"][0]]
    assert alone["project"]["scripts"].items() <= project["project"]["scripts"].items()
    assert alone["project"]["entry-points"] == project["project"]["entry-points"]
    data, of_product = (p["tool"]["setuptools"]["package-data"] for p in (alone, project))
    assert data["gaudi_emulator"] == of_product["gaudi_emulator"]
    folder = ROOT / "gaudi_emulator"
    carried = {file for pattern in data["gaudi_emulator"] for file in folder.glob(pattern)}
    assert {file for kind in ("*.json", "*.txt") for file in folder.rglob(kind)} <= carried
