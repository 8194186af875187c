"""Image tokenizers as they were published: LlamaGen's, and Meta's VQGAN of Chameleon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lantern_hpu.errors import Arg, WeightsError, words
from lantern_hpu.files import reported_as
from lantern_hpu.models.config import TransformerConfig, VQConfig
from lantern_hpu.models.files.checkpoint import Checkpoint, Stored
from lantern_hpu.models.vq import fsq_table

# Of Emu3's: what reads pictures, and counters of its norms
ENCODING_ONLY = ("encoder.", "quant_conv.", "num_batches_tracked")
FSQ = (8, 8, 8, 5, 5, 5)  # levels of a digit of Cosmos's codes
# Counters, losses, running averages
TRAINING_ONLY = ("quantize.codebook_used", "loss.", "ema_")
# Emu3's own names of its decoder (BAAI/Emu3-VisionTokenizer), and transformers'
EMU3_NAMES = (
    (r"^decoder\.mid\.attn_1\.norm\.", "decoder.middle_block.attn_norm."),
    (r"^decoder\.mid\.", "decoder.middle_block."),
    (r"^decoder\.up\.", "decoder.up_block.up."),
    (r"\.attn\.(\d+)\.norm\.", r".attn_norms.\1."),
    (r"\.(q|k|v)\.(weight|bias)$", r".\1_proj.\2"),
    (r"\.proj_out\.(weight|bias)$", r".out_proj.\1"),
)
# What Meta's files call the blocks of the middle, and their kinds elsewhere
MIDDLE = {"block_1": "0", "attn_1": "1", "block_2": "2"}
KINDS = {"block": "res", "attn": "attn"}
# Tensors without which there is no decoder, and no table of codes
NEEDED = {"decoder.conv_in.weight": "decoder", "quantize.embedding.weight": "table of codes"}


def open_vq(checkpoint: Checkpoint, normalised: bool) -> tuple[VQConfig, Stored]:
    """LlamaGen's VQ-16 or VQ-8, or the VQGAN of Chameleon with its decoder: sizes by its tensors' shapes, and weights.

    Args:
        normalised: whether codes are used at length 1, as LlamaGen's are.
    """
    with reported_as(f"{checkpoint.path} does not describe a model"):
        if "decoder.mid.block_1.norm1.conv_y.weight" in checkpoint:
            checkpoint = of_emu3(checkpoint)
        checkpoint = checkpoint.within("model.", "vqmodel.", "vq_model.")
        if "decoder.middle_block.block_1.conv1.weight" in checkpoint:
            return open_video_vq(checkpoint)
        if "decoder.conv_in.0.conv3d.weight" in checkpoint:
            return open_cosmos(checkpoint)
        if any(".mid.block_1." in name for name in checkpoint.shapes):
            checkpoint = of_taming(checkpoint)
        lacks = [part for name, part in NEEDED.items() if name not in checkpoint]
        if lacks:
            why = f"it has no {' and no '.join(lacks)}, so codes cannot become pictures"
            what = f"{checkpoint.path} is not a whole VQ tokenizer"
            raise WeightsError(what, why, words(Arg("vq"), "with a whole one"))
        levels = checkpoint.count("encoder.conv_blocks.")
        config = sizes_of(
            checkpoint,
            checkpoint.shapes["encoder.conv_in.weight"][0],
            [f"encoder.conv_blocks.{i}.res.0.conv1.weight" for i in range(levels)],
            res_blocks=checkpoint.count("encoder.conv_blocks.0.res."),
            z_channels=checkpoint.shapes["quant_conv.weight"][1],
            normalize_codebook=normalised,
            attention=f"encoder.conv_blocks.{levels - 1}.attn.0.norm.weight" in checkpoint,
        )
        return config, Stored(checkpoint, ignored=TRAINING_ONLY)


def sizes_of(
    checkpoint: Checkpoint, channels: int, levels: Sequence[str], **others: Any
) -> VQConfig:
    """Sizes of a tokenizer by its codes, and a tensor of each level; other sizes are given by name."""
    multipliers = tuple(checkpoint.shapes[name][0] // channels for name in levels)
    codes, code_dim = checkpoint.shapes["quantize.embedding.weight"]
    return VQConfig(channels, multipliers, code_dim=code_dim, codebook_size=codes, **others)


def open_video_vq(checkpoint: Checkpoint) -> tuple[VQConfig, Stored]:
    """Emu3's and MoVQGAN, which lacks time; the encoder is left aside."""
    levels = checkpoint.count("decoder.up_block.up.")
    blocks = [f"decoder.up_block.up.{i}.block.0.conv2.weight" for i in range(levels)]
    config = sizes_of(
        checkpoint,
        checkpoint.shapes[blocks[0]][0],
        blocks,
        res_blocks=checkpoint.count("decoder.up_block.up.0.block.") - 1,
        z_channels=checkpoint.shapes["decoder.conv_in.weight"][1],
        normalize_codebook=False,
        attention=f"decoder.up_block.up.{levels - 1}.attn.0.q_proj.weight" in checkpoint,
        kind="video" if checkpoint.count("decoder.time_conv.") else "movq",
    )
    return config, Stored(checkpoint, ignored=(*ENCODING_ONLY, *TRAINING_ONLY))


def open_cosmos(checkpoint: Checkpoint) -> tuple[VQConfig, Stored]:
    """NVIDIA's Cosmos for one frame: the taps of each convolution over time are summed, the codes computed."""
    named = checkpoint.rewritten([(r"\.norm\.(weight|bias)$", r".\1"), (r"\.conv3d\.", ".")])
    flat = Checkpoint(
        named.path,
        {name: s[:2] + s[3:] if len(s) == 5 else s for name, s in named.shapes.items()},
        lambda name: t.sum(2) if (t := named.read(name)).dim() == 5 else t,
    ).with_tensor("quantize.embedding.weight", fsq_table(FSQ))
    levels = flat.count("decoder.up.")
    norms = [f"decoder.up.{i}.block.0.norm2.weight" for i in range(levels)]
    finest = flat.shapes[norms[0]][0]
    z, code_dim = flat.shapes["post_quant_conv.weight"][:2]
    if finest % 2 or code_dim != len(FSQ):
        raise ValueError(f"it has {finest} channels, codes of {code_dim} digits")
    config = sizes_of(
        flat,
        finest // 2,
        norms,
        res_blocks=flat.count("decoder.up.0.block.") - 1,
        z_channels=z,
        groups=1,
        normalize_codebook=False,
        attention=False,
        kind="cosmos",
    )
    ignored = ("inv_quant.", "unpatcher3d.", "mid.attn_1.1.q.", "mid.attn_1.1.k.")
    unused = (f"decoder.up.{i}.upsample.conv1." for i in range(1, levels) if i != levels - 2)
    return config, Stored(flat, ignored=(*ignored, *unused))


def check_vq(config: VQConfig, target: TransformerConfig, pixels: int, path: Path) -> None:
    """Raise a WeightsError unless a tokenizer has the target's codes, of that many pixels."""
    if config.codebook_size != target.codes:
        why = f"it has {config.codebook_size} codes, the target draws {target.codes}"
    elif config.downsample != pixels:
        why = f"a code of it is {config.downsample} pixels wide, the target's are {pixels}"
    else:
        return
    hint = words(Arg("vq"), "with its own")
    raise WeightsError(f"the tokenizer {path} is for another target", why, hint)


def of_emu3(checkpoint: Checkpoint) -> Checkpoint:
    """The authors' tokenizer by transformers' names; their projections are 1 x 1 convolutions, here matrices."""

    def is_matrix(name: str) -> bool:
        return name.startswith("decoder.") and name.endswith("_proj.weight")

    def read(name: str) -> Tensor:
        return named.read(name).flatten(1) if is_matrix(name) else named.read(name)

    named = checkpoint.rewritten(EMU3_NAMES)
    shapes = {name: s[:2] if is_matrix(name) else s for name, s in named.shapes.items()}
    return Checkpoint(checkpoint.path, shapes, read)


def of_taming(checkpoint: Checkpoint) -> Checkpoint:
    """Meta's vqgan.ckpt or a Hugging Face copy by the names of `VQModel`; its decoder counts from the finest level."""
    bare = checkpoint.rewritten([(r"^(model\.)?(vqmodel\.)?(vqvae\.)?", "")])
    levels = bare.count("encoder.down.")

    def ours(name: str) -> str:
        match name.split("."):
            case ["encoder" | "decoder" as part, "mid", block, *rest]:
                return ".".join([part, "mid", MIDDLE.get(block, block), *rest])
            case ["encoder", "down", level, kind, *rest]:
                return ".".join(["encoder", "conv_blocks", level, KINDS.get(kind, kind), *rest])
            case ["decoder", "up", level, kind, *rest]:
                place = str(levels - 1 - int(level))
                return ".".join(["decoder", "conv_blocks", place, KINDS.get(kind, kind), *rest])
        return name

    return bare.renamed(ours)
