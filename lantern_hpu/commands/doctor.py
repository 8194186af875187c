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
from collections.abc import Sequence

from lantern_hpu import __version__
from lantern_hpu.backends.examine import Facts, examine
from lantern_hpu.commands.options import Parser
from lantern_hpu.errors import torchvision_misfit
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.results.tables import aligned

Rows = list[tuple[str, str]]


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
    gaudi, default = facts["gaudi"], facts["default"]
    sections = {"": describe_versions(facts)}
    for name, found in facts["devices"].items():
        state = f"available, {found['why']}" if found["available"] else "not available"
        sections[f"{name}: {state}"] = describe_device(found)
    marks = {True: "ok", False: "--"}
    sections["gaudi"] = [(c["name"], f"{marks[c['ok']]}  {c['detail']}") for c in gaudi["checks"]]
    if gaudi["flags"]["active"]:
        sections["flags"] = describe_flags(gaudi["flags"])
    sections["methods"] = [
        (name, method["about"] + ", needs a drafter" * method["needs_drafter"])
        for name, method in facts["methods"].items()
    ]
    last = f"default: {default['device'] or 'no device'}, because {default['why']}"
    return "\n\n".join([*(section(head, rows) for head, rows in sections.items()), last])


def section(head: str, rows: Rows) -> str:
    """Two aligned columns, indented, below a line if one is given."""
    cells = []
    for name, text in rows:
        first, *more = text.split("\n")
        cells += [(f"  {name}", first), *(("", line) for line in more)]
    return f"{head}\n{aligned(cells)}".strip("\n").rstrip()


def describe_versions(facts: Facts) -> Rows:
    remedy = "transformers will not load; try: pip uninstall torchvision"
    misfit = facts["torchvision"]
    return [
        ("lantern_hpu", facts["lantern_hpu"]),
        ("python", f"{facts['python']} on {facts['platform']}"),
        ("torch", facts["torch"] or "not installed"),
        *([("wrong", f"{misfit}: {remedy}")] if misfit else []),
    ]


def describe_device(found: Facts) -> Rows:
    """Rows of one device: what it is, its memory, what it can do, best first, and what is wrong."""
    details, memory = found.get("details", {}), found.get("memory", {})
    known = [f"{n / 2**30:.1f} GiB {name}" for name, n in memory.items() if isinstance(n, int)]
    said = {"why": "" if found["available"] else found["why"].replace("; ", "\n")}
    if "error" not in details:
        said |= {name: str(value) for name, value in details.items() if isinstance(value, str)}
    said |= {
        "memory": ", ".join(known),
        "kernels": found.get("kernels", {}).get("built"),
        "products": "\n".join(found.get("products", {}).get("chosen") or ()),
        "dtypes": ", ".join(found.get("dtypes", ())),
        "graph modes": ", ".join(found.get("graph_modes", ())),
    }
    rows = [(name, text) for name, text in said.items() if text]
    return [*rows, *(row for part in (details, memory, found) for row in error_rows(part))]


def error_rows(found: Facts) -> Rows:
    """Rows of an error, if there is one."""
    names = {"error": "error", "meaning": "meaning", "hint": "try"}
    return [(shown, found[name]) for name, shown in names.items() if found.get(name)]


def describe_flags(flags: Facts) -> Rows:
    """Rows of the flags: the mode and why; each that this project sets, with its reason; the user's."""
    if "error" in flags:
        return error_rows(flags)
    rows = [
        ("mode", f"{'lazy' if flags['lazy'] else 'eager and compile'}: {flags['why']}"),
        ("release", f"the contract of bridge {flags['release']}"),
    ]
    yours = dict(flags["respected"])
    for flag in flags["settings"]:
        name, value, why = flag["name"], flag["value"], flag["why"]
        given, otherwise = yours.pop(name, None), flag["otherwise"]
        if given is None:
            rows.append(("set", f"{name}={value}: {why} ({otherwise})"))
        elif given == value:
            rows.append(("yours", f"{name}={given}, as it would be set: {why}"))
        else:
            kept = f"{name}={given}, kept; {value} would be set: {why} ({otherwise})"
            rows.append(("yours", kept))
    return rows + [("yours", f"{name}={value}") for name, value in yours.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """The `doctor` command; the exit code is 0 for any findings."""
    asked, facts = make_parser().parse_args(argv), examine_all()
    print(json.dumps(facts, indent=2, default=str) if asked.json else doctor_report(facts))
    return 0
