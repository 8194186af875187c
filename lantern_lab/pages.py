"""Pages of measurements: jinja2 templates in the product's assets; HTML that loads nothing from elsewhere."""

from __future__ import annotations

from typing import Any

from lantern_hpu.errors import needing
from lantern_hpu.files import ASSETS
from lantern_hpu.results.tables import Table


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
    environment.filters["readable"] = readable
    environment.filters["markdown"] = Table.markdown
    return environment.get_template(template).render(values)
