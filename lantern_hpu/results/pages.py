"""Pages of measurements: jinja2 templates in `assets`, HTML that needs no script, font or picture from elsewhere."""

from __future__ import annotations

import base64
import re
from typing import Any

from lantern_hpu.errors import needing
from lantern_hpu.files import ASSETS
from lantern_hpu.results.tables import Table

SHORT, NO_BREAK = 20, "\N{NO-BREAK SPACE}"
INNER_GAP = re.compile(r"(?<!,) ")  # a space that does not follow a comma


def kept_together(text: str) -> str:
    """A cell of a table: a short text breaks no line, and figures break it only between them."""
    if len(text) <= SHORT:
        return text.replace(" ", NO_BREAK)
    return INNER_GAP.sub(NO_BREAK, text) if text[:1].isdigit() else text


def readable(value: Any) -> str:
    """A number with as many digits as it needs."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def render_page(template: str, **values: Any) -> str:
    """A page from a template, a file in `assets`; values in `.html` are escaped."""
    with needing("jinja2", "it lays out the page", "compare"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters["kept_together"] = kept_together
    environment.filters["readable"] = readable
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    environment.filters["markdown"] = Table.markdown
    return environment.get_template(template).render(values)
