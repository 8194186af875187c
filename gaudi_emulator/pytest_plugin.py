"""A test suite on an emulated Gaudi: `pytest --hpu`, or tests that take the fixture `hpu`. Loading this loads no torch.

The summary names what each test violates, and `--hpu-strict` puts it into the exit code. All run on one card, as in one
process; what a test warmed up or repeated is not held against the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import gaudi_emulator
from gaudi_emulator.lint import lint_counts, refuses
from gaudi_emulator.releases import EmulatorError
from gaudi_emulator.report import line, reason

if TYPE_CHECKING:
    from gaudi_emulator.device import Device

Found = tuple[str, str, bool]  # a finding, the rule's reason, and whether `--hpu-strict` refuses it
CARD = pytest.StashKey["Device"]()
BEFORE = pytest.StashKey[
    tuple[int, list[Found]]
]()  # what the card did and what was found, by imports for example


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("hpu", "emulated Gaudi").addoption
    add("--hpu", action="store_true", help="run on an emulated Gaudi and report violated rules")
    about = "the same, with exit code 1 on what `gaudi-emulator lint --strict` refuses"
    add("--hpu-strict", action="store_true", help=about)
    add("--hpu-bridge", metavar="RELEASE", help="release of Gaudi's software (1.24)")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything of the suite imports the vendor's package."""
    asked = early_config.known_args_namespace
    if asked.hpu or asked.hpu_strict:
        try:
            gaudi_emulator.install(asked.hpu_bridge).differential = True
        except EmulatorError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Summary(config.option), "gaudi_emulator.summary")


@pytest.fixture
def hpu(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The emulated card: the one of `--hpu`, else one for this test."""
    stash = request.node.stash
    if CARD in stash:
        yield stash[CARD]
        return
    with gaudi_emulator.emulate(request.config.option.hpu_bridge) as card:
        card.differential = True
        stash[CARD], stash[BEFORE] = card, (0, [])
        yield card


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.option.hpu or item.config.option.hpu_strict:
        card = gaudi_emulator.install()
        found = taken(card)
        item.stash[CARD], item.stash[BEFORE] = card, (work(card), found)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """A test's last report carries what was found, also from another process."""
    outcome: Any = yield
    if call.when == "teardown" and CARD in item.stash:
        card, (before, outside) = item.stash[CARD], item.stash[BEFORE]
        found = {"outside of tests": outside, item.nodeid: taken(card)}
        outcome.get_result().hpu = {"found": found, "ran": work(card) > before}


def taken(card: Device) -> list[Found]:
    """What was found since the last call. What follows is judged by itself."""
    from gaudi_emulator.graphs import abandoned_on_error  # which loads torch

    with abandoned_on_error(card):
        card.end()
    new = [f for f in card.findings.new() if f.severity != "info"]
    card.begin()
    return [(line(f), reason(f.rule, f.releases), refuses(f)) for f in new]


def work(card: Device) -> int:
    """How much a card has done."""
    return sum(lint_counts([card]).values())


class Summary:
    """What was found, by test."""

    def __init__(self, asked: Any) -> None:
        self.strict, self.asked = asked.hpu_strict, asked.hpu or asked.hpu_strict
        self.ran = 0  # tests, on the device
        self.found: list[tuple[str, Found]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = getattr(report, "hpu", {"found": {}, "ran": False})
        self.ran += told["ran"]
        self.found += [(name, tuple(one)) for name, found in told["found"].items() for one in found]

    @property
    def refused(self) -> int:
        return sum(refused for _, (*_, refused) in self.found)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.strict and not session.exitstatus and (self.refused or not self.ran):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.asked and not self.found:
            return
        terminalreporter.section("emulated Gaudi")
        lines = [f"{name}: {text}" for name, (text, *_) in self.found]
        reasons = dict.fromkeys(why for _, (_, why, _) in self.found)
        ran = f"{self.ran} tests ran on hpu" if self.ran else "nothing ran on hpu"
        for text in (
            *lines,
            *reasons,
            f"{len(lines)} findings, {self.refused} refused by --hpu-strict; {ran}",
        ):
            terminalreporter.write_line(text)
