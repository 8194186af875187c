"""`/docs`: the OpenAPI schema as one page of HTML that asks no other server for anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

Schema = Mapping[str, Any]
HEAD = Path(__file__).parent / "api_page.html"


def api_page(schema: Schema) -> str:
    """Each path with what it takes and answers, then the fields of each object."""
    head = HEAD.read_text().rstrip()
    return head + "".join([*paths(schema["paths"]), *objects(schema["components"]["schemas"])])


def paths(found: Mapping[str, Mapping[str, Schema]]) -> Iterator[str]:
    """What draws, then what only answers."""
    for path, methods in sorted(found.items(), key=lambda item: "post" not in item[1]):
        for method, about in methods.items():
            text = about.get("description", about.get("summary", ""))
            yield f"<h2>{method.upper()} {escape(path)}</h2><p>{prose(text)}</p><table>"
            yield row("body", content(about.get("requestBody", {})), "")
            for status, answer in about["responses"].items():
                yield row(status, content(answer), prose(answer.get("description", "")))
            yield "</table>"


def content(holder: Schema) -> str:
    """What a body or an answer is, by media type."""
    parts = (type_words(media.get("schema", {})) for media in holder.get("content", {}).values())
    return ", ".join(part for part in parts if part)


def objects(schemas: Mapping[str, Schema]) -> Iterator[str]:
    for name, schema in schemas.items():
        text = prose(schema.get("description", ""))
        yield f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{text}</p><table>'
        for field, about in schema.get("properties", {}).items():
            usual = f" ({json.dumps(about['default'])})" if about.get("default") is not None else ""
            yield row(field, type_words(about), prose(about.get("description", "") + usual))
        yield "</table>"


def type_words(schema: Schema) -> str:
    """A type in words, with a link where it is an object of the page."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(type_words(one) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return escape(", ".join(json.dumps(value) for value in values))
    kind = str(schema.get("type", ""))
    return f"list of {type_words(schema.get('items', {}))}" if kind == "array" else kind


def prose(text: str) -> str:
    """A description, with its `code`."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def row(name: str, kind: str, text: str) -> str:
    return f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{text}" if kind or text else ""
