"""What Gaudi's error messages mean, and what to try: they name a status number where a user needs a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lantern_hpu.errors import Arg, DeviceError, LanternError, Words, shell


@dataclass(frozen=True)
class Known:
    """A message of Gaudi's software.

    Attributes:
        pattern: a regular expression, any case. what: what it means. hint: what to try, with its arguments.
    """

    pattern: str
    what: str
    hint: Words


STATUS = r"(?:synStatus[ =]+|synapse error: )"
DOCTOR = shell("doctor")
DOCTOR_JSON = shell("doctor", Arg("json", True))
LINT = shell("lint", Arg("strict", True))
OTHER_CARD = "`hl-smi` shows who has which card; HABANA_VISIBLE_MODULES=<module id> picks another"


def text_rows(text: str) -> list[list[str]]:
    """A table as text: a line at the margin begins a row, indented ones are its other cells, deeper ones go on."""
    rows = re.split(r"\n(?=\S)", text.strip())
    return [[" ".join(cell.split()) for cell in re.split(r"\n {4}(?=\S)", row)] for row in rows]


# Pattern, meaning, what to try; the first that fits is taken, so the particular stand above.
KNOWN_TEXT = rf"""
device already acquired|{STATUS}20\b
    the Gaudi card is already taken, and a card serves one process
    {OTHER_CARD}
device not found|{STATUS}8\b
    no free Gaudi card was found: all are taken, or the container was given none
    {OTHER_CARD}; a container needs the runtime habana and HABANA_VISIBLE_DEVICES
device in reset|{STATUS}17\b
    the Gaudi card is being reset
    try again in a minute; if it stays so, `dmesg` has the driver's reason
device acquire failed|synDeviceAcquire
    no Gaudi card could be opened; most often each is taken by another process
    {OTHER_CARD}; `{DOCTOR}` checks driver and container
allocation failed for size::|{STATUS}(?:4|14)\b
    the Gaudi card has no memory left
    a smaller batch_size or tree; graphs=hpu_graph_split or graphs=eager; a card of its own
collective nonSFG is not supported
    a collective operation was called while an HPU graph was recorded
    PT_HPU_ENABLE_LAZY_COLLECTIVES=true before Python starts, or one process a card
cpu fallback is not supported during hpu graph capturing
    an operation that Gaudi does not have is called in a function that is recorded
    `{LINT}` names it; graphs=eager runs it on the processor
graph capture already in progress
    an HPU graph is recorded while another one still is; an earlier recording broke off
    start a new process: this one cannot leave the recording; the first error is the cause
capture must end on the (?:same )?stream
    the stream was changed while an HPU graph was recorded
    no torch.hpu.stream(...) inside of what is recorded; start a new process
graph compile failed|synNodeCreate\w* failed|{STATUS}26\b
    Gaudi's compiler could not make a recipe of the graph: an unsupported operation, type or size
    smaller graphs (graphs=hpu_graph_split in lazy mode, else graphs=compile_layers), kernels=plain
        without fused kernels, `{LINT}`; HABANA_LOGS has the node
is not yet supported on HPU
    Gaudi lacks an operation, or lacks it for this type, and PT_HPU_PLACE_ON_CPU forbids the processor
    unset PT_HPU_PLACE_ON_CPU; `{LINT}` lists such operations
trying to cast Long to Int
    in lazy mode Gaudi keeps int64 as int32, and a value does not fit
    find the value above 2**31 - 1, or graphs=compile, where int64 is whole
Compile-time major/minor PyTorch version
    torch was replaced: Gaudi's plugin was built for another version of it
    a fresh Gaudi image, and pip without constraints.txt or a torch version
(?:Stock|Upstream) PyTorch version .* not supported in Lazy mode
    lazy mode, and with it HPU graphs, needs Gaudi's own build of torch
    graphs=compile (with PT_HPU_LAZY_MODE unset), or an image pytorch-installer-*
neither HPU fork nor CPU upstream
    torch is of the wrong flavour: Gaudi's plugin takes its own build (+git, +hpu) or a stock +cpu one
    a fresh Gaudi image, and pip without constraints.txt or a torch version
libhabana_pytorch\S*\.so not found
    Gaudi's plugin lacks the library for this torch and mode
    graphs=compile where libhabana_pytorch_plugin.so is what lacks; else another image
(?:habana|hpu)\S*\.so\S* undefined symbol
    torch was replaced: Gaudi's plugin does not fit the torch that is installed
    a fresh Gaudi image, and pip without constraints.txt or a torch version
lib(?:synapse|habana|hl_|hcl)\S*\.so\S* cannot open shared object
    Gaudi's libraries are not on this machine
    run inside a Gaudi image; see docs/gaudi.md
No module named '?habana_frameworks
    Gaudi's plugin for torch is not installed; it is not on PyPI
    run inside a Gaudi image, see docs/gaudi.md
failed to infer device type
    the plugin or the driver is missing, or their releases differ
    `{DOCTOR}` shows both; the image must be of the driver's release
has no attribute '(?:HPUGraph|wrap_in_hpu_graph\w*|ModuleCacher)'|available in lazy mode only
    Gaudi's software was loaded without lazy mode, and HPU graphs work in lazy mode alone
    PT_HPU_LAZY_MODE=1 before Python starts, or graphs=compile
invalid backend: '?hpu_backend
    Gaudi's compiler is unknown to torch: the plugin is not loaded, or it is in lazy mode
    PT_HPU_LAZY_MODE=0 before Python starts, or graphs=hpu_graph
PT_HPU_RECIPE_CACHE_CONFIG
    this release of Gaudi's software wants another form of PT_HPU_RECIPE_CACHE_CONFIG
    the path alone, which every release takes, or unset it
Flags name: \w+,|Environment flag \w+ is obsolete
    Gaudi's software refuses the value of a flag, or the flag
    unset it; `{DOCTOR}` shows every flag
{STATUS}\d+
    Gaudi's software failed with a status that is not in our list
    HABANA_LOGS has more; please report it with `{DOCTOR_JSON}`
"""


def worded(text: str) -> Words:
    """Words of a text in which `graphs=eager` is an argument."""
    parts = re.split(r"\b(batch_size|(?:graphs|kernels)=\w+)", text)
    words = [part.strip() for part in parts]
    for index in range(1, len(parts), 2):
        name, _, value = parts[index].partition("=")
        words[index] = Arg(name, value or None)
    return Words(*words)


KNOWN = [Known(pattern, what, worded(hint)) for pattern, what, hint in text_rows(KNOWN_TEXT)]


def explain_gaudi(error: BaseException | str) -> DeviceError | None:
    """The error in plain words, or None if it is not known to be Gaudi's. Looks at its causes as well."""
    if isinstance(error, LanternError):
        return None
    messages = [error] if isinstance(error, str) else list(_messages(error))
    for known in KNOWN:
        for message in messages:
            if re.search(known.pattern, message, re.IGNORECASE):
                return DeviceError(known.what, _line(message, known.pattern), known.hint)
    return None


def _messages(error: BaseException | None) -> Iterator[str]:
    """The texts of an error and of what led to it."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


def _line(message: str, pattern: str) -> str:
    lines = [line.strip() for line in message.splitlines()]
    return next((line for line in lines if re.search(pattern, line, re.IGNORECASE)), lines[0])
