"""Small random models of transformers, served on the emulated card as large ones would be on a real one.

Prompts are padded on the left to a few lengths, keys and values are in a static cache, and each step's token, position
and mask are tensors that were allocated once. In lazy mode HPU graphs are wrapped around prompts and steps; outside it
`hpu_backend` compiles the model.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import gaudi_emulator
from gaudi_emulator.lint import Ended, TimeOver, limited
from gaudi_emulator.releases import EmulatorError

if TYPE_CHECKING:
    from gaudi_emulator.device import Device

ROWS = 2  # prompts at a time
ROOM = 32  # positions of the static cache
STEPS = 6  # of decoding after a prompt
# Of the largest logit; bfloat16 makes at most 0.007, a padding that is no longer masked 0.01 to 0.4
ROUNDING = 0.02
WARM_UP = {8: (3, 5), 16: (9, 12)}  # length that prompts are padded to -> theirs
SERVED = {8: (5, 7), 16: (11, 15)}
# Attributes of configurations by the names that transformers has for them. The window is shorter than a prompt
TINY = {
    64: "vocab_size max_position_embeddings",
    48: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim",
    32: "hidden_size d_model word_embed_proj_dim",
    24: "moe_intermediate_size shared_expert_intermediate_size",
    12: "sliding_window",
    8: "head_dim d_kv query_pre_attn_scalar",
    4: "num_attention_heads encoder_attention_heads decoder_attention_heads num_local_experts num_experts",
    2: "num_hidden_layers num_decoder_layers encoder_layers decoder_layers num_key_value_heads num_experts_per_tok "
    "eos_token_id",
    1: "bos_token_id",
    0: "pad_token_id decoder_start_token_id",
}
# What a configuration needs and has no default for
NEEDED = {"chameleon": {"vocabulary_map": {"<image>": 60, "IMGIMGBZ": 61, "IMGIMGCZ": 62}}}


def build_model(asked: str) -> Any:
    """A random model in evaluation mode, on the CPU.

    Args:
        asked: MODEL_TYPE, or MODEL_TYPE:NAME=VALUE:... with numbers and words of its configuration.

    Raises:
        EmulatorError: transformers is missing, has no such language model, or cannot build it so small.
    """
    try:
        import transformers
        from transformers.models.auto import modeling_auto as auto
    except ImportError as error:
        hint = "pip install 'gaudi-emulator[transformers]'"
        raise EmulatorError("--transformers needs transformers", str(error), hint) from error
    classes: dict[str, str] = {
        **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    model_type, *given = asked.split(":")
    if model_type not in classes:
        near = get_close_matches(model_type, classes, 4) or ["llama", "gemma2", "t5"]
        why = f"transformers {transformers.__version__} has no language model of that type"
        raise EmulatorError(f"--transformers is {model_type!r}", why, f"one of {', '.join(near)}")
    values = {n: int(v) if v.isdigit() else v for n, _, v in (one.partition("=") for one in given)}
    make = transformers.AutoConfig.for_model
    torch.manual_seed(0)
    try:
        small = tiny(make(model_type)) | NEEDED.get(model_type, {}) | values
        built = getattr(transformers, classes[model_type])(make(model_type, **small))
        return built.to(torch.bfloat16).eval()
    except Exception as error:
        hint = f"{model_type}:NAME=VALUE for values of its configuration"
        what = f"no small model of {model_type} can be built"
        raise EmulatorError(what, f"{type(error).__name__}: {error}", hint) from error


def tiny(default: Any) -> dict[str, Any]:
    """What makes a configuration, and those inside it, small; every kind of layer stays."""
    sizes = {name: size for size, names in TINY.items() for name in names.split()}
    small: dict[str, Any] = {
        n: v for n, v in sizes.items() if getattr(default, n, None) is not None
    }
    if kinds := getattr(default, "layer_types", None):
        count = max(2, *(1 + kinds.index(kind) for kind in kinds))
        small |= {"num_hidden_layers": count, "layer_types": kinds[:count]}
    parts = ((name, getattr(default, name, None)) for name in default.sub_configs)
    return small | {name: tiny(part) for name, part in parts if part is not None}


def new_caches(config: Any) -> dict[int, Any]:
    """One for all lengths of prompts; that of an encoder's output has its length."""
    from transformers import EncoderDecoderCache, StaticCache

    def static(room: int) -> Any:
        return StaticCache(config=config, max_cache_len=room)

    if not config.is_encoder_decoder:
        return dict.fromkeys(SERVED, static(ROOM))
    return {length: EncoderDecoderCache(static(ROOM), static(length)) for length in SERVED}


def padded(length: int, counts: tuple[int, ...]) -> dict[str, Tensor]:
    """Prompts of so many tokens each, padded on the left to a length: inputs of a model [ROWS, length]."""
    tokens, mask = torch.zeros(2, ROWS, length, dtype=torch.int64)
    for row, count in enumerate(counts):
        tokens[row, -count:] = (7 * torch.arange(count) + 3 * count) % 57 + 3
        mask[row, -count:] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


class Step(nn.Module):
    """What a card runs as one graph; a prompt's begins by emptying the cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, cache: Any, fresh: bool, **given: Any) -> Any:
        if fresh:
            cache.reset()
        return self.model(**given, past_key_values=cache, use_cache=True)


class Served:
    """A model with its static cache: prompts in, logits out.

    Attributes:
        step: a `Step`, or what a card's mode makes of it.
        prompts: inputs of prompts, by length.
        following: those of a decode step: token and position [ROWS, 1], mask [ROWS, ROOM].
        encoded: an encoder's output for the prompt.
    """

    def __init__(self, model: Any) -> None:
        self.step, self.caches = Step(model), new_caches(model.config)
        self.names = inspect.signature(model.forward).parameters
        self.encodes = model.config.is_encoder_decoder
        self.encoded: tuple[Tensor, ...] = ()

        def inputs(length: int) -> dict[str, Tensor]:
            return {n: v.to(model.device) for n, v in padded(length, ()).items()}

        self.prompts = {length: inputs(length) for length in SERVED}
        self.following = inputs(1) | {"attention_mask": inputs(ROOM)["attention_mask"]}

    def serve(self, counts: Mapping[int, tuple[int, ...]], drawn: Tensor | None = None) -> Tensor:
        """Prompts of some lengths -> the logits after them [lengths, 1 + STEPS, ROWS, vocabulary], on the CPU.

        Args:
            drawn: the tokens to go on with [lengths, 1 + STEPS, ROWS]; None: the likeliest ones.
        """
        token, mask, position = self.following.values()
        made = []
        for index, (length, rows) in enumerate(counts.items()):
            prompt = padded(length, rows)
            for name, goal in self.prompts[length].items():
                goal.copy_(prompt[name])
            mask.copy_(nn.functional.pad(prompt["attention_mask"], (0, ROOM - length), value=1))
            position.copy_(prompt["position_ids"][:, -1:])
            token.zero_()  # a decoder's start
            for step in range(1 + STEPS):
                made.append(self.next_logits(length, step == 0))
                token.copy_((made[-1].argmax(-1) if drawn is None else drawn[index, step])[:, None])
                position.add_(1)
        return torch.stack(made).cpu().unflatten(0, (len(counts), 1 + STEPS))

    def next_logits(self, length: int, fresh: bool) -> Tensor:
        """After a prompt, or after the last token [ROWS, vocabulary]."""
        given: dict[str, Any] = dict(self.prompts[length] if fresh else self.following)
        if self.encodes:
            given["decoder_input_ids"] = self.following["input_ids"]
            given["attention_mask"] = self.prompts[length]["attention_mask"]
        if self.encodes and not fresh:
            given["encoder_outputs"] = self.encoded
            del given["input_ids"]
        known = {name: value for name, value in given.items() if name in self.names}
        made = self.step(self.caches[length], fresh, **known)
        if self.encodes:
            self.encoded = (made.encoder_last_hidden_state,)
        return made.logits[:, -1].clone()


def captured(step: Step, lazy: bool) -> Step:
    """A step as the card's mode has it: in HPU graphs, or compiled."""
    if lazy:
        return torch.hpu.wrap_in_hpu_graph(step)  # type: ignore[attr-defined]
    forward = step.model.forward
    step.model.forward = torch.compile(forward, backend="hpu_backend", dynamic=False)
    return step


def check_logits(served: Tensor, cpu: Tensor) -> None:
    """Raise an AssertionError for logits that differ by more than rounding does."""
    masked = torch.finfo(cpu.dtype).min
    largest = cpu[cpu > masked].float().abs().max()
    apart = (served.float() - cpu.float()).abs().max() / largest
    if not apart <= ROUNDING:
        raise AssertionError(f"its logits are {apart:.1%} of the largest from those on the CPU")


def lint_model_type(
    asked: str, lazy: bool, timeout: float = 600.0, release: str | None = None
) -> tuple[list[Device], Ended]:
    """Serve a small model of transformers on an emulated card. -> the card, and what ended that, if something did

    Two batches of each length warm it up; then other prompts come. If no finding is an error, its logits are those
    that the same code computes for its tokens on the CPU, without graphs.

    Args:
        asked: see `build_model`.
    """
    model = build_model(asked)
    ended: Ended = None
    with gaudi_emulator.emulate(release, lazy), torch.no_grad():
        served = Served(copy.deepcopy(model).to("hpu"))
        served.serve(WARM_UP)  # a cache is allocated by its first use, here on a card of its own
    with gaudi_emulator.emulate(release, lazy) as card, torch.no_grad():
        import_module("habana_frameworks.torch")
        card.differential = True
        try:
            with redirect_stdout(sys.stderr), limited(timeout):
                served.step = captured(served.step, lazy)
                for _ in range(2):
                    served.serve(WARM_UP)
                gaudi_emulator.warmed_up()
                logits = served.serve(SERVED)
                if not card.findings.errors:
                    check_logits(logits, Served(model).serve(SERVED, logits.argmax(-1)))
        except (Exception, TimeOver) as error:
            ended, card.recording = error, None  # a capture ended with it
            card.note_failure(error)
        card.end()
    return [card], ended
