"""The parts of a model: what their files are called, and what a folder says of them. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lantern_hpu.errors import Arg, OptionError, WeightsError, words
from lantern_hpu.fields import argument_name, option
from lantern_hpu.files import ASSETS, file_in, reading, reported_as, sha256
from lantern_hpu.models.config import ModelConfig, T5Config

BUILTIN = ASSETS / "builtin"
# A folder of our own; see `load.py`
CONFIG = "model.json"
TARGET, DRAFTER_WEIGHTS, VQ = "target.safetensors", "drafter.safetensors", "vq.safetensors"
VISION = "vision.safetensors"
DRAFTER = "drafter.json"  # next to the weights of a drafter in a folder of its own
TOKENIZER = "tokenizer.json"
# Containers of weights
SAFE = ".safetensors"
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
# Of transformers' Trainer and accelerate: files next to the weights that are none
TRAINER = r"(optimizer|scheduler|scaler|sampler|rng_state|training_args)(_\d+)?"
SCRIPT = ".jit"  # TorchScript, of which tensors alone are read
# Of what holds no plain weights: models for llama.cpp, and adapters of PEFT and diffusers
GGUF = ".gguf"
ADAPTERS = ("adapter_config", "adapter_model", "pytorch_lora_weights")
# Of our own folders with smaller matrices, in `model.json`
QUANTIZED_AS = {name: {"format": name, "version": 1} for name in ("int8", "int4")}
# Of GPTQ's layout: the endings of its tensors, and values of `quantization_config` that are read, the first where it
# has none; the second checkpoint format has the zeros themselves, not less 1
GPTQ_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
GPTQ_KEYS: dict[str, tuple[Any, ...]] = {
    "quant_method": ("gptq", "auto-round", "intel/auto-round"),
    "bits": (4,),
    "group_size": (128, 64, 32),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "packing_format": ("auto_round:auto_gptq",),
    "data_type": ("int",),
}
# What quantised copies have in their tensors' names; the first that matches counts
QUANTISED = {
    "bitsandbytes": r"\.(SCB|absmax|quant_map)$|\.quant_state\.",
    "GPTQ": r"\.g_idx$",
    "AWQ": r"\.qweight$",
    "HQQ": r"\.W_q$",
    "EXL2": r"\.q_weight$",
    "quanto": r"\.weight\._(data|scale)$",
    "compressed-tensors": r"\.weight_(packed|zero_point)$",
    "FP8 with scales": r"\.(weight_scale|weight_scale_inv|input_scale|scale_weight)$|^scaled_fp8$",
    "MLX": r"\.scales$",
}
# What programs end the names of files with until they are whole
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".download", ".aria2", ".tmp")
AGAIN = "download it again, or copy the files that links lead to (cp -rL)"
LORA = r"\.(lora|hada|lokr|ia3)_|\.base_layer\."
MERGE = "merge it with PEFT (merge_and_unload, save_pretrained), and load the result"

CODE_PIXELS = 16  # along a code, in every published model


@dataclass(frozen=True)
class Parts:
    """Paths of the parts of a model; None where there is none."""

    name: str
    source: str  # what `model` takes to find it again
    target: Path  # a file, or a folder
    drafter: Path | None = None
    vq: Path | None = None
    text: Path | None = None  # text encoder, or tokenizer
    pixels: Path | None = None  # a pipeline of diffusers that makes pictures of tokens
    image_size: int | None = None
    sampling: dict[str, Any] | None = None
    # Parts that may be missing: `vq` for tokens alone, `text` where no prompt is read
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartOverrides:
    """Parts that the user named on their own."""

    drafter: str | None = option(None, "path of a drafter: published, or from `lantern-hpu train`")
    vq: str | None = option(None, "path of the VQ image tokenizer", metavar="FILE")
    text: str | None = option(
        None,
        "path of the T5 encoder, or of the text tokenizer",
        name="text_encoder",
        metavar="PATH",
    )
    image_size: int | None = option(
        None, "image size in pixels, for checkpoints that do not state it"
    )

    def __post_init__(self) -> None:
        size = self.image_size
        if size is not None and (size <= 0 or size % CODE_PIXELS):
            why = f"allowed: multiples of {CODE_PIXELS}"
            raise OptionError(words(Arg("image_size"), f"is {size}"), why, "256, 384 or 512")

    def resolved(self) -> PartOverrides:
        """The same parts by paths that hold from anywhere."""
        paths = {n: os.path.abspath(path) for n, path in self.paths().items()}
        return replace(self, **paths)  # type: ignore[arg-type]

    def paths(self) -> dict[str, Path]:
        return {n: given_path(p) for n in ARGUMENTS if (p := getattr(self, n)) is not None}


# Those that are paths, as errors name them
ARGUMENTS = {p.name: argument_name(p) for p in fields(PartOverrides) if p.name != "image_size"}


def given_path(text: str) -> Path:
    """A path as users give it: `~` is the home, and the Hub cache's folder of a repository is its main version."""
    with reported_as(f"{text!r:.60} is not a path"):  # of a home whose name no user can have
        path = Path(os.path.expanduser(text))
    if not path.name.startswith("models--") or not (path / "snapshots").is_dir():
        return path
    ref, versions = path / "refs" / "main", sorted((path / "snapshots").iterdir())
    if ref.is_file():
        return file_in(path / "snapshots", ref.read_text().strip())
    return versions[0] if versions else path / "snapshots"


def is_weights(path: Path) -> bool:
    """Whether a name is that of a model's weights: not what a trainer or an adapter leaves, or begins with a dot."""
    known = path.suffix in (SAFE, *PICKLES, SCRIPT) and not path.name.startswith(".")
    return known and path.stem not in ADAPTERS and not re.fullmatch(TRAINER, path.stem)


def series_of(path: Path) -> list[str]:
    """The names of all files of a series such as model-00001-of-00002.safetensors; none where it is not of one."""
    found = re.fullmatch(r"(.+-)(\d{1,5})(-of-)(\d{1,5})(\.\w+)", path.name)
    if found is None:
        return []
    stem, number, of, count, ending = found.groups()
    return [f"{stem}{i:0{len(number)}d}{of}{count}{ending}" for i in range(1, int(count) + 1)]


def indexed_files(index: Path) -> dict[str, Path]:
    """The file of each tensor, by an index of the Hugging Face layout."""
    with reading(index, "download it again") as content:
        places = content["weight_map"].items()
        return {str(name): file_in(index.parent, file) for name, file in places}


def weights_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if is_weights(file) and file.is_file())


def folder_of(path: Path) -> Path:
    """A checkpoint's folder, whether it is the folder or a file in it."""
    return path if path.is_dir() else path.parent


def settings_beside(path: Path, name: str = "config.json") -> dict[str, Any]:
    """What a JSON file in a checkpoint's folder holds; empty where there is none."""
    file = folder_of(path) / name
    if not file.is_file():
        return {}
    with reading(file) as result:
        return result


def how_to_renew(folder: Path) -> str:
    return "install the package again" if folder == BUILTIN else "convert or copy it again"


def read_config(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """`model.json` of a folder whose files are all there, and its sizes."""
    with reading(folder / CONFIG) as description:
        config = ModelConfig.from_json(description)
        if not isinstance(description["files"], dict):
            raise ValueError("its files have no checksums")
        missing = [name for name in description["files"] if not file_in(folder, name).is_file()]
    if missing:
        hint = how_to_renew(folder)
        raise WeightsError(f"files are missing in {folder}", ", ".join(missing), hint)
    return description, config


def quantized_in(folder: Path, config: dict[str, Any]) -> str | None:
    """The smaller format of the matrices, by `model.json`; a WeightsError unless it is of this version."""
    found = config.get("quantized")
    if found is None:
        return None
    for name, stated in QUANTIZED_AS.items():
        if found == stated:
            return name
    stated = found if isinstance(found, dict) else {"format": found}
    theirs, *ours = (
        f"{x.get('format')} of version {x.get('version')}" for x in (stated, *QUANTIZED_AS.values())
    )
    what = f"{folder} has matrices in the format {theirs}"
    raise WeightsError(what, f"this version reads {' and '.join(ours)}", "convert the model again")


def check_sums(folder: Path, config: dict[str, Any]) -> None:
    """Raise a WeightsError unless each file has the checksum that `model.json` has of it."""
    for name, digest in config["files"].items():
        if sha256(folder / name) != digest:
            why = "its checksum differs from the one in model.json: damaged, cut off, or another version"
            raise WeightsError(f"{folder / name} cannot be used", why, how_to_renew(folder))


def with_text(config: ModelConfig, folder: Path | None) -> ModelConfig:
    """The same with the sizes of its T5 in this folder, or in the one it notes; without them where that is not here."""
    if config.condition.kind != "t5":
        return config
    if folder is not None:
        condition = replace(config.condition, text=str(folder.resolve()))
        config = replace(config, condition=condition)
    file = Path(config.condition.text or "") / "config.json"
    if not os.path.isfile(file):  # a name too long for a file is none
        return config
    with reading(file, "download it again") as result:
        return replace(config, text=T5Config.from_json(result))


# ---------------------------------------------------------------------- quantised copies and adapters


def gptq_in(path: Path, names: Collection[str]) -> dict[str, Any] | None:
    """What `quantization_config` says of tensors in GPTQ's layout, None of others; a WeightsError if it is not read."""
    stated = settings_beside(path).get("quantization_config")
    if not isinstance(stated, dict) or not any(name.endswith(GPTQ_PARTS[0]) for name in names):
        return None
    for key, known in GPTQ_KEYS.items():
        if stated.get(key, known[0]) not in known:
            why = f"{key} is {stated[key]}, where {' or '.join(map(str, known))} is read"
            by = stated.get("quant_method", "GPTQ")
            raise quantised(path, f"{by} in a way that is not read", why)
    return stated


def check_plain(path: Path, names: Collection[str]) -> None:
    """Raise a WeightsError where tensors of these names are a quantised copy, or an adapter's."""
    for method, what in QUANTISED.items():
        if any(re.search(what, name) for name in names):
            stated = settings_beside(path).get("quantization_config")
            known = stated if isinstance(stated, dict) else {}
            raise quantised(path, known.get("quant_method", method))
    changed = {re.split(LORA, name)[0] for name in names if re.search(LORA, name)}
    if any(".base_layer." in name or name.removesuffix(".weight") in changed for name in names):
        raise WeightsError(f"{path} holds a model and a LoRA adapter", "they are not merged", MERGE)
    if changed:
        raise adapter(path)


def check_folder(folder: Path) -> None:
    """Raise a WeightsError where a folder without weights of a model has those of an adapter, a model for llama.cpp, or
    a part of them: links to nothing, or downloads that broke off."""
    for file in sorted(folder.iterdir()):
        if is_weights(Path(file.stem if file.suffix in UNFINISHED else file.name)):
            if file.suffix in UNFINISHED:
                raise WeightsError(f"{file} is not a whole file", "its download broke off", AGAIN)
            if file.is_symlink() and not file.exists():
                why = f"it is a link to {os.readlink(file)}, which is not there"
                raise WeightsError(f"{file} cannot be read", why, AGAIN)
    if adapters_in(folder):
        raise adapter(folder)
    for file in sorted(folder.glob(f"*{GGUF}")):
        raise quantised(file, "llama.cpp (GGUF)")


def adapters_in(folder: Path) -> list[str]:
    """Names of the files of an adapter."""
    return sorted(file.name for file in folder.iterdir() if file.stem in ADAPTERS)


def quantised(
    path: Path, method: str, why: str = "its tensors are packed or scaled numbers, not the weights"
) -> WeightsError:
    hint = "the model's own copy in bfloat16, float16 or float32"
    return WeightsError(f"{path} is quantised by {method}", why, hint)


def adapter(path: Path) -> WeightsError:
    base = settings_beside(path, "adapter_config.json").get("base_model_name_or_path")
    what = f"{path} is a LoRA adapter of {base or 'a model'}"
    return WeightsError(what, "it holds changes to a model, not the model", MERGE)
