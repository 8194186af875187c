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

from lantern_hpu.commands.generate import KEYS
from lantern_hpu.errors import as_option
from lantern_hpu.fields import IMAGE_PARAMS
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.results.tables import markdown


def write_all(folder: Path) -> None:
    """Write each page; one that has not changed is left alone, so that a second build is short."""
    os.environ["COLUMNS"] = "100"
    folder.mkdir(parents=True, exist_ok=True)
    pages = (
        commands,
        image_parameters,
        http,
        metrics,
        methods,
        lint_rules,
        gaudi_contract,
        models_by_device,
    )
    for page in pages:
        name, text = page.__name__.replace("_", "-"), "\n".join(page()) + "\n"
        file = folder / f"{name}.md"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown(head, [[cell.replace("|", "\\|") for cell in row] for row in rows])


def commands() -> Iterator[str]:
    from lantern_hpu.cli import COMMANDS, OF_MODELS, module_of

    yield "# Commands\n"
    yield "`lantern-hpu COMMAND` and `python -m lantern_hpu COMMAND` are the same. Exit codes: 0, or 2 after an error."
    for name in (name for first in COMMANDS for name in (first, *OF_MODELS * (first == "models"))):
        main, shown = import_module(module_of(name)).main, io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            main(["--help"])
        yield f"\n## {name}\n\n```text\n{shown.getvalue().rstrip()}\n```"


def image_parameters() -> Iterator[str]:
    """What may be asked of an image, and what it is called on each surface."""
    yield "# Parameters of an image\n"
    yield "The same on the command line, in Python and over HTTP, from one table: `lantern_hpu/fields.py`."
    yield "What has no dashes is a key of `--config`.\n"
    rows = []
    for param in IMAGE_PARAMS.values():
        field = f"`{name}`" if (name := param.name_for("http")) else ""
        option = param.name if param.name in KEYS else param.option
        rows.append((f"`{option}`", f"`{param.name_for('python')}`", field, param.about))
    yield table(("`generate`", "Python", "HTTP", "meaning"), rows)


def http() -> Iterator[str]:
    """Paths and types of the server, from its OpenAPI schema."""
    from lantern_hpu.serve.app import make_app
    from lantern_hpu.serve.options import ServeOptions

    schema = make_app(ServeOptions(), lambda: None).openapi()  # type: ignore[arg-type,return-value]
    yield "# HTTP\n\nA running server has this as `/openapi.json`, and a page to try it at `/docs`.\n\n## Paths\n"
    rows = []
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            about = (operation.get("description") or operation["summary"]).strip().splitlines()[0]
            rows.append((f"`{method.upper()} {path}`", about))
    yield table(("path", "what it does"), rows)
    for name, about in sorted(schema["components"]["schemas"].items()):
        if "properties" in about:
            yield f"\n## {name}\n\n{about.get('description', '')}\n"
            needed = about.get("required", [])
            shown = [
                (f"`{field}`", kind(v), "yes" if field in needed else default(v), meaning(v))
                for field, v in about["properties"].items()
            ]
            yield table(("field", "type", "required or default", "meaning"), shown)


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
    from lantern_hpu.serve.queue import Metrics

    yield "# Metrics\n"
    yield "`GET /metrics`, in Prometheus' format; each has the label `model_name`."
    yield "Metrics that vLLM also has mean the same.\n"
    families = list(Metrics("model", {}).registry.collect())
    rows = [(f"`{family.name}`", family.type, family.documentation) for family in families]
    yield table(("name", "type", "what"), rows)


def methods() -> Iterator[str]:
    """The table of methods and of published relaxations, and the named trees."""
    from lantern_hpu.methods.relaxation import PRESETS
    from lantern_hpu.methods.setting import METHODS
    from lantern_hpu.tree import NAMED, load_static
    from scripts.docs.tree_diagrams import as_text

    yield "# Methods, presets and trees\n\n## Methods\n"
    rows = []
    for name, method in METHODS.items():
        needs = "a drafter" if method.needs_drafter else "nothing"
        lossless = "yes" if method.relaxation is None else "no"
        relaxes = "yes" if method.relaxes else "no"
        rows.append((f"`{name}`", method.about, needs, lossless, relaxes))
    head = ("method", "what it does", "needs", "lossless by default", "can be relaxed")
    yield table(head, rows)
    yield "\n## Published relaxations\n"
    presets = [(f"`{n}`", r.rule, f"`{json.dumps(r.as_json())}`") for n, r in PRESETS.items()]
    yield table(("preset", "rule", "values"), presets)
    yield "\n## Draft trees\n"
    yield "Each line is a node, named by the ranks of the siblings on its path from the root."
    for name in NAMED:
        yield f"\n### {name}\n\n```text\n{as_text(load_static(name))}\n```"


def lint_rules() -> Iterator[str]:
    """The rules of `lantern-hpu lint`."""
    from gaudi_emulator.rules import RULES

    yield "# Lint rules\n\nWhat `lantern-hpu lint` finds in code for Gaudi."
    yield "The severity inside a capture, where it differs, is in brackets.\n"
    rows = []
    for rule in RULES.values():
        why = rule.reason(rule.releases)
        captured = "" if rule.captured == rule.severity else f" ({rule.captured})"
        rows.append((rule.id, rule.name, rule.severity + captured, why, rule.instead))
    yield table(("rule", "name", "severity", "why", "instead"), rows)


def gaudi_contract() -> Iterator[str]:
    """Flags that are set on a Gaudi, facts of its bridge, and what its emulator leaves out."""
    from gaudi_emulator import scope
    from gaudi_emulator.releases import RELEASES
    from lantern_lab.verify.gaudi_facts import FACTS

    yield "# Gaudi's contract\n"
    yield "What this project keeps to, by release of Gaudi's PyTorch bridge:\n"
    yield from (f"- {release.name}: {release.source}" for release in RELEASES.values())
    yield "\n## Flags\n"
    head = ("flag", "value", "why", "another value", "release, mode")
    yield table(head, sorted(gaudi_flags()))
    yield "\n## Facts\n\n`lantern-hpu verify` checks each of them; the source is a file of the bridge.\n"
    modes = {True: "lazy", False: "eager and compile"}
    rows = [(f.name, f.source, modes[f.lazy], f.only or "both") for f in FACTS]
    yield table(("fact", "source", "mode", "release"), rows)
    yield "\n## What the emulator leaves out\n"
    yield "Below `habana_frameworks.torch`; its use is refused.\n"
    listed = [(m, n, why) for m, known in scope.OUT_OF_SCOPE.items() for n, why in known.items()]
    names = [(f"`{m}.{n or '*'}`", why) for m, n, why in listed]
    names += [(f"`torch.ops.hpu.*{part}*`", why) for part, why in scope.OPERATORS.items()]
    yield table(("name", "what to use while checking"), names)


def gaudi_flags() -> Iterator[tuple[str, ...]]:
    """(flag, value, why, what another value does, where it is set) of both releases and modes."""
    from lantern_hpu.backends.hpu import env
    from lantern_hpu.backends.hpu.env import LOGS, PLUGIN, RECIPE_CACHE, RELEASES, prepare_flags

    places: dict[tuple[str, ...], list[str]] = {}
    for release in RELEASES:
        for mode, kind in (("hpu_graph", "lazy"), ("compile", "compile")):
            with mock.patch.object(env, "version_of", {PLUGIN: release}.get):
                settings = prepare_flags(mode, environ={"WORLD_SIZE": "2"}).settings
            for flag in settings:
                value = "a folder" if flag.name in (RECIPE_CACHE, LOGS) else flag.value
                row: tuple[str, ...] = (f"`{flag.name}`", value, flag.why, flag.otherwise)
                places.setdefault(row, []).append(f"{release} {kind}")
    for key, where in places.items():
        yield *key, ", ".join(where) if len(where) < 4 else "all"


DEVICES = {"cpu": "CPU", "cuda": "NVIDIA GPU", "hpu": "Intel Gaudi"}
MODELS_BY_DEVICE = """# Models by device

The one command for each known model. First, once, on the machine, in a clone (no package index has lantern-hpu yet):

```bash
pip install -c constraints.txt -e ".[models,serve]"  # on Gaudi without -c constraints.txt
lantern-hpu models download NAME
```

The embedded model, `builtin`, needs no download: `lantern-hpu serve --device DEVICE`. Add
`--host 0.0.0.0 --api-key KEY` to answer other machines. To draw to a file instead:
`lantern-hpu generate --model NAME --device DEVICE --prompt "a red apple" --output apple.png`, for
class models with `--prompt goldfish`. GLM-Image needs `".[glm,serve]"`.

Memory is counted, not measured: by `lantern-hpu models plan NAME`, in bfloat16, with the default method, for
1 and for 8 images at a time. A server holds caches for each of its methods; fewer `--method` take less.
The formats were loaded as small synthetic copies; no published weight has been loaded yet."""


def models_by_device() -> Iterator[str]:
    """The one command that serves each known model on each device, and the memory that it takes."""
    from lantern_hpu.zoo.registry import entries

    yield MODELS_BY_DEVICE
    for device, title in DEVICES.items():
        yield f"\n## {title}\n"
        if device == "hpu":
            yield "This backend has not been run on a card yet.\n"
        rows = []
        for name in entries():
            amounts = [memory_of(name, device, images) for images in (1, 8)]
            memory = [one.replace(" ", "\u00a0") for one in amounts]  # never in two lines
            rows.append((f"`{name}`", *memory, f"`{device_command(name, device)}`"))
        yield table(("model", "1 image", "8 images", "command"), rows)


def device_command(name: str, device: str) -> str:
    """What serves a known model on a device, or saves what it makes where that is no picture."""
    from lantern_hpu.zoo.registry import entries

    result, where = as_option(entries()[name].config.result), f"--model {name} --device {device}"
    if "--output" in result:
        return f"lantern-hpu serve {where}"
    return f'lantern-hpu generate {where} --prompt "a red apple" {result}'


def memory_of(name: str, device: str, images: int) -> str:
    """Of a known model, as `models plan` counts it."""
    from lantern_hpu.backends.base import load_backend
    from lantern_hpu.decode.memory import DeviceMemory, peak
    from lantern_hpu.decode.requirements import find_model, setup_of
    from lantern_hpu.files import amount

    model = find_model(name, PartOverrides())
    drafting = load_backend(device).drafting_defaults(model.config.target.parameters)
    where = DeviceMemory(None, "a table", is_host=device == "cpu", drafting=drafting)
    setup = setup_of(model, where, "bfloat16", batch_size=images)
    return amount(peak(model.config, setup))
