"""Serve a model over HTTP, as OpenAI's images endpoint does.

lantern-hpu serve

curl http://127.0.0.1:8000/v1/images/generations --json '{"prompt": "a red apple"}'
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from lantern_hpu import __version__
from lantern_hpu.backends import DeviceOptions, prepare
from lantern_hpu.commands import options
from lantern_hpu.commands.options import Parser, add_fields, from_args
from lantern_hpu.console import log_to_stderr, nonblocking_stderr
from lantern_hpu.errors import Arg, OptionError, exit_code, require, words
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.serve.options import FILTERS, ServeOptions

# Keys of a configuration file, or variables: what few servers need, and no option of the command line
KEYS = (
    *("served_model_name", "timeout", "shutdown_timeout", "keep_alive"),
    *("allow_host", "forwarded_allow_ips", "root_path"),
    *("upload_mib", "upload_timeout", "model_sampling"),
    *("image_size", "keep_text", "kernels", "layout"),
)


def make_parser() -> Parser:
    more = f"Keys of --config alone, or variables LANTERN_HPU_...: {', '.join(KEYS)} (docs/serving.md)."
    parser = Parser("lantern-hpu serve", description="Serve a model over HTTP.", epilog=more)
    where = parser.add_argument_group("where")
    add = where.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=8000, help="(8000)")
    key = "bearer token that clients must send (LANTERN_HPU_API_KEY, else none)"
    add("--api-key", help=key)
    more = "host names to accept besides localhost and IP addresses; * accepts any"
    add("--allow-host", metavar="NAME,...", help=more)
    more = "proxies besides those on this machine whose X-Forwarded-* headers count; * is any"
    add("--forwarded-allow-ips", metavar="IP,...", help=more)
    add_fields(where, ServeOptions, "root_path", "keep_alive")
    what = parser.add_argument_group("what")
    add_fields(what, ServeOptions, "model", "served_model_name")
    options.add_method_options(what, "the fastest here, scd and ar; the first is the default")
    add = what.add_argument
    extra = f"extra sampling options and relaxations that requests may use: {', '.join(FILTERS)}"
    more = "each slows every step; options of the model's default settings are always allowed"
    add("--allow", help=f"{extra}; {more}")
    sizes = "pictures that requests may ask for, the first is the default (the model's own)"
    add("--sizes", metavar="WxH,...", help=sizes)
    add_fields(what, ServeOptions, "sources", "sglang", "model_sampling")
    much = parser.add_argument_group("how much")
    add_fields(
        much, ServeOptions, "slots", "queue", "timeout", "shutdown", "upload_mib", "upload_timeout"
    )
    processes = "server processes through Ray, one per card (1: without Ray)"
    much.add_argument("--replicas", type=int, default=1, help=processes)
    how = parser.add_argument_group("how it runs")
    add_fields(how, PartOverrides)
    options.add_device_options(how)
    options.add_running_options(how)
    parser.add_argument("--version", action="version", version=f"lantern_hpu {__version__}")
    parser.only_keys(*KEYS)
    return parser


def serve_request(args: argparse.Namespace) -> ServeOptions:
    require(0 <= args.port <= 65535, "port", args.port, "0 (any that is free) to 65535")
    require(1 <= args.replicas <= 1024, "replicas", args.replicas, "1 to 1024")
    made = {
        "given": from_args(PartOverrides, args),
        "device": from_args(DeviceOptions, args),
        "methods": options.names(args.method, "method"),
        "allow": options.names(args.allow, "allow"),
        "sizes": picture_sizes(args.sizes),
        "allow_host": (args.host, *options.names(args.allow_host, "allow_host")),
        "forwarded_allow_ips": options.names(args.forwarded_allow_ips, "forwarded_allow_ips"),
        "api_key": args.api_key,
    }
    return from_args(ServeOptions, args, **made)


def picture_sizes(text: str | None) -> tuple[tuple[int, int], ...]:
    """Height and width of each of a comma-separated list of WIDTHxHEIGHT."""
    result = []
    for name in dict.fromkeys(options.names(text, "sizes")):
        read = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", name)
        if read is None:
            what = words(Arg("sizes"), f"has {name!r}")
            raise OptionError(what, "width x height in pixels", "1024x768")
        result.append((int(read[2]), int(read[1])))
    return tuple(result)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)

    def command() -> int:
        asked = serve_request(args)
        if args.replicas > 1:
            from lantern_hpu.serve.process import serve_replicas

            serve_replicas(asked, args.host, args.port, args.replicas)
            return 0
        prepare(asked.device.device, asked.device.graphs)
        from lantern_hpu.serve.process import serve

        return serve(asked, args.host, args.port)

    with nonblocking_stderr(), log_to_stderr():
        return exit_code(command, parser.spell)
