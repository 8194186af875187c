"""What this machine offers: devices, versions, memory, graph modes, flags, and what is wrong.

    lantern-hpu doctor
    lantern-hpu doctor --json > doctor.json

Gaudi reads its flags while torch is imported, so they are prepared first. A device whose software is broken is shown
with its error and does not keep the others from being shown.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Sequence

from lantern_hpu import __version__
from lantern_hpu.backends.examine import Facts, examine
from lantern_hpu.commands.options import Parser
from lantern_hpu.errors import torchvision_misfit
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.results.tables import aligned


def make_parser() -> argparse.ArgumentParser:
    about = "Show the devices and packages of this machine, and what is wrong with them."
    parser = Parser("lantern-hpu doctor", description=about)
    what = "print everything as JSON, for a bug report"
    parser.add_argument("--json", action="store_true", help=what)
    return parser


def examine_all() -> Facts:
    """The contract of `--json`."""
    return {
        "lantern_hpu": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **examine(),
        "torchvision": torchvision_misfit() or None,
        "methods": {
            name: {"about": method.about, "needs_drafter": method.needs_drafter}
            for name, method in METHODS.items()
        },
    }


def doctor_report(facts: Facts) -> str:
    """The facts as text in short aligned sections."""
    versions = [
        ("lantern_hpu", facts["lantern_hpu"]),
        ("python", f"{facts['python']} on {facts['platform']}"),
        ("torch", facts["torch"] or "not installed"),
    ]
    if facts["torchvision"]:
        remedy = "transformers will not load; try: pip uninstall torchvision"
        versions.append(("wrong", f"{facts['torchvision']}: {remedy}"))
    parts = [section(versions)]
    for name, result in facts["devices"].items():
        state = f"available, {result['why']}" if result["available"] else "not available"
        parts.append(section(describe_device(result), f"{name}: {state}"))
    marks = {True: "ok", False: "--"}
    rows = [(c["name"], f"{marks[c['ok']]}  {c['detail']}") for c in facts["gaudi"]["checks"]]
    parts.append(section(rows, "gaudi"))
    if facts["gaudi"]["flags"]["active"]:
        parts.append(section(describe_flags(facts["gaudi"]["flags"]), "flags"))
    names = [
        (name, method["about"] + (", needs a drafter" if method["needs_drafter"] else ""))
        for name, method in facts["methods"].items()
    ]
    parts.append(section(names, "methods"))
    default = facts["default"]
    parts.append(f"default: {default['device'] or 'no device'}, because {default['why']}")
    return "\n\n".join(parts)


def section(rows: Sequence[tuple[str, str]], *head: str) -> str:
    """Two aligned columns, indented, below a line if one is given."""
    cells = []
    for name, text in rows:
        first, *more = text.split("\n")
        cells += [(f"  {name}", first), *(("", line) for line in more)]
    return "\n".join([*head, aligned(cells)]).rstrip()


def describe_device(found: Facts) -> list[tuple[str, str]]:
    """Rows of one device: what it is, its memory, what it can do, best first, and what is wrong."""
    details, memory = found.get("details", {}), found.get("memory", {})
    rows = [] if found["available"] else [("why", found["why"].replace("; ", "\n"))]
    if "error" not in details:
        rows += [(name, str(value)) for name, value in details.items() if isinstance(value, str)]
    known = [f"{n / 2**30:.1f} GiB {name}" for name, n in memory.items() if isinstance(n, int)]
    rows += [("memory", ", ".join(known))] if known else []
    if built := found.get("kernels", {}).get("built"):
        rows.append(("kernels", built))
    if chosen := found.get("products", {}).get("chosen"):
        rows.append(("products", "\n".join(chosen)))
    for key in ("dtypes", "graph_modes"):
        rows += [(key.replace("_", " "), ", ".join(found[key]))] if found.get(key) else []
    return [*rows, *error_rows(details), *error_rows(memory), *error_rows(found)]


def error_rows(found: Facts) -> Iterator[tuple[str, str]]:
    """Rows of an error, if there is one."""
    for name in ("error", "meaning", "hint"):
        if found.get(name):
            yield ("try" if name == "hint" else name, found[name])


def describe_flags(flags: Facts) -> list[tuple[str, str]]:
    """Rows of the flags: the mode and why; each that this project sets, with its reason; the user's."""
    if "error" in flags:
        return list(error_rows(flags))
    rows = [
        ("mode", f"{'lazy' if flags['lazy'] else 'eager and compile'}: {flags['why']}"),
        ("release", f"the contract of bridge {flags['release']}"),
    ]
    yours = dict(flags["respected"])
    for flag in flags["settings"]:
        name, value, why = flag["name"], flag["value"], flag["why"]
        given = yours.pop(name, None)
        head = f"{name}={value if given is None else given}"
        if given is None:
            rows.append(("set", f"{head}: {why} ({flag['otherwise']})"))
        elif given == value:
            rows.append(("yours", f"{head}, as it would be set: {why}"))
        else:
            rows.append(
                ("yours", f"{head}, kept; {value} would be set: {why} ({flag['otherwise']})")
            )
    return rows + [("yours", f"{name}={value}") for name, value in yours.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """The `doctor` command; the exit code is 0 for any findings."""
    asked, facts = make_parser().parse_args(argv), examine_all()
    print(json.dumps(facts, indent=2, default=str) if asked.json else doctor_report(facts))
    return 0
