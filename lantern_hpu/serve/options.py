"""What a server is started with, and what its requests may say. Needs no torch."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from lantern_hpu.backends import DeviceOptions
from lantern_hpu.core import Sampling
from lantern_hpu.errors import Arg, OptionError, choices, require, words
from lantern_hpu.fields import check_ranges, option
from lantern_hpu.methods.relaxation import PRESETS
from lantern_hpu.methods.setting import AUTO, Setting
from lantern_hpu.models.files.names import PartOverrides

# Each makes the step's graph larger, and so is asked for
FILTERS = ("greedy", "top_k", "top_p", "logprobs", *PRESETS)
# Served by default: the fastest here, a lossless method that needs no drafter, and the plain one
DEFAULT = (AUTO, "scd", "ar")
PREFIX = r"(/[\w.~-]+)*"  # a path in front of the server's own
MAX_N = 10  # images of a request, as OpenAI has it
MAX_PROMPT = 4000  # characters
SGLANG = Sampling(1.0)  # what SGLang Diffusion asks of the program that draws for it: no filter
MAX_BODY = 1 << 17  # bytes; two prompts in the longest spelling of JSON have 96,000


@dataclass(frozen=True)
class ServeOptions:
    """How a server serves.

    Attributes:
        methods: settings, by whose methods requests name them; the first is the default. Empty: `DEFAULT`.
        allow: of `FILTERS`, besides what the model's sampling and a method's relaxation use.
        sizes: height and width of the pictures that requests may ask for, of a model that draws many; the first is the
            default. Empty: the model's own.
        forwarded_allow_ips: addresses or networks of proxies whose `X-Forwarded-*` are believed, besides those on this
            machine; `*` is any.
        allow_host: names that the Host header of a request may have besides `localhost` and addresses; `*` is any.
    """

    model: str = option("builtin", "model name, Hub id, folder or weights file")
    served_model_name: tuple[str, ...] = option(
        (), "names of the model for requests, the first for answers (its own)", metavar="NAME"
    )
    given: PartOverrides = field(default_factory=PartOverrides)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    methods: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    slots: int = option(8, "images per batch, for each method", low=1, high=256)
    queue: int = option(64, "queued images, before requests get status 429", low=1)
    timeout: float = option(300.0, "time limit per image in seconds, queueing included")
    shutdown: float = option(
        60.0,
        "time limit in seconds to finish running images after SIGTERM",
        name="shutdown_timeout",
        low=0,
    )
    keep_alive: float = option(
        75.0, "seconds that a connection without requests stays open", low=1, high=3600
    )
    root_path: str = option(
        "",
        "path at which a proxy has the server, if it sends no X-Forwarded-Prefix",
        metavar="/PATH",
    )
    forwarded_allow_ips: tuple[str, ...] = ()
    api_key: str | None = None
    allow_host: tuple[str, ...] = ()
    sglang: bool = option(
        False, "serve GLM-Image's tokens to SGLang Diffusion at /generate, and no pictures"
    )
    sources: int = option(0, "maximum pictures per edit (0: edits off)", low=0, high=16)
    upload_mib: int = option(64, "maximum upload size in MiB", low=1, high=1024)
    upload_timeout: float = option(
        60.0, "time limit in seconds for a request with pictures to arrive", low=1, high=3600
    )
    model_sampling: bool = option(
        False, "draw for SGLang with the model's own sampling settings, not those that it sends"
    )

    @property
    def settings(self) -> list[Setting]:
        """What is served."""
        return [Setting.parse(text) for text in self.methods or DEFAULT]

    def __post_init__(self) -> None:
        for text in self.methods:
            Setting.parse(text)
        for name in self.allow:
            if name not in FILTERS:
                what = words(Arg("allow"), f"has {name!r}")
                raise OptionError(what, hint=choices(FILTERS, name))
        check_ranges(self)
        if not re.fullmatch(PREFIX, self.root_path):
            raise OptionError(words(Arg("root_path"), f"is {self.root_path!r}"), hint="/lantern")
        for address in self.forwarded_allow_ips:
            try:
                ipaddress.ip_network("0.0.0.0/0" if address == "*" else address)
            except ValueError as error:
                what = words(Arg("forwarded_allow_ips"), f"has {address!r}")
                raise OptionError(what, "no address or network", "10.0.0.0/8") from error
        require(self.timeout > 0, "timeout", self.timeout, "above 0 seconds")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            why = "a header carries printable ASCII without spaces alone"
            what = words(Arg("api_key"), "cannot be sent by clients")
            raise OptionError(what, why, "letters and digits")
        unsent = {"api_key": "key (LANTERN_HPU_API_KEY is one too)", "sources": "pictures"}
        for name, thing in unsent.items():
            if self.sglang and getattr(self, name):
                what = words(Arg(name), "cannot be used with", Arg("sglang"))
                raise OptionError(what, f"SGLang sends no {thing}", "leave it out")
        without = {"model_sampling": "sglang", "upload_mib": "sources", "upload_timeout": "sources"}
        for name, other in without.items():
            if getattr(self, name) != getattr(ServeOptions, name) and not getattr(self, other):
                raise OptionError(words(Arg(name), "has no effect without", Arg(other)))
        if self.device.keep_text == "free":
            why = "prompts come as long as the server runs"
            what = words(Arg("keep_text", "free"), "cannot be served")
            raise OptionError(what, why, "auto, host or device")
