"""The rules that keep the code in its order, read from the syntax trees: who may import whom, where a
device may be named, what a captured function may not call, and that `--help` loads no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lantern_hpu.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lantern_hpu"

# A part may import parts of lines above its own, and itself. A folder is one part.
LAYERS = (
    {"errors"},
    {"sampling"},
    {"kernels"},
    {"backends"},
    {"graphs"},
    {"constants", "noise", "cache", "hub", "results"},
    {"codebook", "tree"},
    {"config", "reference", "tables", "tuned"},
    {"registry", "report", "roofline"},
    {"parts"},
    {"accept"},
    {"models"},
    {"memory"},
    {"state"},
    {"layout"},
    {"draft"},
    {"step"},
    {"engine"},
    {"pipeline"},
    {"grown", "measure", "profile", "random_weights", "rates"},
    {"train"},
    {"bench", "comparison", "generate"},
    {"plots"},
    {"page"},
    {"compare", "convert", "doctor", "download", "fidelity", "lint", "plan", "tune"},
    {"models.__main__", "train.__main__", "tree.__main__"},
    {"cli"},
)
DEVICES = {"cpu", "cuda", "hpu", "mps", "xpu"}
HOST_READS = {"item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select"}


def sources() -> Iterator[tuple[str, Path]]:
    """(part, file) of every module; those behind the links come by their real folders."""
    for file in sorted(PACKAGE.glob("*.py")):
        if file.stem not in ("__init__", "__main__"):
            yield file.stem, file
    for folder in (
        PACKAGE / "models",
        PACKAGE / "train",
        PACKAGE / "tree",
        ROOT / "backends",
        ROOT / "graphs",
    ):
        for file in sorted(folder.rglob("*.py")):
            # A folder's command may use what stands above the folder.
            yield f"{folder.name}.__main__" if file.stem == "__main__" else folder.name, file


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted module, line) of every import, also those inside functions and for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            assert node.module is not None
            if node.module == "lantern_hpu":
                yield from ((f"lantern_hpu.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def test_every_module_has_its_layer() -> None:
    placed = [part for layer in LAYERS for part in layer]
    assert len(placed) == len(set(placed))
    missing = {part for part, _ in sources()} - set(placed)
    assert not missing, f"give them a place in LAYERS: {missing}"


def test_imports_point_downwards() -> None:
    rank = {part: i for i, layer in enumerate(LAYERS) for part in layer}
    wrong = []
    for part, file in sources():
        for module, line in imports(parsed(file)):
            package, _, rest = module.partition(".")
            other = rest.split(".")[0]
            if (
                package == "lantern_hpu"
                and other in rank
                and other != part
                and rank[other] >= rank[part]
            ):
                wrong.append(f"{place(file, line)}: {part} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_only_the_upper_layers_know_backends_and_graphs() -> None:
    """Models and the step get what they need from a device handed in."""
    may = {
        "backends",
        "graphs",
        "engine",
        "memory",
        "pipeline",
        "measure",
        "random_weights",
        "rates",
        "bench",
        "generate",
        *LAYERS[-3],
        *LAYERS[-2],
    }
    wrong = [
        f"{place(file, line)}: {module}"
        for part, file in sources()
        if part not in may
        for module, line in imports(parsed(file))
        if module.startswith(("lantern_hpu.backends", "lantern_hpu.graphs"))
    ]
    assert not wrong, "\n".join(wrong)


def device_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Places that name a device: strings, torch.cuda and the like, and Gaudi's packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.split(":")[0] in DEVICES:
                yield repr(node.value), node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = node.value.id
            if owner == "torch" and node.attr in DEVICES:
                yield f"torch.{node.attr}", node.lineno
    for module, line in imports(tree):
        if module.split(".")[0] == "habana_frameworks" or module.startswith("torch.cuda"):
            yield module, line


def test_devices_are_named_in_backends_and_graphs_alone() -> None:
    wrong = [
        f"{place(file, line)}: {what}"
        for part, file in sources()
        if part not in ("backends", "graphs")
        for what, line in device_names(parsed(file))
    ]
    assert not wrong, "\n".join(wrong)


def calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of every call: `torch.tensor`, or `.item` for a method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            torch = isinstance(owner, ast.Name) and owner.id == "torch"
            yield ("torch." if torch else ".") + node.func.attr, node.lineno


@pytest.mark.parametrize("name", ["step.py", "accept.py", "sampling.py"])
def test_captured_code_reads_nothing_back_and_makes_no_constants(name: str) -> None:
    """Constants are made in `__init__`, or in plain functions that only `__init__` calls."""
    tree = parsed(PACKAGE / name)
    wrong = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name != "__init__":
            for call, line in calls(function):
                method = call.split(".")[1]
                if call == "torch.tensor" or method in HOST_READS:
                    wrong.append(f"{place(PACKAGE / name, line)}: {call} in {function.name}")
    assert not wrong, "\n".join(wrong)


WITHOUT_TORCH = """
import sys
from importlib import import_module
try:
    code = import_module(sys.argv[1]).main(sys.argv[2:])
except SystemExit as stop:
    code = stop.code
loaded = sorted({"torch", "habana_frameworks"} & set(sys.modules))
sys.exit(f"loaded {loaded}" if loaded else code)
"""


@pytest.mark.parametrize(
    ("module", "args"),
    [
        ("lantern_hpu.cli", ["--help"]),
        ("lantern_hpu.cli", ["--version"]),
        *[("lantern_hpu.cli", [name, "--help"]) for name in COMMANDS],
        *[(command.module, ["--help"]) for command in COMMANDS.values()],
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_help_loads_no_torch(module: str, args: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, module, *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["lantern_hpu", "lantern_hpu.backends", "lantern_hpu.graphs", "lantern_hpu.config"]
)
def test_what_runs_before_torch_does_not_load_it(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    from lantern_hpu.cli import main

    assert main(["paint"]) == 2
    said = capsys.readouterr().err
    assert "unknown command 'paint'" in said
    assert all(name in said for name in COMMANDS)
