"""How each family frames a prompt that it reads as tokens, with and without the words. Needs no torch.

A frame is tokens before the prompt, a template around its words, and tokens after it, the last of which begins the
picture. The row without a prompt is what guidance subtracts, and differs most between families. A family is an entry
of `FRAMES`; `Frame` applies an entry to prompts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from lantern_hpu.errors import Arg, OptionError, WeightsError, words
from lantern_hpu.files import reading
from lantern_hpu.models.config import ConditionConfig, ModelConfig, TransformerConfig

Words = Callable[[str], list[int]]
Codes = Sequence[Sequence[int]]  # of a picture, row by row
FIRST_IMAGE_TOKEN = 4  # of Chameleon's vocabulary
SIZE_STEP = 32  # pixels that one more step of Lumina's size tokens stands for


@dataclass(frozen=True)
class TokenOrder:
    """Which tokens of a table come first in ours: image codes, and what closes a row; all others follow."""

    first: tuple[tuple[int, int], ...]  # from and to, of stretches of tokens

    @property
    def drawn(self) -> int:
        """How many of them there are."""
        return sum(end - start for start, end in self.first)

    def stretches(self, rows: int) -> tuple[tuple[int, int], ...]:
        """The whole table of n rows, in our order."""
        rest = []
        start = 0
        for begin, end in [*sorted(self.first), (rows, rows)]:
            if start < begin:
                rest.append((start, begin))
            start = end
        return (*self.first, *rest)

    def row(self, token: int, rows: int) -> int:
        before = 0
        for begin, end in self.stretches(rows):
            if begin <= token < end:
                return before + token - begin
            before += end - begin
        raise ValueError(f"token {token} is not in a table of {rows}")

    def tokens(self, rows: int) -> list[int]:
        """The token of each of n rows of ours."""
        return [token for stretch in self.stretches(rows) for token in range(*stretch)]


class Token(str):
    """A token by its name, which may have values in braces: see `Frame.values`."""


class BehindCodes(int):
    """A token by its number behind the last code."""


# A token by its id, its name or its number behind the codes; text that is split into tokens, with values in braces; or
# several of them that only stand where a preview is drawn
Piece = int | str | tuple[Any, ...]
Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class SourceFrame:
    """How a prompt has the pictures that it is drawn from."""

    most: int  # of a request
    before: Pieces  # in front of a picture's codes
    after: Pieces
    row_end: tuple[int, ...] = ()  # closes each row of codes
    text: str = "{prompt}"  # the template around the words of a prompt
    is_first: bool = False  # whether pictures come before the words


@dataclass(frozen=True, kw_only=True)
class FrameConfig:
    """How a family frames prompts."""

    family: str  # for errors
    before: Pieces = ()
    text: str = "{prompt}"  # the template around the words of a prompt; its end is kept where a prompt is cut
    after: Pieces = ()  # the last begins the picture
    is_stripped: bool = False  # whether spaces around a prompt are left out
    is_cut: bool = True  # whether a prompt that is too long is cut, or refused
    # What guidance subtracts: a text in the prompt's place, which a user may choose where it is `negative`; or tokens;
    # or the prompt, of which a token stands for all but the first and the last, or the last tokens are left
    bare: str | None = None
    negative: str | None = None
    without: Pieces = ()
    filler: str = ""
    last: int = 0
    order: TokenOrder | None = None  # of the target's table, where that holds the words too
    # Tokens that no prompt has, by name, None: of any id; and others that must have these ids, by the number of codes
    control: Mapping[str, int | None] = field(default_factory=dict)
    checked: Callable[[int], Mapping[str, int]] = lambda codes: {}
    text_tokens: int = 0  # how many tokens are text, where all others are control tokens
    pad: int = 0  # in front of prompts shorter than the prefix; nothing attends to it
    tokenizer: str = ""  # of which other model it is, where the family's files hold none
    settings: str = ""  # a file next to the tokenizer that names the first token
    pixels: int = 0  # along a code, where a prompt has the picture's size in pixels
    closes: int | None = None  # what follows a picture, where its hidden state is of use
    source: SourceFrame | None = None
    # Of the authors' guidance, where that falls to it as a picture is drawn
    least_scale: float = 0.0

    @property
    def takes_negative(self) -> bool:
        """Whether guidance subtracts words that a user may choose."""
        return self.negative is not None

    @property
    def reads_pictures(self) -> int:
        """Most sources of a request."""
        return 0 if self.source is None else self.source.most


class Frame:
    """A family's frame with its tokenizer, for pictures and prefixes of these sizes."""

    def __init__(
        self,
        entry: FrameConfig,
        words: Words,
        vocabulary: Mapping[str, int],
        config: TransformerConfig,
        where: Path,  # the tokenizer's folder
    ) -> None:
        """Raises a WeightsError unless the tokenizer is the family's."""
        self.entry = entry
        self.words = words
        self.vocabulary = vocabulary
        self.config = config
        self.where = where
        for name, want in entry.checked(config.codes).items():
            self.check_token(name, want)
        self.id = {name: self.check_token(name, want) for name, want in entry.control.items()}
        self.first = self.first_token()
        self.before = self.tokens(entry.before)
        *_, ending = entry.text.partition("{prompt}")
        self.closing = words(ending) if ending else []
        self.after = self.tokens(entry.after)

    def check_token(self, name: str, want: int | None) -> int:
        """The id of a token; raise a WeightsError unless the tokenizer has it, with this id if one is given."""
        result = self.vocabulary.get(name)
        if result is None or want not in (None, result):
            why = f"{name} is {'missing' if result is None else f'token {result}'}"
            why += f", expected token {want}" if want is not None else ""
            raise WeightsError(f"the tokenizer in {self.where} is not {self.entry.family}'s", why)
        return result

    def sized(self, config: TransformerConfig) -> Frame:
        """The same of pictures and prefixes of other sizes."""
        other = copy.copy(self)
        other.config = config
        other.after = other.tokens(self.entry.after)
        return other

    def drawn(self) -> set[int]:
        """Image codes and what closes a row, where they are in one table with words: the head's tokens."""
        rows = self.config.embed_rows or 0
        if self.entry.text_tokens:
            return set(range(self.entry.text_tokens, rows))
        order = self.entry.order or TokenOrder(())
        return set(order.tokens(rows)[: self.config.vocab_size])

    def values(self, rows: int, columns: int) -> dict[str, Any]:
        """What pieces and templates may name of a picture of so many codes."""
        height = self.entry.pixels * rows
        width = self.entry.pixels * columns
        small_rows, small_columns = self.config.preview_grid
        return {
            "first": self.first,
            **{"rows": rows, "columns": columns, "height": height, "width": width},
            **{"small_rows": small_rows, "small_columns": small_columns},
            "height_token": f"{8800 + height // SIZE_STEP:05d}",
            "width_token": f"{8800 + width // SIZE_STEP:05d}",
        }

    def tokens(self, pieces: Pieces, grid: tuple[int, int] | None = None) -> list[int]:
        """Those of pieces, with the values of a picture of this grid; None: of the one that is drawn."""
        values = self.values(*(grid or self.config.grid))
        found: list[int] = []
        for piece in pieces:
            if isinstance(piece, tuple):
                found += self.tokens(piece) if all(self.config.preview_grid) else []
            elif isinstance(piece, BehindCodes):
                found.append(self.config.codes + piece)
            elif isinstance(piece, int):
                found.append(piece)
            elif isinstance(piece, Token):
                found.append(self.token(piece.format(**values)))
            else:
                found += self.words(piece.format(**values))
        return found

    def token(self, name: str) -> int:
        result = self.vocabulary.get(name)
        if result is None:
            rows, columns = self.config.grid
            what = f"no {self.entry.family} draws {rows} x {columns} codes"
            raise OptionError(what, f"{name} is no token of it")
        return result

    def first_token(self) -> str:
        """What the tokenizer begins a text with, or else ends it, by its settings."""
        end = next(iter(self.entry.control), "")
        file = self.where / self.entry.settings
        if not file.is_file():
            return end
        with reading(file) as settings:
            named = settings.get("bos_token") or settings.get("eos_token") or end
            name = str(named["content"] if isinstance(named, dict) else named)
        self.check_token(name, None)
        return name

    @property
    def room(self) -> int:
        return self.config.prefix - len(self.before) - len(self.after)

    def text(self, prompt: str, sourced: bool = False) -> str:
        """A prompt in its template, uncut."""
        source = self.entry.source if sourced else None
        template = self.entry.text if source is None else source.text
        prompt = prompt.strip() if self.entry.is_stripped else prompt
        return template.format(prompt=prompt, **self.values(*self.config.grid))

    def picture(self, codes: Codes) -> list[int]:
        """Tokens of a source."""
        source = self.entry.source
        assert source is not None, "a request's sources are checked before"
        grid = len(codes), len(codes[0])
        first = self.entry.order.first[0][0] if self.entry.order else 0
        rows = [[*(first + code for code in row), *source.row_end] for row in codes]
        before = self.tokens(source.before, grid)
        return [*before, *chain.from_iterable(rows), *self.tokens(source.after, grid)]

    def ids(self, prompt: str, sources: Sequence[Codes] = ()) -> list[int]:
        """Tokens of a framed prompt, at most as many as there are positions; of its sources, where some are read.

        Raises:
            OptionError: it is too long, and the family's prompts are not cut.
        """
        words = self.words(self.text(prompt, bool(sources)))
        pictures = [*chain.from_iterable(self.picture(codes) for codes in sources)]
        room = self.room - len(pictures)
        if len(words) > room:
            self.check_cut(len(words) + len(pictures), bool(sources))
            words = words[: room - len(self.closing)] + self.closing
        if self.entry.source is not None and self.entry.source.is_first:
            return [*self.before, *pictures, *words, *self.after]
        return [*self.before, *words, *pictures, *self.after]

    def check_cut(self, count: int, sourced: bool) -> None:
        """Raise an OptionError where prompts are not cut: what one says of the picture may stand at its end."""
        if self.entry.is_cut:
            return
        why = f"{self.entry.family} reads prompts of up to {self.room}"
        hint = "a shorter prompt"
        if sourced:
            why += ", pictures included"
            hint = "fewer pictures, or smaller ones"
        raise OptionError(f"the prompt has {count} tokens", why, hint)

    def without(self, ids: list[int], negative: str | None = None) -> list[int]:
        """The row that guidance subtracts from a framed prompt's."""
        entry = self.entry
        if entry.last:
            return ids[-entry.last :]
        if entry.filler:
            return [ids[0], *[self.id[entry.filler]] * (len(ids) - 2), ids[-1]]
        if entry.without:
            return self.tokens(entry.without)
        text = entry.bare
        if entry.takes_negative:
            text = entry.negative if negative is None else negative
        words = [] if text is None else self.words(text)[: self.room]
        return [*self.before, *words, *self.after]

    def notes(
        self, prompt: str, grids: Sequence[tuple[int, int]] = (), negative: bool = False
    ) -> list[str]:
        """What is cut of a prompt with sources of these grids, or of a negative one, which is not framed."""
        words = self.words(prompt if negative else self.text(prompt, bool(grids)))
        pictures = sum(len(self.picture([[0] * columns] * rows)) for rows, columns in grids)
        more = len(words) + pictures - self.room
        if more <= 0 or not self.entry.is_cut:
            return []
        count = len(self.words(prompt))
        kind = "negative prompt" if negative else "prompt"
        return [f"the {kind} has {count} tokens; those past {count - more} are left out"]

    def scale_notes(self, scale: float) -> list[str]:
        """How the authors guide with this scale, where that is not the same at every token."""
        least = self.entry.least_scale
        if not least or scale in (1.0, least):
            return []
        rule = f"max({least:g}, {scale:g} x (1 - drawn / total))"
        return [f"guidance is {scale:g} at every token; its authors draw each with {rule}"]


def places_of(tokens: int, grids: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Places of a prompt's tokens on the axes of "mrope" [3][T], where it begins with sources of these grids.

    A word's is the same on all three; a code's are the start of its picture, its row and its column.
    """
    at = 0
    places: list[tuple[int, int, int]] = []
    for rows, columns in grids:
        places.append((at, at, at))
        first = at + 1
        cells = product(range(rows), range(columns))
        places += [(first, first + row, first + column) for row, column in cells]
        at = first + max(rows, columns)
        places.append((at, at, at))
        at += 1
    places += [(p, p, p) for p in range(at, at + tokens - len(places))]
    return list(zip(*places, strict=True))


def code_name(code: int) -> str:
    """The name of one of Chameleon's image tokens: the code's digits as letters."""
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


# Digits and the sign between them, which say a picture's size
QWEN_DIGITS = {"*": 9, **{str(digit): 15 + digit for digit in range(10)}}
QWEN = "Qwen2.5's: Qwen/Qwen2.5-7B-Instruct"
SIZE = (Token("<reserved{height_token}>"), Token("<reserved{width_token}>"))
SENTENCE = "Generate an image of {width}x{height} according to the following prompt:\n{prompt}"

ANOLE = FrameConfig(
    family="Chameleon",
    before=(0,),
    after=(8710, 8197),  # end of turn, begin of image
    without=(0, 8197),  # at positions of its own
    order=TokenOrder(((FIRST_IMAGE_TOKEN, 65536),)),
    checked=lambda codes: {code_name(i): FIRST_IMAGE_TOKEN + i for i in range(codes)},
    pad=1,
)
# Without words Lumina's begin with the image, so positions of the two rows differ
LUMINA = replace(
    ANOLE,
    text=SENTENCE,
    after=(8710, 8197, *SIZE),
    without=(8197, *SIZE),
    order=TokenOrder(((FIRST_IMAGE_TOKEN, 8196), (8803, 8804))),
    control={"<reserved08799>": 8803},  # closes a row
    pixels=16,
)
EMU35 = FrameConfig(
    family="Qwen2.5",  # by its tokenizer, whose special tokens have other ids here
    before=(151849,),
    text="You are a helpful assistant for t2i task. USER: {prompt} ASSISTANT: ",
    after=(151746, 151852, "{rows}*{columns}", 151851),  # no thought in front of the picture
    bare="You are a helpful assistant. USER:  ASSISTANT: ",
    order=TokenOrder(((151854, 282926), (151846, 151847))),
    control={"<|endoftext|>": 151643},
    checked=lambda _: QWEN_DIGITS,
    text_tokens=151643,
    tokenizer=QWEN,
)
FRAMES: dict[str, FrameConfig] = {
    "anole": ANOLE,
    "lumina": LUMINA,
    # An instruction has no sentence about the size; guidance subtracts the same as without a source
    "lumina-omni": replace(
        LUMINA,
        family="Lumina-mGPT Omni",
        source=SourceFrame(1, (8197, *SIZE), (8196,), row_end=(8803,), text="{prompt} "),
    ),
    "lumina2": FrameConfig(
        family="Lumina-mGPT 2.0",
        before=(Token("{first}"),),
        text=SENTENCE,
        after=(Token("<reserved08706>"), 151665, *SIZE),
        without=(151665, *SIZE),
        order=TokenOrder(((155000, 171384), (151670, 151671))),
        control={"<|endoftext|>": None, "<reserved08706>": None},
        settings="tokenizer_config.json",
        pixels=8,
        least_scale=4.0,
    ),
    # DeepSeek's conversation of one turn; pads are attended to and have positions, as in the authors' sampler
    "janus": FrameConfig(
        family="Janus",
        before=(Token("<｜begin▁of▁sentence｜>"),),
        text="<|User|>: {prompt}\n\n<|Assistant|>:",
        after=(Token("<begin_of_image>"),),
        is_stripped=True,
        filler="<｜▁pad▁｜>",
        control=dict.fromkeys(("<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<begin_of_image>")),
    ),
    "emu3": FrameConfig(
        family="Emu3",
        before=(Token("<|extra_203|>"),),
        text="{prompt} masterpiece, film grained, best quality.",
        after=(Token("<|image start|>"), "{rows}*{columns}", Token("<|image token|>")),
        negative="lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, "
        "worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry.",
        order=TokenOrder(((151854, 184622), (151846, 151847))),
        control={
            "<|extra_203|>": 151849,
            "<|image start|>": None,
            "<|image token|>": None,
            "<|extra_200|>": 151846,  # closes a row
            "<|visual token 000000|>": 151854,
            "<|visual token 032767|>": 184621,
        },
    ),
    "emu3.5": EMU35,
    "u0": replace(EMU35, bare="You are a helpful assistant for t2i task. USER:  ASSISTANT: "),
    "simplear": FrameConfig(
        family="SimpleAR",
        before=(Token("<|t2i|>"),),
        text="A highly realistic image of {prompt}",
        after=(Token("<|soi|>"),),
        negative="An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, "
        "bad teeth, bad eyes, bad limbs, distortion",
        order=TokenOrder(((151672, 215672),)),
        control={"<|t2i|>": 151665, "<|soi|>": 151667},
    ),
    # Width first. Guidance subtracts the last tokens of the same prompt, of any kind, as its authors mask it
    "mammothmoda2": FrameConfig(
        family="Qwen2.5",  # by its tokenizer, which lacks the image tokens
        text="<|im_start|>system\nYou are a helpful image generator.<|im_end|>\n"
        "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
        after=(152070, "{columns}*{rows}", 152069),
        last=10,
        order=TokenOrder(((152072, 168456), (152064, 152065))),
        control={"<|im_start|>": 151644, "<|im_end|>": 151645},
        tokenizer=QWEN,
        closes=152071,
    ),
    # The authors draw without guidance. No preview is drawn of a prompt with sources
    "glm-image": FrameConfig(
        family="GLM-Image",
        after=(
            *(Token("<sop>"), "{rows} {columns}", Token("<eop>")),
            (Token("<sop>"), "{small_rows} {small_columns}", Token("<eop>")),
            BehindCodes(0),
        ),
        is_cut=False,
        control=dict.fromkeys(("<sop>", "<eop>")),
        checked=lambda codes: {f"<|dit_token_{codes}|>": codes},
        source=SourceFrame(4, (BehindCodes(0),), (BehindCodes(1),), is_first=True),
    ),
}


def takes_negative(condition: ConditionConfig) -> bool:
    """Whether guidance subtracts words that a user may choose."""
    return condition.kind == "tokens" and FRAMES[condition.frame].takes_negative


def no_negative(model: str) -> OptionError:
    """Why a model is given no negative prompt."""
    why = f"{model} reads no negative prompt: its guidance is against an empty prompt"
    return OptionError(words(Arg("negative_prompt"), "cannot be used"), why, "leave it out")


def reads_pictures(config: ModelConfig) -> int:
    """How many sources a request to a model of these parts may have; 0: it reads no pictures."""
    if config.condition.kind != "tokens" or not config.encodes_pictures:
        return 0
    return FRAMES[config.condition.frame].reads_pictures


def check_sources(config: ModelConfig, name: str, count: int) -> None:
    """Raise an OptionError where a model of this name does not read so many pictures; no weights are needed."""
    most = reads_pictures(config)
    if count <= most:
        return
    if most:
        why = f"{name} reads at most {most}"
        raise OptionError(words(Arg("image"), f"has {count} pictures"), why, "fewer pictures")
    if config.vision is not None and config.vision.problem:
        raise OptionError(words(Arg("image"), "cannot be used"), config.vision.problem)
    known = [frame.family for frame in FRAMES.values() if frame.reads_pictures]
    why = f"{name} reads no pictures" + (f"; {' and '.join(known)} do" if known else "")
    raise OptionError(words(Arg("image"), "cannot be used"), why, "leave it out")
