"""A comparison as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape

from lantern_hpu.comparison import Comparison
from lantern_hpu.plots import Picture

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # head and lines
WIDE = 12  # columns from which on a table is set smaller
SHORT, NO_BREAK, LABEL_OPENS = 20, "\N{NO-BREAK SPACE}", " ("
FIGURE_GAP = re.compile(r"(?<!,) (?!\()")  # a space that neither follows a comma nor opens a label
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: #1b1b1b;
  background: #fff; max-width: 1240px; margin: 2rem auto 4rem; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .5rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
p.lead { color: #555; margin-top: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .55rem; border-bottom: 1px solid #e6e6e6; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #bbb; font-weight: 600; vertical-align: bottom; }
table.wide { font-size: .76rem; } table.wide th, table.wide td { padding: .25rem .4rem; }
tbody tr:hover { background: #f6f8fa; }
figure { margin: 1.2rem 0 2rem; }
figure img { max-width: 100%; height: auto; display: block; }
figcaption { font-size: .86rem; color: #444; max-width: 46rem; margin-top: .4rem; }
.projected { background: repeating-linear-gradient(45deg, #fff, #fff 5px, #f1ecf6 5px, #f1ecf6 10px); }
ul { padding-left: 1.2rem; } li { margin: .25rem 0; }
code { font-size: .85em; background: #f4f4f4; padding: .05rem .3rem; overflow-wrap: anywhere; }
@media print { body { max-width: none; margin: 0; } figure, tr { break-inside: avoid; } }
"""


def kept_together(text: str) -> str:
    """A short text that breaks no line, and figures that break it only between them."""
    if len(text) <= SHORT:
        return text.replace(" ", NO_BREAK) if LABEL_OPENS not in text else text
    return FIGURE_GAP.sub(NO_BREAK, text) if text[:1].isdigit() else text


def html_table(table: Table, label: str) -> str:
    """A table; cells that say `label` are marked."""
    head, lines = table

    def cell(text: str) -> str:
        mark = ' class="projected"' if label in text else ""
        return f"<td{mark}>{escape(kept_together(text))}</td>"

    wide = ' class="wide"' if len(head) > WIDE else ""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "\n".join(f"<tr>{''.join(cell(text) for text in line)}</tr>" for line in lines)
    return (
        f'<div class="scroll"><table{wide}>\n<thead><tr>{names}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def html_list(entries: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(entry)}</li>" for entry in entries) + "\n</ul>"


def html_figure(picture: Picture) -> str:
    data = base64.b64encode(picture.svg).decode()
    alt = escape(f"{picture.title}. {picture.caption}", quote=True)
    return (
        f'<figure id="{picture.name}"><img src="data:image/svg+xml;base64,{data}" alt="{alt}">\n'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def section(title: str, *parts: str) -> str:
    return "\n".join([f"<section>\n<h2>{escape(title)}</h2>", *parts, "</section>"])


def page(
    comparison: Comparison,
    title: str,
    lead: str,
    label: str,
    tables: dict[str, tuple[str, Table]],
    pictures: Sequence[Picture],
    notes: dict[str, Sequence[str]],
) -> str:
    """The page.

    Args:
        label: what marks cells that were not measured.
        tables: by title, with a sentence each. notes: by title; empty ones are left out.
    """
    parts = []
    for name, (sentence, table) in tables.items():
        parts.append(section(name, f"<p>{escape(sentence)}</p>", html_table(table, label)))
    drawn = [section(picture.title, html_figure(picture)) for picture in pictures]
    told = [section(name, html_list(entries)) for name, entries in notes.items() if entries]
    commands = [report["command"] for report in comparison.reports]
    code = "\n".join(f"<p><code>{escape(command)}</code></p>" for command in commands)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>\n</head>",
            f'<body>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>',
            # The answer first, then pictures, then everything else
            parts[0],
            *drawn,
            *parts[1:],
            *told,
            section("How it was measured", code),
            "</body>\n</html>\n",
        ]
    )
