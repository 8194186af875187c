"""What all tests share; the tiny model is in `tiny.py`, the slow twin of the decoder in `twin.py`."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only cost
# Tests draw on the processor: those for a card carry its marker, and name it
os.environ["LANTERN_HPU_DEVICE"] = "cpu"
# Neighbour tables and tuned trees of tests are nobody's.
os.environ["LANTERN_HPU_CACHE"] = tempfile.mkdtemp(prefix="lantern-hpu-tests-")

import pytest
import torch

from lantern_hpu.backends.cpu import native
from lantern_lab.measure import rows as tuning
from tests.marks import mostly_slow

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline
    from tests.tiny import Models

torch.set_num_threads(1)
tuning.LEAST_STEP, tuning.MOST_SPREAD = 0.0, math.inf  # the machine of a test may be busy


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What a test sets in the environment, as a command does with a device's flags, or tunes, the next one does not
    find."""
    before = dict(os.environ)
    yield
    shutil.rmtree(Path(before["LANTERN_HPU_CACHE"]) / "trees", ignore_errors=True)
    for name in {*os.environ} - {*before, "PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({k: v for k, v in before.items() if k != "PYTEST_CURRENT_TEST"})


@pytest.fixture(scope="module")
def all_cores() -> Iterator[None]:
    """For tests of the embedded model, whose tensors are not tiny: this process's share of the cores."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of random weights."""
    from tests.folder import write_folder

    return write_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def models() -> Models:
    """A tiny target and its drafter, without files."""
    from tests.tiny import tiny_models

    return tiny_models()


@pytest.fixture(scope="module")
def pipeline(model: Path) -> LanternPipeline:
    """The tiny model on the processor."""
    from lantern_hpu.pipeline import LanternPipeline

    return LanternPipeline.from_pretrained(str(model))


@pytest.fixture(scope="session")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every published format, small; tests only read it."""
    pytest.importorskip("transformers")
    from tests.checkpoints.synthetic import write_all
    from tests.folder import made_once

    return made_once(tmp_path_factory, "public", write_all)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that no worker begins one when the others are done."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["LANTERN_HPU_CACHE"], ignore_errors=True)


INSTRUCTION_SETS = ("avx512_amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2")


@pytest.fixture(scope="session")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library with tiles in their plain form, for a processor that has none."""
    source = Path(native.__file__).with_name("decoder.c")
    built = tmp_path_factory.mktemp("tiles") / "_decoder.so"
    flags = ("-O1", "-std=gnu11", "-fopenmp", "-ffp-contract=off", "-shared", "-fPIC")
    subprocess.run(["gcc", "-DPLAIN_TILES", *flags, source, "-lm", "-o", built], check=True)
    return native.loaded(built)


@pytest.fixture(params=mostly_slow(INSTRUCTION_SETS, "avx512_bf16", "avx2"))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An instruction set, in use until the test ends: one of this processor, or tiles in their plain form."""
    library, why = native.open_library()
    if library is None:
        pytest.skip(why)
    before, wanted = library.lantern_isa(), request.param.encode()
    used = library
    if not library.lantern_use(wanted):
        if request.param != "avx512_amx" or shutil.which("gcc") is None:
            pytest.skip(f"this processor has no {request.param}")
        used = request.getfixturevalue("tiles")
        if not used.lantern_use(wanted):
            pytest.skip("tiles in their plain form need AVX512-BF16")
        monkeypatch.setattr(native, "open_library", lambda: (used, request.param))
    yield request.param
    library.lantern_use(before)
