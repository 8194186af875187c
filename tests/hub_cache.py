"""A Hugging Face cache of a test's own, and files as huggingface_hub lays them out there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lantern_hpu.zoo.registry import KnownModel

T2I, C2I, ANOLE = "llamagen-t2i-256", "llamagen-c2i-b-256", "anole-7b"


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Hugging Face cache of our own."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    return tmp_path / "home" / "hub"


def in_cache(hub: Path, repo: str, *files: str, revision: str = "a" * 40) -> Path:
    """Files of a repository as huggingface_hub lays them out."""
    store = hub / ("models--" + repo.replace("/", "--"))
    folder = store / "snapshots" / revision
    for name in files:
        blob = store / "blobs" / hashlib.sha256(name.encode()).hexdigest()
        for place in (blob.parent, folder, store / "refs"):
            place.mkdir(parents=True, exist_ok=True)
        blob.write_text(name)
        (folder / name).symlink_to(blob)
    (store / "refs" / "main").write_text(revision)
    return folder


def whole(hub: Path, entry: KnownModel, *roles: str) -> None:
    for role in roles or entry.parts:
        part = entry.parts[role]
        in_cache(hub, part.repo, *(spec.split("|")[0] for spec in part.files))
