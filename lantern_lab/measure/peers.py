"""A step of LlamaGen-XL's sizes by this package and by programs that processors are served with, in one run.

    python -m lantern_lab.measure.peers --environment peers --output peers.json

Each program runs in a process of its own, with the same sizes, random bfloat16 weights (or those of 8 or 4 bits that
its name says), two rows (guidance), 300 positions known of each, and logits of all tokens. They take turns, as a
shared machine's speed drifts, and the least of all steps counts; what a program does to forget the step before is not
timed. This package is measured limited to lesser instruction sets, too. The others come into environments of their
own, which are made where they are missing: `torch` with `transformers`; `llama-cpp-python` with `gguf`, which is
compiled for this processor; and `optimum-intel`, which exports transformers' model to OpenVINO. One that cannot be
installed or run is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

COUNTS = (1, 3, 5, 9, 17)  # tokens a row
ROWS, KNOWN, CAPACITY, ROUNDS = 2, 300, 448, 9
WIDTH, LAYERS, HEADS, FFN, VOCABULARY = 1280, 36, 20, 3456, 16384
PACKAGES = {
    "transformers": ("torch==2.13.0", "transformers"),
    "llama.cpp": ("numpy", "gguf", "llama-cpp-python"),
    "openvino": ("torch==2.13.0", "optimum-intel"),
}
# This package, and the instruction set that it is limited to; one that the processor lacks is left out
OWN = {
    "lantern_hpu": "",
    "lantern_hpu int8": "",
    "lantern_hpu int4": "",
    "lantern_hpu without tiles": "avx512_bf16",
    "lantern_hpu int8 without tiles": "avx512_vnni",
    "lantern_hpu int4 without tiles": "avx512_vnni",
    "lantern_hpu int8 without VNNI": "avx512",
    "lantern_hpu on AVX2": "avx2",
}


def least_ms(
    step: Callable[[int], object], forget: Callable[[], object] = lambda: None
) -> dict[int, float]:
    """By tokens a row; the first step of each number is not counted.

    Args:
        forget: called before each step, untimed; it leaves the `KNOWN` positions alone in the cache.
    """
    result = {}
    for count in COUNTS:
        forget()
        step(count)
        times = []
        for _ in range(ROUNDS):
            forget()
            began = time.perf_counter()
            step(count)
            times.append(time.perf_counter() - began)
        result[count] = 1000 * min(times)
    return result


# ------------------------------------------------------------------------------------ the programs


def own(form: str) -> dict[int, float]:
    """With bfloat16 weights, or such of `int8` or `int4`."""
    import torch
    from torch import nn

    from lantern_hpu.backends.cpu import native
    from lantern_hpu.models.config import TransformerConfig
    from lantern_hpu.models.transformer import Target
    from lantern_hpu.ops.kv_cache import KVCache
    from lantern_hpu.ops.quantized import quantized_layer, replace_layers

    sizes: dict[str, Any] = {"layers": LAYERS, "heads": HEADS, "ffn_dim": FFN}
    config = TransformerConfig(VOCABULARY, WIDTH, **sizes, prefix=120, grid=(16, 16))
    with torch.no_grad():
        target = Target(config).to(torch.bfloat16).requires_grad_(False)
        for weight in target.parameters():
            weight.normal_(std=0.02)
        if form:
            replace_layers(target, nn.Linear, partial(quantized_layer, form=form))
        native.pack_model([target])
    cache = KVCache.allocate(
        LAYERS, ROWS, CAPACITY, HEADS, WIDTH // HEADS, torch.bfloat16, torch.device("cpu"), True
    )
    place = torch.arange(CAPACITY)

    @torch.no_grad()
    def step(count: int) -> None:
        new = KNOWN + torch.arange(count)
        hidden = (place > new[:, None]).expand(ROWS, 1, count, CAPACITY).bfloat16()
        index = (torch.arange(ROWS)[:, None] * CAPACITY + new).flatten().int()
        x = torch.randn(ROWS, count, WIDTH).bfloat16()
        rope = torch.randn(ROWS, count, 2, WIDTH // HEADS // 2).bfloat16()
        mask = hidden * torch.finfo(torch.bfloat16).min
        target.head(target(x, rope, mask, cache, index))

    return least_ms(step)


def random_llama() -> Any:
    """transformers' model with random bfloat16 weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=CAPACITY,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def by_transformers(folder: Path) -> dict[int, float]:
    import torch
    from transformers import DynamicCache

    model, cache = random_llama(), DynamicCache()

    @torch.no_grad()
    def step(count: int) -> None:
        model(torch.zeros(ROWS, count, dtype=torch.long), past_key_values=cache)

    def forget() -> None:
        if (new := cache.get_seq_length() - KNOWN) > 0:
            cache.crop(-new)

    step(KNOWN)
    return least_ms(step, forget)


def write_gguf(file: Path, kind: str) -> None:
    """Random matrices in a format of llama.cpp."""
    import gguf
    import numpy as np

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(CAPACITY)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, *shape: int) -> None:
        values = random.standard_normal(shape, np.float32) * np.float32(0.02)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            return
        form = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, form), raw_dtype=form)

    add("token_embd.weight", VOCABULARY, WIDTH)
    add("output.weight", VOCABULARY, WIDTH)
    add("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", WIDTH, WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}.weight", FFN, WIDTH)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, FFN)
        add(f"blk.{layer}.attn_norm.weight", WIDTH)
        add(f"blk.{layer}.ffn_norm.weight", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_llama_cpp(folder: Path, kind: str = "BF16") -> dict[int, float]:
    import llama_cpp as lib

    file = folder.with_name(f"llama-{kind}.gguf")
    if not file.exists():
        write_gguf(file, kind)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
    about = lib.llama_context_default_params()
    about.n_ctx, about.n_seq_max, about.n_batch = ROWS * CAPACITY, ROWS, ROWS * KNOWN
    about.n_threads = about.n_threads_batch = os.cpu_count() or 1
    context = lib.llama_init_from_model(model, about)
    batch = lib.llama_batch_init(ROWS * KNOWN, 0, 1)

    def run(count: int, known: int) -> None:
        for row in range(ROWS):
            for place in range(count):
                one = row * count + place
                batch.token[one], batch.pos[one] = 1, known + place
                batch.n_seq_id[one], batch.seq_id[one][0], batch.logits[one] = 1, row, True
        batch.n_tokens = ROWS * count
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")

    def forget() -> None:
        memory = lib.llama_get_memory(context)
        for row in range(ROWS):
            lib.llama_memory_seq_rm(memory, row, KNOWN, -1)

    run(KNOWN, 0)
    return least_ms(lambda count: run(count, KNOWN), forget)


def by_openvino(folder: Path) -> dict[int, float]:
    """Exported by optimum-intel with its cache as state; bfloat16 weights, arithmetic and cache, one thread a core."""
    from tempfile import TemporaryDirectory

    import numpy as np

    sys.modules["torchvision"] = None  # type: ignore[assignment]  # its CUDA build fails beside a CPU torch
    from optimum.intel import OVModelForCausalLM

    settings = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
        "INFERENCE_NUM_THREADS": os.cpu_count(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    with TemporaryDirectory(dir=folder.parent) as files:
        random_llama().save_pretrained(files)
        model = OVModelForCausalLM.from_pretrained(
            files, export=True, load_in_8bit=False, ov_config=settings
        )
        model.compile()
    request = model.request

    def run(count: int, known: int) -> None:
        positions = np.tile(np.arange(known, known + count), (ROWS, 1))
        request.infer(
            {
                "input_ids": np.zeros_like(positions),
                "attention_mask": np.ones((ROWS, known + count), np.int64),
                "position_ids": positions,
                "beam_idx": np.arange(ROWS, dtype=np.int32),
            }
        )

    run(KNOWN - 1, 0)
    states = [(state, state.state) for state in request.query_state()]

    def forget() -> None:
        for state, kept in states:
            state.state = kept
        run(1, KNOWN - 1)  # makes room for the next positions, so that no step does

    return least_ms(lambda count: run(count, KNOWN), forget)


PEERS: dict[str, Callable[[Path], dict[int, float]]] = {
    "transformers": by_transformers,
    "llama.cpp": by_llama_cpp,
    "llama.cpp Q8_0": partial(by_llama_cpp, kind="Q8_0"),
    "llama.cpp Q4_0": partial(by_llama_cpp, kind="Q4_0"),
    "openvino": by_openvino,
}


# ------------------------------------------------------------------------------------ a run


def measure(name: str, environment: Path) -> dict[str, float]:
    """One program in a process of its own, which is installed first. -> milliseconds by tokens a row"""
    python = sys.executable
    if name not in OWN:
        program = name.partition(" ")[0]
        python = str(environment / program / "bin" / "python")
        if not Path(python).exists():
            subprocess.run([sys.executable, "-m", "venv", environment / program], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES[program]], check=True)
    command = [python, __file__, "--peer", name, "--environment", str(environment)]
    limit = OWN.get(name, "")
    there = {**os.environ, "LANTERN_HPU_ISA": limit} if limit else None
    said = subprocess.run(command, env=there, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("lantern_lab.measure.peers", description=__doc__)
    parser.add_argument(
        "--environment", type=Path, default=Path("peers"), help="folder of the others' environments"
    )
    parser.add_argument("--output", type=Path, default=Path("peers.json"))
    parser.add_argument("--only", default=",".join([*OWN, *PEERS]), help="comma-separated")
    parser.add_argument("--turns", type=int, default=3, help="of each program")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.peer:
        peer = PEERS.get(args.peer)
        words = args.peer.split()
        form = next((word for word in words if word in ("int8", "int4")), "")
        found = own(form) if peer is None else peer(args.environment / "llama")
        print(json.dumps(found))
        return 0
    from lantern_hpu.backends import host
    from lantern_hpu.backends.cpu import native

    result: dict[str, dict[str, float]] = {}
    for name in args.only.split(",") * args.turns:
        try:
            now = measure(name, args.environment)
        except subprocess.CalledProcessError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        result[name] = {n: min(ms, result.get(name, now)[n]) for n, ms in now.items()}
        print(name, " ".join(f"{ms:.1f}" for ms in now.values()), flush=True)
    processor = {"processor": host.processor_name(), "native_decoder": native.isa()}
    report = {**processor, "ms": result, "counts": COUNTS}
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
