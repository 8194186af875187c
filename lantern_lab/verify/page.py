"""The page: what was confirmed, refuted and left open; `assets/verify.html` lays it out."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from lantern_hpu.errors import needing
from lantern_hpu.files import ASSETS

STATES = ("refuted", "unanswered", "confirmed")  # as the page sorts them
MARKS = {"confirmed": "yes", "refuted": "NO", "unanswered": "open"}


def counts(report: dict[str, Any]) -> dict[str, int]:
    """How many answers there are of each state."""
    results = Counter(result["state"] for result in report["results"])
    return {state: results[state] for state in MARKS}


def verify_summary(report: dict[str, Any]) -> str:
    counted = ", ".join(f"{count} {state}" for state, count in counts(report).items())
    where = report["hardware"].get("card") or report["device"]
    return f"{where}: {counted}, in {report['seconds']:.0f} seconds"


def verify_page(report: dict[str, Any]) -> str:
    """A whole HTML document."""
    names = ("release", "model", "torch", "lantern_hpu")  # the release of Gaudi's software
    about = {"device": report["device"]}
    about |= {name: report[name] for name in names if report.get(name)}
    for name, value in report["hardware"].items():
        if isinstance(value, dict):  # flags and the like, on one line
            value = ", ".join(f"{part}={what}" for part, what in value.items())
        about |= {name: value} if name not in ("device", "torch") else {}
    stages = []
    for stage, results in groupby(report["results"], lambda result: result["stage"]):
        worst_first = sorted(results, key=lambda result: STATES.index(result["state"]))
        states = Counter(result["state"] for result in worst_first)
        stages.append({"name": stage, "results": worst_first, "counts": states})
    with needing("jinja2", "it lays out the page", "compare"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    loader = FileSystemLoader(ASSETS)
    environment = Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["readable"] = readable
    shown = {"about": about, "stages": stages, "states": STATES, "marks": MARKS}
    page = environment.get_template("verify.html")
    return page.render(report=report, summary=verify_summary(report), **shown)


def readable(value: Any) -> str:
    """A number with as many digits as it needs."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
