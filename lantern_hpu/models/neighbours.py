"""Which codes are close to a code: the neighbours that may lend their mass, computed or published."""

from __future__ import annotations

import hashlib
import io
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lantern_hpu.errors import OptionError, OutputError, WeightsError
from lantern_hpu.files import cache_folder, write_file

CACHED_NEIGHBOURS = 1024  # neighbours kept in the cache: no published setting uses more than 1000
ROUNDED = 0.01  # of a code's length: how far distances by a float32 product of matrices may be off
CHECKED_ROWS = 16  # rows of a published table that are compared with the codebook


def nearest_codes(codebook: Tensor, k: int, chunk: int = 1024) -> Tensor:
    """The k nearest other codes of each code, by L2 distance of the raw rows, nearest first.

    Distances are computed in float64 and equal ones ordered by code, so that every device gets the same
    table.

    Args:
        codebook: [V, dim].
        k: 1 to V - 1.

    Returns [V, k] int32; no code is its own neighbour.

    Raises:
        OptionError: k is out of range.
    """
    size = len(codebook)
    if not 0 < k < size:
        why = f"a codebook of {size} allows 1 to {size - 1}"
        raise OptionError(f"{k} neighbours were asked for", why)
    rows = codebook.detach().cpu().double()
    result = []
    for start in range(0, size, chunk):
        distance = code_distances(rows, torch.arange(start, min(start + chunk, size)))
        result.append(distance.sort(dim=-1, stable=True).indices[:, :k])
    return torch.cat(result).int()


def code_distances(codebook: Tensor, index: Tensor) -> Tensor:
    """L2 distance of some codes [n] to all others, infinite to themselves: [n, V]."""
    exact = "donot_use_mm_for_euclid_dist"
    result = torch.cdist(codebook[index], codebook, compute_mode=exact)  # [n, V]
    result[torch.arange(len(index)), index] = float("inf")
    return result


# ------------------------------------------------------------------------------------ the cache


def kept_nearest(codebook: Tensor, k: int) -> Tensor:
    """`nearest_codes`, from the cache if this codebook's table is there; it is put there otherwise.

    Where nothing can be written the table is computed every time.
    """
    rows = codebook.detach().cpu().float().contiguous()
    width = min(max(k, CACHED_NEIGHBOURS), len(rows) - 1)
    digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:32]
    file = cache_folder() / "neighbours" / f"{digest}-{width}.npy"
    if file.is_file():
        try:
            return torch.from_numpy(np.load(file, allow_pickle=False)[:, :k].copy())
        except (OSError, ValueError):
            file.unlink(missing_ok=True)  # damaged: made anew
    table, content = nearest_codes(rows, width), io.BytesIO()
    np.save(content, table.numpy(), allow_pickle=False)
    with suppress(OutputError):
        write_file(file, content.getvalue(), force=True)
    return table[:, :k].contiguous()


# ------------------------------------------------------------------------------------ published tables


def open_table(path: Path) -> np.ndarray:
    """A published table, mapped: row x lists the other codes, nearest first. A folder may hold it.

    Raises:
        WeightsError: no table there, unreadable, or not a table of numbers.
    """
    if path.is_dir():
        files = sorted(path.glob("top_*_indices.npy"))
        if len(files) != 1:
            raise WeightsError(f"{path} holds {len(files)} neighbour tables, expected one")
        path = files[0]
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise WeightsError(f"cannot read the neighbours in {path}", str(error)) from error
    if table.ndim != 2 or table.dtype.kind not in "iu":
        why = f"it is {list(table.shape)} of {table.dtype}, expected rows of whole numbers"
        raise WeightsError(f"{path} is not a neighbour table", why)
    return table


def check_table(path: Path, codebook: Tensor) -> str | None:
    """Compare some rows of a published table with the codebook. -> what is to be said of it, if anything

    Distances by a float32 product of matrices, as torch.cdist takes them by default, are wrong by up to a hundredth of
    the codes' length: a table that is sorted but for that is one of this codebook.

    Raises:
        WeightsError: it is of another size or for another codebook, or lists a code as its own neighbour.
    """
    table, size = open_table(path), len(codebook)
    foreign = f"the neighbours in {path} are for another codebook"
    if len(table) != size or table.shape[1] >= size:
        why = f"it is {list(table.shape)}, the codebook has {size} codes"
        raise WeightsError(foreign, why)
    rows = codebook.detach().cpu().double()
    index = torch.linspace(0, size - 1, min(CHECKED_ROWS, size)).long()
    neighbours = torch.from_numpy(table[index.numpy()].astype(np.int64))  # [n, K]
    if bool((neighbours == index[:, None]).any()):
        why = "a code is listed as its own neighbour"
        raise WeightsError(f"the neighbours in {path} cannot be used", why)
    if bool((neighbours < 0).any()) or bool((neighbours >= size).any()):
        raise WeightsError(foreign, "codes beyond it")
    listed = code_distances(rows, index).gather(1, neighbours)  # [n, K], infinite nowhere
    closest = code_distances(rows, index).amin(1, keepdim=True)

    def sorted_within(slack: Tensor) -> bool:  # [n, 1]
        rising = listed[:, 1:] >= listed[:, :-1] - slack - 1e-3 * listed[:, 1:]
        return bool(rising.all() and (listed[:, :1] <= closest * (1 + 1e-3) + slack).all())

    # Published tables come from float32 arithmetic, so near ties may stand the other way round.
    if sorted_within(1e-3 * listed[:, :1].clamp(min=1e-6)):
        return None
    if not sorted_within(ROUNDED * rows[index].norm(dim=1, keepdim=True)):
        raise WeightsError(foreign, "its rows are not sorted by distance in this codebook")
    return f"the neighbours in {path} were sorted by rounded distances: codes that lie close are out of order"


def table_digest(path: Path) -> str:
    """Which table it is: a digest of its size and of some rows."""
    table = open_table(path)
    some = table[:: max(1, len(table) // CHECKED_ROWS), :CACHED_NEIGHBOURS].astype(np.int32)
    return hashlib.sha256(f"{table.shape}".encode() + some.tobytes()).hexdigest()


def read_table(path: Path, k: int) -> Tensor:
    """The first k columns of a published table, whatever whole numbers it is stored as: [V, k] int32.

    Raises:
        OptionError: it has fewer columns.
    """
    table = open_table(path)
    if table.shape[1] < k:
        why = f"{path} lists {table.shape[1]}"
        raise OptionError(f"{k} neighbours were asked for", why, f"--relax-k {table.shape[1] - 1}")
    return torch.from_numpy(table[:, :k].astype(np.int32))
