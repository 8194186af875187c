"""The page: what was confirmed, refuted and left open, readable without anything but a browser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

STATES = ("refuted", "unanswered", "confirmed")
MARKS = {"confirmed": "yes", "refuted": "NO", "unanswered": "open"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #ddd }
td:first-child { white-space: nowrap; width: 4rem } code { font-size: 90% }
.confirmed { color: #1a6b33 } .refuted { color: #a61b1b; font-weight: bold } .unanswered { color: #8a6100 }
"""


def counts(report: dict[str, Any]) -> dict[str, int]:
    """How many answers there are of each state."""
    found = Counter(result["state"] for result in report["results"])
    return {state: found[state] for state in ("confirmed", "refuted", "unanswered")}


def sentence(report: dict[str, Any]) -> str:
    """The report in one line."""
    found = ", ".join(f"{count} {state}" for state, count in counts(report).items())
    emulated = ", emulated: nothing ran on a card" if report["emulated"] else ""
    return f"{report['device']}{emulated}: {found}, in {report['seconds']:.0f} seconds"


def page(report: dict[str, Any]) -> str:
    """A whole HTML document."""
    hardware = {
        "device": report["device"] + (" (emulated)" if report["emulated"] else ""),
        "model": report["model"],
        "torch": report["torch"],
        "lantern_hpu": report["lantern_hpu"],
        **{
            name: value
            for name, value in report["hardware"].items()
            if name not in ("device", "torch")
        },
    }
    about = rows(
        (escape(n), escape(str(v))) for n, v in hardware.items() if not isinstance(v, dict)
    )
    checks = rows(
        ("ok" if c["ok"] else "--", f"{escape(c['name'])}: {escape(c['detail'])}")
        for c in report["checks"]
    )
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{escape(sentence(report))}</title><style>{STYLE}</style>",
        f"<h1>{escape(report['kind'])}</h1><p>{escape(sentence(report))}</p>",
        f"<table>{about}</table>",
        f"<h2>this machine</h2><table>{checks}</table>" if checks else "",
    ]
    stages = [
        (stage, sorted(results, key=lambda result: STATES.index(result["state"])))
        for stage, results in groupby(report["results"], lambda result: result["stage"])
    ]
    parts.append(overview(stages))
    for stage, results in stages:
        table = f"<table>{''.join(map(line, results))}</table>"
        parts.append(f"<h2 id='{escape(stage)}'>{escape(stage)}</h2>{table}")
    return "\n".join(part for part in parts if part)


def overview(stages: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
    """How many answers of each state a stage has, and how long it took."""
    lines = ["<tr><th>stage</th>", *(f"<th>{state}</th>" for state in STATES), "<th></th></tr>"]
    for stage, results in stages:
        found = Counter(result["state"] for result in results)
        seconds = sum(result["seconds"] for result in results)
        cells = (f"<td class={s if found[s] else ''}>{found[s]}</td>" for s in STATES)
        name = escape(stage)
        lines.append(f"<tr><td><a href='#{name}'>{name}</a></td>{''.join(cells)}")
        lines.append(f"<td>{seconds:.0f} s</td></tr>")
    return f"<h2>answers</h2><table>{''.join(lines)}</table>" if stages else ""


def rows(cells: Any) -> str:
    return "".join(f"<tr><td>{a}</td><td>{b}</td></tr>" for a, b in cells)


def line(result: dict[str, Any]) -> str:
    """One answer."""
    state = result["state"]
    numbers = dict(result["numbers"])
    table = "".join(numbered(row) for row in numbers.pop("rows", []))
    measured = ", ".join(f"{name} {readable(value)}" for name, value in numbers.items())
    detail = "<br>".join(escape(text) for text in (result["detail"], measured) if text)
    source = f"<code>{escape(result['source'])}</code>"
    return (
        f"<tr><td class={state}>{MARKS[state]}</td><td>{escape(result['item'])}<br>{source}</td>"
        f"<td>{detail}{table}</td><td>{result['seconds']:.1f} s</td></tr>"
    )


def numbered(row: dict[str, Any]) -> str:
    return "<br>" + escape(", ".join(f"{name} {readable(value)}" for name, value in row.items()))


def readable(value: Any) -> str:
    """A number with as many digits as it needs."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
