"""The rules that keep the code in its order, read from the syntax trees: who may import whom, where a
device may be named, what a captured function may not call, and that `--help` loads no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from lantern_hpu import backends
from lantern_hpu.cli import COMMANDS, OF_MODELS, module_of
from scripts import house
from scripts.house import parsed

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lantern_hpu"
WINGS = ("gaudi_emulator", "lantern_lab")

# A package may import packages of lines above its own, and itself. A module beside the folders counts as one.
LAYERS = (
    {"console"},
    {"errors"},
    {"fields"},
    {"methods.relaxation"},
    {"core"},
    {"files", "ops"},
    {"backends", "tree"},
    {"graphs", "methods", "workers"},
    {"models", "results"},
    {"zoo"},
    {"decode"},
    {"loading", "generator"},
    {"pipeline"},
    {"bridges", "serve"},
    {"commands"},
    {"cli"},
    {"generate"},
)
IMPORTS = (ast.Import, ast.ImportFrom)
RANK = {room: i for i, layer in enumerate(LAYERS) for room in layer}
# Whatever runs inside a recording
CAPTURED = (
    *("ops/*.py", "models/transformer.py", "decode/drafting/*.py"),
    *(f"decode/{n}.py" for n in "rules walk traversal common step".split()),
)
DEVICES = {"cpu", "cuda", "hpu", "mps", "xpu"}
HOST_READS = {"item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select"}
CONSTANTS = {"tensor", "arange", "zeros", "ones", "full", "empty", "eye", "as_tensor", "from_numpy"}


# The size of the code, which `python -m scripts.house` prints: limits go down with it, and lines are rounded up to 500
PRODUCT = 31_500  # lines of Python of lantern_hpu, backends and graphs
WHOLE = 52_000  # lines of Python of the repository without its tests
NATIVE = 1_700  # lines of C of the product
FILES = 133  # of Python of the product
FUNCTIONS = 2_025  # of the product
OPTIONS = {"generate": 32, "all commands": 180}  # without keys of `--config` alone
ENTERED = 49  # files whose functions run for `generate --prompt "a red apple"`
LONGEST = 100  # lines of a function of the product


def test_the_code_keeps_to_its_size() -> None:
    product, options = house.size_of_all(house.PRODUCT), house.options()
    assert product["lines"] <= PRODUCT
    assert product["files"] <= FILES
    assert product["functions"] <= FUNCTIONS
    assert house.size_of_all(house.PARTS)["lines"] <= WHOLE
    assert sum(house.lines_of(part, house.NATIVE) for part in house.PRODUCT) <= NATIVE
    assert options["generate"] <= OPTIONS["generate"]
    assert sum(options.values()) <= OPTIONS["all commands"], options
    longest = max(length for part in house.PRODUCT for length in house.function_lengths(part))
    assert longest[0] <= LONGEST, longest


# Files of the product of less than three functions and no class, and why; a package's own file may be one
SMALL = {
    "lantern_hpu/__main__.py": "`python -m lantern_hpu`",
    "lantern_hpu/generate.py": "`python -m lantern_hpu.generate`",
}


def test_a_file_holds_three_functions_or_a_class() -> None:
    small = set()
    for _, file in sources():
        kinds = Counter(type(node) for node in ast.walk(parsed(file)))
        functions = sum(kinds[kind] for kind in house.FUNCTIONS)
        if functions < 3 and not kinds[ast.ClassDef] and file.name != "__init__.py":
            small.add(str(file.relative_to(ROOT)))
    assert small == set(SMALL), "join it with what it is read with, or take it off the list"


def test_no_class_is_large() -> None:
    large = []
    for _, file in sources():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                methods = sum(isinstance(part, ast.FunctionDef) for part in node.body)
                if length > 300 or methods > 22:
                    large.append(f"{place(file, node.lineno)}: {length} lines, {methods} methods")
    assert not large, "\n".join(large)


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
OTHER_PROGRAMS = ("docker run ", "pip install ", "ray start ")  # whose options may be named


def test_options_are_spelled_where_the_command_line_is() -> None:
    """Errors and hints name arguments as data, which each surface writes in its own way."""
    wrong = []
    for module, file in sources():
        if room(module) in ("commands", "cli"):
            continue
        docs = {id(text) for node in ast.walk(parsed(file)) if (text := docstring(node))}
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = OPTION.search(node.value) and id(node) not in docs
                if named and not node.value.startswith(OTHER_PROGRAMS):
                    wrong.append(f"{place(file, node.lineno)}: {node.value}")
    assert not wrong, "\n".join(wrong)


def docstring(node: ast.AST) -> ast.Constant | None:
    """The docstring of what has one."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if not isinstance(node, kinds) or not node.body or not isinstance(node.body[0], ast.Expr):
        return None
    text = node.body[0].value
    return text if isinstance(text, ast.Constant) else None


@pytest.mark.slow
def test_a_prompt_enters_few_files() -> None:
    entered = house.files_of_a_prompt()
    assert len(entered) <= ENTERED, "\n".join(entered)


def sources() -> Iterator[tuple[str, Path]]:
    """(dotted module, file) of every module; those behind the links come by their real folders."""
    for file in sorted(PACKAGE.rglob("*.py")):
        inner = file.relative_to(PACKAGE)
        if inner.parts[0] not in ("backends", "graphs"):
            yield dotted(inner), file
    for folder in ("backends", "graphs"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield dotted(file.relative_to(ROOT)), file


def dotted(inner: Path) -> str:
    """The module of a file of the package, without the package's name: "decode.step", or "" for the package's own."""
    return ".".join(inner.with_suffix("").parts).removesuffix("__init__").rstrip(".")


def room(module: str) -> str:
    """The package of a module. Of `methods`, relaxation needs errors alone, so that a request may hold one."""
    if module == "methods.relaxation":
        return module
    return "cli" if module == "__main__" else module.split(".")[0]


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


def test_every_room_has_its_layer() -> None:
    placed = [part for layer in LAYERS for part in layer]
    assert len(placed) == len(set(placed))
    rooms = {room(module) for module, _ in sources() if module}
    assert rooms == set(placed), f"give them a place in LAYERS: {rooms ^ set(placed)}"


def test_imports_point_downwards() -> None:
    wrong = []
    for module, file in sources():
        for name, line in imports(parsed(file)):
            package, _, other = name.partition(".")
            if package != "lantern_hpu" or not module or not other:
                continue
            mine, theirs = room(module), room(other)
            if mine != theirs and RANK.get(theirs, -1) >= RANK[mine]:
                wrong.append(f"{place(file, line)}: {module} imports {other}")
    assert not wrong, "\n".join(wrong)


# Modules that import each other, directly or around. Those that no longer do are to leave the list
CIRCLES: tuple[set[str], ...] = ()


def test_no_imports_go_in_a_circle() -> None:
    """Also those inside functions and for types alone, and those of a package's own file."""
    reached = reachable(import_graph())
    found = {
        frozenset(b for b in reached[a] if a in reached[b]) for a in reached if a in reached[a]
    }
    assert found == set(map(frozenset, CIRCLES))


def import_graph() -> dict[str, set[str]]:
    """The modules of every package by the modules that they import."""
    files = {f"lantern_hpu.{module}".rstrip("."): file for module, file in sources()}
    for part in (*WINGS, "scripts"):
        for file in (ROOT / part).rglob("*.py"):
            if "vendor" not in file.parts:
                files[dotted(file.relative_to(ROOT))] = file
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        names = set[str]()
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in files else node.module for name in inner}
        graph[module] = names & files.keys() - {module}
    return graph


def reachable(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The modules that each imports, directly or around."""
    reached = {}
    for module, direct in graph.items():
        found, new = set[str](), direct
        while new:
            found |= new
            new = set[str]().union(*(graph[name] for name in new)) - found
        reached[module] = found
    return reached


# Of the wheel's dependencies and of extras, what may be imported at the head of which files
HEADS = {"torch": "", "numpy": "", "PIL": "", "safetensors": "", "tqdm": ""}
HEADS |= {"triton": "backends/cuda/kernels/", "accelerate": "lantern_lab/train/drafter_training.py"}
HEADS |= {"pytest": "gaudi_emulator/pytest_plugin.py"}


def test_a_plain_install_imports_every_module_but_those_of_extras() -> None:
    wrong = []
    ours = {"lantern_hpu", "lantern_lab", "gaudi_emulator"}
    for folder in (*ours, "backends", "graphs"):
        for file in (ROOT / folder).rglob("*.py"):
            heads = (node for node in parsed(file).body if isinstance(node, IMPORTS))
            for name, line in (found for node in heads for found in imports(node)):
                top, where = name.partition(".")[0], str(file.relative_to(ROOT))
                if top not in ours | sys.stdlib_module_names and (
                    top not in HEADS or not where.startswith(HEADS[top])
                ):
                    wrong.append(f"{place(file, line)}: {name}")
    assert not wrong, "\n".join(wrong)


def test_only_two_modules_are_programs() -> None:
    """`python -m lantern_hpu NAME` reaches every command; only `generate` is also a program of its own."""
    programs = {
        module
        for module, file in sources()
        for node in parsed(file).body
        if isinstance(node, ast.If) and "__name__ == '__main__'" in ast.unparse(node.test)
    }
    assert programs | {"__main__"} == {"__main__", "generate"}
    assert [m for m, _ in sources() if m.split(".")[-1] == "__main__"] == ["__main__"]


def test_few_modules_lie_beside_the_folders() -> None:
    beside = {module for module, file in sources() if module and file.parent == PACKAGE}
    assert len(beside) <= 12, f"a new part belongs into a folder: {sorted(beside)}"


# What each command has, and names that the modules of a device's software have of their own
SHARED_NAMES = {"main", "make_parser"}


def test_no_large_file_is_kept_by_accident() -> None:
    """Weights that a test or a trial left in a checkout stay out of it: those that ship lie with the package."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("this is no checkout of git")
    files = [ROOT / name for name in found.stdout.split("\0") if name]
    large = {str(file.relative_to(ROOT)) for file in files if file.stat().st_size > 2**20}
    assert all(name.startswith("lantern_hpu/assets/") for name in large), large


def test_a_name_stands_for_one_thing() -> None:
    """No public function or class of a module is called as one of another module."""
    places: dict[str, list[str]] = {}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for file in (file for _, file in sources()):
        for node in parsed(file).body:
            if isinstance(node, kinds) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(place(file, node.lineno))
    shared = {n: at for n, at in places.items() if len(at) > 1 and n not in SHARED_NAMES}
    assert not shared, "\n".join(f"{name}: {', '.join(at)}" for name, at in shared.items())


def test_only_commands_know_their_command_line() -> None:
    """Rooms take values, so that others can use them; what several commands read stands in `options`."""
    wrong = [
        place(file, line)
        for module, file in sources()
        if module
        and room(module) not in ("commands", "cli")
        and module != "models.files.checkpoint"  # published files hold their training's namespace
        for name, line in imports(parsed(file))
        if name.split(".")[0] == "argparse"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_product_imports_no_wing() -> None:
    """`cli` names their commands, by a string."""
    wrong = [
        f"{place(file, line)}: {name}"
        for _, file in sources()
        for name, line in imports(parsed(file))
        if name.split(".")[0] in WINGS
    ]
    assert not wrong, "\n".join(wrong)


def test_the_product_knows_no_emulation() -> None:
    """It imports the vendor's package, whoever made it; the shortcut is the command line's."""
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for module, file in sources()
        if module != "cli"
        for node in ast.walk(parsed(file))
        for name in named(node)
        if "emulat" in name.lower()
    ]
    assert not wrong, "\n".join(wrong)


def named(node: ast.AST) -> Iterator[str]:
    """The names that a node defines or uses."""
    for field in ("arg", "id", "attr", "name"):
        if isinstance(name := getattr(node, field, None), str):
            yield name


def test_networks_know_no_device() -> None:
    """Ops and models get what they need from a device handed in."""
    wrong = [
        f"{place(file, line)}: {name}"
        for module, file in sources()
        if room(module) in ("ops", "models", "tree", "zoo")
        or any(file.match(pattern) for pattern in CAPTURED)
        for name, line in imports(parsed(file))
        if name.startswith(("lantern_hpu.backends", "lantern_hpu.graphs"))
    ]
    assert not wrong, "\n".join(wrong)


def device_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Places that name a device: strings, constants that hold one, torch.cuda and the like, and Gaudi's packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.split(":")[0] in DEVICES:
                yield repr(node.value), node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = node.value.id
            if owner == "torch" and node.attr in DEVICES:
                yield f"torch.{node.attr}", node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "lantern_hpu.backends":
            held = {alias.name: vars(backends).get(alias.name) for alias in node.names}
            yield from ((name, node.lineno) for name in held if held[name] in list(DEVICES))
    for module, line in imports(tree):
        if module.split(".")[0] == "habana_frameworks" or module.startswith("torch.cuda"):
            yield module, line


def test_devices_are_named_in_backends_and_graphs_alone() -> None:
    wrong = [
        f"{place(file, line)}: {what}"
        for module, file in sources()
        if room(module) not in ("backends", "graphs")
        for what, line in device_names(parsed(file))
    ]
    assert not wrong, "\n".join(wrong)


Function = tuple[Path, ast.FunctionDef]


def captured_functions() -> list[Function]:
    """Every function that a recording may reach: from `forward` and the kernels, by the names that bodies mention."""
    from lantern_hpu.ops.kernels import PLAIN

    files = [file for pattern in CAPTURED for file in sorted(PACKAGE.glob(pattern))]
    functions: dict[str, list[Function]] = {}
    for file in files:
        for node in ast.walk(parsed(file)):
            if isinstance(node, (ast.Module, ast.ClassDef)):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name != "__init__":
                        functions.setdefault(part.name, []).append((file, part))
    kernels = [getattr(PLAIN, field.name) for field in fields(PLAIN)]
    reached, new = set[str](), {"forward", *(kernel.__name__ for kernel in kernels if kernel)}
    while new:
        reached |= new
        bodies = [node for name in new for _, node in functions[name]]
        new = {name for body in bodies for name in mentioned(body)} & functions.keys() - reached
    return [function for name in sorted(reached) for function in functions[name]]


def mentioned(body: ast.AST) -> Iterator[str]:
    for node in ast.walk(body):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def forbidden(body: ast.AST) -> Iterator[tuple[str, int]]:
    """Calls that read something back, or make a constant."""
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = node.func.value, node.func.attr
            made = isinstance(owner, ast.Name) and owner.id == "torch" and name in CONSTANTS
            if made or name in HOST_READS:
                yield name, node.lineno


def test_captured_code_reads_nothing_back_and_makes_no_constants() -> None:
    """Constants are made in `__init__`, or in functions that only a constructor calls."""
    functions = captured_functions()
    names = {function.name for _, function in functions}
    # The walk finds what it should: both captured functions, all drafting, a kernel, a network
    assert names >= {
        "read_prefix",
        "prepare_write",
        "commit",
        "draft",
        "guided_probs",
        "rotate",
        "sample_distinct",
        "additive_mask",
    }
    wrong = [
        f"{place(file, line)}: {call} in {function.name}"
        for file, function in functions
        for call, line in forbidden(function)
    ]
    assert not wrong, "\n".join(wrong)


# Each line of the input is a module and arguments; one process runs them all, and stops at the first that loads torch.
WITHOUT_TORCH = """
import io, sys
from contextlib import redirect_stdout
from importlib import import_module
for line in sys.stdin:
    module, *args = line.split()
    said, code = io.StringIO(), 0
    with redirect_stdout(said):
        try:
            code = import_module(module).main(args)
        except SystemExit as stop:
            code = stop.code
    loaded = {"torch", "habana_frameworks"} & set(sys.modules)
    if loaded or code or not said.getvalue().strip():
        sys.exit(f"{line.strip()}: loaded {loaded}, code {code}, said {said.getvalue()!r}")
"""


def test_help_loads_no_torch() -> None:
    lines = ["lantern_hpu.cli --help", "lantern_hpu.cli --version"]
    for name in (*COMMANDS, *OF_MODELS):
        lines += [f"lantern_hpu.cli {name} --help", f"{module_of(name)} --help"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    ["lantern_hpu", "lantern_hpu.backends", "lantern_hpu.graphs", "lantern_hpu.methods.setting"],
)
def test_what_runs_before_torch_does_not_load_it(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    from lantern_hpu.cli import RENAMED, main

    for old, new in RENAMED.items():
        assert main([old, "anole-7b", "--to", "a b"]) == 2
        said = capsys.readouterr().err
        assert f"{old!r} is now {new!r}\n  try: lantern-hpu {new} anole-7b --to 'a b'" in said
    assert main(["paint"]) == 2
    said = capsys.readouterr().err
    assert "unknown command 'paint'" in said
    assert all(name in said for name in COMMANDS)


def test_the_emulator_stands_alone() -> None:
    """It is a wheel of its own as well."""
    wrong = [
        f"{place(file, line)}: {name}"
        for file in (ROOT / "gaudi_emulator").rglob("*.py")
        for name, line in imports(parsed(file))
        if name.split(".")[0] in ("lantern_hpu", "lantern_lab", "scripts", "tests")
    ]
    assert not wrong, "\n".join(wrong)
