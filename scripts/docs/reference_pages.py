"""Pages of the reference that are made from the code: commands, HTTP, metrics, methods, lint rules, Gaudi, models."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from lantern_hpu.models.files.names import Given


def write_all(folder: Path) -> None:
    """Write each page; one that has not changed is left alone, so that a second build is short."""
    os.environ["COLUMNS"] = "100"
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in (
        ("commands", commands()),
        ("http", http()),
        ("metrics", metrics()),
        ("methods", methods()),
        ("lint-rules", lint_rules()),
        ("gaudi-contract", gaudi_contract()),
        ("models-by-device", models_by_device()),
    ):
        file, text = folder / f"{name}.md", "\n".join(page) + "\n"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def commands() -> Iterator[str]:
    """The help of each command."""
    from lantern_hpu.cli import COMMANDS, module_of

    yield from ("# Commands", "")
    yield "`lantern-hpu COMMAND` and `python -m lantern_hpu COMMAND` are the same. Exit codes: 0, or 2 after an error."
    for name, about in COMMANDS.items():
        main, shown = import_module(module_of(name)).main, io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            main(["--help"])
        yield from ("", f"## {name}", "", f"{about[0].upper()}{about[1:]}.", "")
        yield from ("```text", shown.getvalue().rstrip(), "```")


def http() -> Iterator[str]:
    """Paths and types of the server, from its OpenAPI schema."""
    from lantern_hpu.serve.app import make_app
    from lantern_hpu.serve.options import ServeOptions

    schema = make_app(ServeOptions(), lambda: None).openapi()  # type: ignore[arg-type,return-value]
    yield from ("# HTTP", "")
    yield "A running server has this as `/openapi.json`, and a page to try it at `/docs`."
    yield from ("", "## Paths", "")
    rows = [
        (
            f"`{method.upper()} {path}`",
            first_line(operation.get("description") or operation["summary"]),
        )
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]
    yield from table(("path", "what it does"), rows)
    for name, about in sorted(schema["components"]["schemas"].items()):
        if "properties" not in about:
            continue
        yield from ("", f"## {name}", "", about.get("description", ""), "")
        needed = about.get("required", [])
        fields = [
            (
                f"`{field}`",
                kind(value),
                "yes" if field in needed else default(value),
                meaning(value),
            )
            for field, value in about["properties"].items()
        ]
        yield from table(("field", "type", "required or default", "meaning"), fields)


def first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def kind(value: Mapping[str, Any]) -> str:
    """The type of a field: `integer`, `string or null`, the name of a schema."""
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2]
    if "anyOf" in value:
        return " or ".join(kind(each) for each in value["anyOf"])
    if "enum" in value or "const" in value:
        return ", ".join(f"`{each}`" for each in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        return f"list of {kind(value['items'])}"
    return str(value.get("type", "any"))


def default(value: Mapping[str, Any]) -> str:
    return f"`{json.dumps(value['default'])}`" if value.get("default") is not None else ""


def meaning(value: Mapping[str, Any]) -> str:
    ends = {"minimum": "at least", "maximum": "at most", "maxLength": "at most (characters)"}
    limits = [f"{word} {value[key]}" for key, word in ends.items() if key in value]
    return "; ".join([*([str(value["description"])] if "description" in value else []), *limits])


def metrics() -> Iterator[str]:
    """What `/metrics` has."""
    from lantern_hpu.serve.metrics import Metrics

    yield from ("# Metrics", "")
    yield "`GET /metrics`, in Prometheus' format; each has the label `model_name`."
    yield "Names that vLLM has mean what they mean there."
    families = list(Metrics("model").registry.collect())
    rows = [(f"`{family.name}`", family.type, family.documentation) for family in families]
    yield from ("", *table(("name", "type", "what"), rows))


def methods() -> Iterator[str]:
    """The table of methods and of published relaxations, and the named trees."""
    from lantern_hpu.methods.relaxation import PRESETS
    from lantern_hpu.methods.setting import METHODS
    from lantern_hpu.tree import load_static
    from lantern_hpu.tree.named import NAMED
    from scripts.docs.tree_diagrams import as_text

    yield from ("# Methods, presets and trees", "", "## Methods", "")
    rows = [
        (
            f"`{name}`",
            method.about,
            "a drafter" if method.needs_drafter else "nothing",
            "yes" if method.relaxation is None else "no",
            "yes" if method.relaxes else "no",
        )
        for name, method in METHODS.items()
    ]
    yield from table(
        ("method", "what it does", "needs", "lossless by default", "can be relaxed"), rows
    )
    yield from ("", "## Presets of `--relax`", "")
    yield from table(
        ("preset", "rule", "values"),
        [(f"`{name}`", r.rule, f"`{json.dumps(r.as_json())}`") for name, r in PRESETS.items()],
    )
    yield from ("", "## Draft trees", "")
    yield "Each line is a node, named by the ranks of the siblings on its path from the root."
    for name in NAMED:
        yield from ("", f"### {name}", "", "```text", as_text(load_static(name)), "```")


def lint_rules() -> Iterator[str]:
    """The rules of `lantern-hpu lint`."""
    from gaudi_emulator.lint.rules import RULES

    yield from ("# Lint rules", "")
    yield "What `lantern-hpu lint` finds in code for Gaudi."
    yield "The severity inside a capture, where it differs, stands in brackets."
    rows = [
        (
            rule.id,
            rule.name,
            rule.severity + ("" if rule.captured == rule.severity else f" ({rule.captured})"),
            rule.why,
            rule.instead,
        )
        for rule in RULES.values()
    ]
    yield from ("", *table(("rule", "name", "severity", "why", "instead"), rows))


def gaudi_contract() -> Iterator[str]:
    """Flags that are set on a Gaudi, facts of its bridge, and what its emulator leaves out."""
    from gaudi_emulator import scope
    from gaudi_emulator.facts import FACTS
    from lantern_hpu.backends.hpu.env import RELEASES

    yield from (
        "# Gaudi's contract",
        "",
        "What this project holds to, by release of Gaudi's PyTorch bridge:",
        "",
    )
    yield from (f"- {release.name}: {release.source}" for release in RELEASES.values())
    yield from ("", "## Flags", "")
    yield from table(
        ("flag", "value", "why", "another value", "release, mode"), sorted(gaudi_flags())
    )
    yield from (
        "",
        "## Facts",
        "",
        "Each is asked by `lantern-hpu verify`; the source is a file of the bridge.",
        "",
    )
    rows = [
        (f.name, f.source, "lazy" if f.lazy else "eager and compile", f.only or "both")
        for f in FACTS
    ]
    yield from table(("fact", "source", "mode", "release"), rows)
    yield from ("", "## What the emulator leaves out", "")
    yield from ("Below `habana_frameworks.torch`; its use is refused.", "")
    names = [(f"`{m}.{n}`", why) for m, known in scope.NAMES.items() for n, why in known.items()]
    names += [(f"`{module}`", why) for module, why in scope.WHOLE.items()]
    names += [(f"`torch.ops.hpu.*{part}*`", why) for part, why in scope.OPERATORS.items()]
    yield from table(("name", "what to use while checking"), names)


def gaudi_flags() -> Iterator[tuple[str, ...]]:
    """(flag, value, why, what another value does, where it is set) of both releases and modes."""
    from lantern_hpu.backends.hpu.env import RECIPE_CACHE, RELEASES, VARIABLE, prepare_flags

    places: dict[tuple[str, ...], list[str]] = {}
    for release in RELEASES:
        for mode, kind in (("hpu_graph", "lazy"), ("compile", "compile")):
            with mock.patch.dict(os.environ, {VARIABLE: release}):
                settings = prepare_flags(mode, emulate=True, environ={"WORLD_SIZE": "2"}).settings
            for flag in settings:
                value = "a folder" if flag.name == RECIPE_CACHE else flag.value
                row: tuple[str, ...] = (f"`{flag.name}`", value, flag.why, flag.otherwise)
                places.setdefault(row, []).append(f"{release} {kind}")
    for key, where in places.items():
        yield *key, ", ".join(where) if len(where) < 4 else "all"


DEVICES = {"cpu": "CPU", "cuda": "NVIDIA GPU", "hpu": "Intel Gaudi"}
NOT_RUN = "This backend has not been run on a card yet."


def models_by_device() -> Iterator[str]:
    """The one command that serves each known model on each device, and the memory that it takes."""
    from lantern_hpu.zoo.registry import entries

    yield from (
        "# Models by device",
        "",
        "The one command for each known model. First, once, on the machine:",
        "",
    )
    yield from (
        "```bash",
        'pip install "lantern-hpu[models,serve]"',
        "lantern-hpu download NAME",
        "```",
        "",
    )
    yield "The embedded model, `builtin`, needs no download: `lantern-hpu serve --device DEVICE`. Add"
    yield "`--host 0.0.0.0 --api-key KEY` to answer other machines. To draw to a file instead:"
    yield '`lantern-hpu generate --model NAME --device DEVICE --prompt "a red apple" --output apple.png`, for'
    yield 'class models with `--class-label goldfish`. GLM-Image needs `pip install "lantern-hpu[glm,serve]"`.'
    yield ""
    yield "Memory is counted, not measured: by `lantern-hpu plan NAME`, in bfloat16, with the default method, for"
    yield "1 and for 8 images at a time. A server holds caches for each of its methods; fewer `--methods` take less."
    yield "The formats were loaded as small synthetic copies; no published weight has been loaded yet."
    for device, title in DEVICES.items():
        yield from ("", f"## {title}", "")
        yield from (NOT_RUN, "") if device != "cpu" else ()
        rows = [
            (
                f"`{name}`",
                *(memory_of(name, device, images) for images in (1, 8)),
                f"`{device_command(name, device)}`",
            )
            for name in entries()
        ]
        yield from table(("model", "1 image", "8 images", "command"), rows)


def device_command(name: str, device: str) -> str:
    """What serves a known model on a device."""
    return f"lantern-hpu serve --model {name} --device {device}"


def memory_of(name: str, device: str, images: int) -> str:
    """Of a known model, as `plan` counts it."""
    from lantern_hpu.decode.memory import DeviceMemory, peak
    from lantern_hpu.plan.requirements import find_model, setup_of
    from lantern_hpu.results.tables import amount

    model = find_model(name, Given())
    how = {"batch_size": images, "guidance": model.guided, "quantize": None, "keep_text": "host"}
    where = DeviceMemory(None, "a table", is_host=device == "cpu")
    setup = setup_of(model, where, "bfloat16", None, None, **how)
    return amount(peak(model.config, setup))
