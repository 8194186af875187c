"""Models that are large against the memory of a machine are never held twice while they are loaded.

Their files are sparse: of real names and shapes, and of no bytes on the disk.
"""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from lantern_hpu.models.config import ModelConfig
from lantern_hpu.zoo.registry import entries
from tests.checkpoints.emu35 import TOKENS
from tests.checkpoints.language_models import write_words

Shapes = dict[str, tuple[int, ...]]
# Runs in a process of its own: VmData has what is allocated, and what is mapped of the files
LOADED = """
import resource, sys, torch
from pathlib import Path
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.model import Placement
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.zoo.find import find_parts

folder, device, room = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch.zeros(64, 64) @ torch.zeros(64, 64)
lines = Path("/proc/self/status").read_text().splitlines()
used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
if device == "meta":
    placement = Placement(torch.bfloat16, torch.device("meta"))
    target = open_model(find_parts(folder, optional=("vq",))).load(placement).target
else:
    pipeline = LanternPipeline.from_pretrained(folder, device="cpu", dtype="bfloat16", pictures=False)
    target = pipeline.model.target
print(sum(p.numel() for p in target.parameters()))
"""


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    sizes, name = config.target, f"model.layers.{layer}."
    dim, inner = sizes.dim, sizes.ffn_dim
    return {
        f"{name}input_layernorm.weight": (dim,),
        f"{name}self_attn.q_proj.weight": (sizes.width, dim),
        f"{name}self_attn.k_proj.weight": (sizes.kv_width, dim),
        f"{name}self_attn.v_proj.weight": (sizes.kv_width, dim),
        f"{name}self_attn.o_proj.weight": (dim, sizes.width),
        f"{name}self_attn.q_norm.weight": (sizes.head_dim,),
        f"{name}self_attn.k_norm.weight": (sizes.head_dim,),
        f"{name}post_attention_layernorm.weight": (dim,),
        f"{name}mlp.gate_proj.weight": (inner, dim),
        f"{name}mlp.up_proj.weight": (inner, dim),
        f"{name}mlp.down_proj.weight": (dim, inner),
    }


def write_sparse(file: Path, shapes: Shapes) -> int:
    """Zeros in bfloat16. -> their bytes"""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as output:
        output.write(struct.pack("<Q", len(text)) + text)
        output.truncate(8 + len(text) + end)
    return end


def write_model(folder: Path, config: ModelConfig, layers: int) -> int:
    """A folder of shards with as many layers. -> the bytes of its tensors"""
    sizes = config.target
    assert sizes.embed_rows is not None
    table = (sizes.embed_rows, sizes.dim)
    shapes: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (sizes.dim,)}
    for layer in range(layers):
        shapes |= layer_shapes(config, layer)
    rest: Iterator[tuple[str, tuple[int, ...]]] = iter((shapes | {"lm_head.weight": table}).items())
    shards = list(iter(lambda: dict(islice(rest, 64)), {}))
    folder.mkdir()
    about = {"model_type": "Emu3", "num_attention_heads": sizes.heads, "head_dim": sizes.head_dim}
    (folder / "config.json").write_text(json.dumps(about))
    write_words(folder / "text", TOKENS, {})
    files = [
        folder / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    return sum(write_sparse(file, shard) for file, shard in zip(files, shards, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory otherwise")
@pytest.mark.parametrize(
    ("name", "layers", "device"), [("emu3.5-image", 64, "meta"), ("u0-4b", 6, "cpu")]
)
def test_it_is_not_held_twice(tmp_path: Path, name: str, layers: int, device: str) -> None:
    """On its way to a device nothing but what is mapped; in the native form of a processor once, and one matrix."""
    config = entries()[name].config
    stored = write_model(tmp_path / name, config, layers)
    table = 2 * config.target.dim * config.target.vocab_size
    kept = 0 if device == "meta" else stored - 2 * config.target.dim * 282926 + table
    room = stored + kept + table + (1 << 28)
    command = [sys.executable, "-c", LOADED, str(tmp_path / name), device, str(room)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 0
