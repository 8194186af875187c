"""How each family frames a prompt that it reads as tokens, with and without the words. Needs no torch.

A frame is tokens before the prompt, a template around its words, and tokens after it, the last of which begins the
picture. The row without a prompt is what guidance subtracts, and differs most between families.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

from lantern_hpu.errors import Arg, OptionError, WeightsError, words
from lantern_hpu.files import reading
from lantern_hpu.models.config import ConditionConfig, ModelConfig, TransformerConfig

Words = Callable[[str], list[int]]
Codes = Sequence[Sequence[int]]  # of a picture, row by row
FIRST_IMAGE_TOKEN = 4  # of Chameleon's vocabulary


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
        rest, start = [], 0
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


class Frame:
    """What the frames have in common."""

    family: str  # for errors
    special: Mapping[str, int | None] = {}  # its tokens in the tokenizer; None: of any id
    order: TokenOrder | None = None  # of the target's table, where that holds the words too
    pad = 0  # in front of prompts shorter than the prefix; nothing attends to it
    takes_negative = False  # whether guidance subtracts words that a user may choose
    reads_pictures = 0  # most sources of a request
    tokenizer = ""  # of which other model it is, where the family's files hold none
    closes: int | None = None  # what follows a picture, where its hidden state is of use
    settings = ""  # a file next to the tokenizer that it reads as well
    # Tokens in front of a prompt and behind it, by their names in `special` or their ids; the last begins the picture
    first: tuple[str | int, ...] = ()
    image: tuple[str | int, ...] = ()
    opening, ending = "", ""  # the template around the words of a prompt
    negative = ""  # what guidance subtracts where a user who may choose it did not

    def __init__(
        self, words: Words, vocabulary: Mapping[str, int], config: TransformerConfig, where: Path
    ) -> None:
        self.words, self.vocabulary, self.config, self.where = words, vocabulary, config, where
        self.check_tokens()
        self.before = self.tokens_before()
        # The template's end is kept where a prompt is cut
        self.closing = words(self.ending) if self.ending else []
        self.after = self.tokens_after()

    def check_tokens(self) -> None:
        """Raise a WeightsError unless the tokenizer is the family's; take the ids of its `special` tokens."""
        self.id: dict[str, int] = {
            name: self.token(name, want) for name, want in self.special.items()
        }

    def token(self, name: str, want: int | None) -> int:
        """The id of a token; raise a WeightsError unless the tokenizer has it, with this id if one is given."""
        result = self.vocabulary.get(name)
        if result is None or want not in (None, result):
            why = f"{name} is {'missing' if result is None else f'token {result}'}"
            why += f", expected token {want}" if want is not None else ""
            raise WeightsError(f"the tokenizer in {self.where} is not {self.family}'s", why)
        return result

    def drawn(self) -> set[int]:
        """Image codes and what closes a row, where they are in one table with words: the head's tokens."""
        rows = self.config.embed_rows or 0
        order = self.order or TokenOrder(())
        return set(order.tokens(rows)[: self.config.vocab_size])

    def ids_of(self, tokens: tuple[str | int, ...]) -> list[int]:
        return [self.id[token] if isinstance(token, str) else token for token in tokens]

    def tokens_before(self) -> list[int]:
        return self.ids_of(self.first)

    def tokens_after(self) -> list[int]:
        """What follows a prompt, with the picture's size where the frame names it."""
        return self.ids_of(self.image)

    def sized(self, config: TransformerConfig) -> Frame:
        """The same of pictures and prefixes of other sizes."""
        other = copy.copy(self)
        other.config = config
        other.after = other.tokens_after()
        return other

    def text(self, prompt: str) -> str:
        return f"{self.opening}{prompt}{self.ending}"

    @property
    def room(self) -> int:
        return self.config.prefix - len(self.before) - len(self.after)

    def ids(self, prompt: str, sources: Sequence[Codes] = ()) -> list[int]:
        """Tokens of a framed prompt, at most as many as there are positions; of its sources, where some are read."""
        words = self.words(self.text(prompt))
        if len(words) > self.room:
            words = words[: self.room - len(self.closing)] + self.closing
        return [*self.before, *words, *self.after]

    def without(self, ids: list[int], negative: str | None = None) -> list[int]:
        """The row that guidance subtracts from a framed prompt's; see `takes_negative`."""
        if not self.takes_negative:
            return [*self.before, *self.after]
        words = self.words(self.negative if negative is None else negative)
        return [*self.before, *words[: self.room], *self.after]

    def notes(self, prompt: str, negative: bool = False) -> list[str]:
        """What is cut of a prompt, or of a negative one, which is not framed."""
        more = len(self.words(prompt if negative else self.text(prompt))) - self.room
        return self.cut_notes(prompt, more, "negative prompt" if negative else "prompt")

    def source_notes(self, prompt: str, grids: Sequence[tuple[int, int]]) -> list[str]:
        """The same of a prompt with sources, whose codes have these grids."""
        return []

    def cut_notes(self, prompt: str, more: int, kind: str) -> list[str]:
        """That so many tokens are left out, where that is some."""
        count = len(self.words(prompt))
        left = f"those past {count - more} are left out"
        return [f"the {kind} has {count} tokens; {left}"] if more > 0 else []

    def axes(self, tokens: int, grids: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
        """Places of a prompt's tokens on the axes of "mrope" [3][T], where it begins with sources of these grids.

        A word's is the same on all three; a code's are the start of its picture, its row and its column.
        """
        at, places = 0, list[tuple[int, int, int]]()
        for rows, columns in grids:
            places.append((at, at, at))
            first, cells = at + 1, product(range(rows), range(columns))
            places += [(first, first + row, first + column) for row, column in cells]
            at = first + max(rows, columns)
            places.append((at, at, at))
            at += 1
        places += [(p, p, p) for p in range(at, at + tokens - len(places))]
        return list(zip(*places, strict=True))

    def scale_notes(self, scale: float) -> list[str]:
        """How the authors guide with this scale, where that is not the same at every token."""
        return []


class AnoleFrame(Frame):
    """<s> prompt, end of turn, begin of image; without words the frame alone, at positions of its own."""

    family = "Chameleon"
    order: TokenOrder = TokenOrder(((FIRST_IMAGE_TOKEN, 65536),))
    pad = 1
    first = (0,)
    image: tuple[str | int, ...] = (8710, 8197)

    def check_tokens(self) -> None:
        """Code c must be token c + 4 as well, by the names of the tokens."""
        for code in range(self.config.codes):
            self.token(code_name(code), code + FIRST_IMAGE_TOKEN)
        super().check_tokens()

    def without(self, ids: list[int], negative: str | None = None) -> list[int]:
        return [0, 8197]


class LuminaFrame(AnoleFrame):
    """A sentence that names the picture's size, end of turn, begin of image, and tokens of height and width.

    Without words it begins with the image, so positions of the two rows differ.
    """

    PIXELS, PATCH = 16, 32  # along a code; along what a token of the size counts
    special = {"<reserved08799>": 8803}  # what closes a row
    order: TokenOrder = TokenOrder(((FIRST_IMAGE_TOKEN, 8196), (8803, 8804)))

    def tokens_after(self) -> list[int]:
        """What begins the picture, then the tokens of height and width, which go by their names."""
        return [*super().tokens_after(), *self.size_tokens(*self.size)]

    def size_tokens(self, height: int, width: int) -> list[int]:
        """Those of a picture's height and width in pixels."""
        found = []
        for pixels in (height, width):
            token = self.vocabulary.get(f"<reserved{8800 + pixels // self.PATCH:05d}>")
            if token is None:
                raise OptionError(f"no {self.family} draws {pixels} pixels", "no token says them")
            found.append(token)
        return found

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        rows, columns = self.config.grid
        return self.PIXELS * rows, self.PIXELS * columns

    def text(self, prompt: str) -> str:
        height, width = self.size
        size = f"Generate an image of {width}x{height}"
        return f"{size} according to the following prompt:\n{prompt}"

    def without(self, ids: list[int], negative: str | None = None) -> list[int]:
        return self.after[1:]


class LuminaOmniFrame(LuminaFrame):
    """With a source the prompt, a space, the picture as it is drawn, with rows closed by a token, and its end.

    An instruction has no sentence about the size; guidance subtracts the same as without a source.
    """

    family = "Lumina-mGPT Omni"
    reads_pictures = 1
    BEGIN, ROW_END, END = 8197, 8803, 8196  # of a picture, and of each of its rows

    def ids(self, prompt: str, sources: Sequence[Codes] = ()) -> list[int]:
        if not sources:
            return super().ids(prompt)
        (codes,) = sources
        rows = [[*(FIRST_IMAGE_TOKEN + code for code in row), self.ROW_END] for row in codes]
        size = self.size_tokens(self.PIXELS * len(codes), self.PIXELS * len(codes[0]))
        picture = [self.BEGIN, *size, *chain.from_iterable(rows), self.END]
        words = self.words(f"{prompt} ")[: self.room - len(picture)]
        return [*self.before, *words, *picture, *self.after]

    def source_notes(self, prompt: str, grids: Sequence[tuple[int, int]]) -> list[str]:
        blank = [[[0] * columns] * rows for rows, columns in grids]
        whole = len(self.ids("", blank)) - len(self.before) - len(self.after)
        more = len(self.words(f"{prompt} ")) + whole - len(self.words(" ")) - self.room
        return self.cut_notes(prompt, more, "prompt")


class Lumina2Frame(LuminaFrame):
    """The same sentence and sizes in another vocabulary, after what its tokenizer begins or else ends a text with."""

    family = "Lumina-mGPT 2.0"
    PIXELS = 8
    settings = "tokenizer_config.json"
    END, TURN = "<|endoftext|>", "<reserved08706>"
    ROW_END = 151670  # closes a row
    CODES = (155000, 171384)  # from and to
    LEAST_SCALE = 4.0  # of its authors' guidance, which falls to it as a picture is drawn
    special = {END: None, TURN: None}
    image = (TURN, 151665)
    order: TokenOrder = TokenOrder((CODES, (ROW_END, ROW_END + 1)))
    pad = 0

    def check_tokens(self) -> None:
        Frame.check_tokens(self)  # its codes have other names

    def tokens_before(self) -> list[int]:
        file = self.where / self.settings
        if not file.is_file():
            return [self.id[self.END]]
        with reading(file) as settings:
            named = settings.get("bos_token") or settings.get("eos_token") or self.END
            return [self.vocabulary[named["content"] if isinstance(named, dict) else named]]

    def scale_notes(self, scale: float) -> list[str]:
        if scale in (1.0, self.LEAST_SCALE):
            return []
        least = f"{self.LEAST_SCALE:g}"
        rule = f"max({least}, {scale:g} x (1 - drawn / total))"
        return [f"guidance is {scale:g} at every token; its authors draw each with {rule}"]


class JanusFrame(Frame):
    """DeepSeek's conversation of one turn; without words all between the first and the last token is a pad.

    Those pads are attended to and have positions, as in the authors' sampler.
    """

    family = "Janus"
    first, PAD, image = ("<｜begin▁of▁sentence｜>",), "<｜▁pad▁｜>", ("<begin_of_image>",)
    special = dict.fromkeys((*first, PAD, *image))
    opening, ending = "<|User|>: ", "\n\n<|Assistant|>:"

    def text(self, prompt: str) -> str:
        return super().text(prompt.strip())

    def without(self, ids: list[int], negative: str | None = None) -> list[int]:
        return [ids[0], *[self.id[self.PAD]] * (len(ids) - 2), ids[-1]]


class Emu3Frame(Frame):
    """The prompt and words of praise, then the size of the picture in codes; guidance subtracts a negative prompt."""

    family = "Emu3"
    START, IMAGE = "<|image start|>", "<|image token|>"
    first = ("<|extra_203|>",)
    ending = " masterpiece, film grained, best quality."
    negative = (
        "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst "
        "quality, low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
    )
    special = {
        "<|extra_203|>": 151849,
        START: None,
        IMAGE: None,
        "<|extra_200|>": 151846,  # what closes a row
        "<|visual token 000000|>": 151854,
        "<|visual token 032767|>": 184621,
    }
    order: TokenOrder = TokenOrder(((151854, 184622), (151846, 151847)))
    takes_negative = True

    def tokens_after(self) -> list[int]:
        rows, columns = self.config.grid
        return [self.id[self.START], *self.words(f"{rows}*{columns}"), self.id[self.IMAGE]]


class Emu35Frame(Frame):
    """A sentence of what to do, the prompt, then the size of the picture in codes; no thought in front of it.

    Words are split by the tokenizer of Qwen2.5, whose special tokens have other ids here.
    """

    family = "Qwen2.5"  # by its tokenizer
    WORDS = 151643  # tokens of text; signs and codes follow
    opening, ending = "You are a helpful assistant for t2i task. USER: ", " ASSISTANT: "
    bare = "You are a helpful assistant. USER: "  # in place of `opening`, without a prompt
    first = (151849,)
    ANSWER, START, IMAGE = 151746, 151852, 151851
    special = {"<|endoftext|>": WORDS}
    tokenizer = "Qwen2.5's: Qwen/Qwen2.5-7B-Instruct"
    order: TokenOrder = TokenOrder(((151854, 282926), (151846, 151847)))

    def check_tokens(self) -> None:
        """Digits and the sign between them say a picture's size."""
        super().check_tokens()
        self.token("*", 9)
        for digit in range(10):
            self.token(str(digit), 15 + digit)

    def drawn(self) -> set[int]:
        """All that is not text; names of the tokenizer's own special tokens are text here."""
        return set(range(self.WORDS, self.config.embed_rows or self.WORDS))

    def tokens_after(self) -> list[int]:
        rows, columns = self.config.grid
        return [self.ANSWER, self.START, *self.words(f"{rows}*{columns}"), self.IMAGE]

    def without(self, ids: list[int], negative: str | None = None) -> list[int]:
        return [*self.before, *self.words(f"{self.bare}{self.ending}"), *self.after]


class U0Frame(Emu35Frame):
    """The same, whose guidance subtracts an empty prompt in the same sentence."""

    bare = Emu35Frame.opening


class SimpleArFrame(Frame):
    """A sentence between two tokens; guidance subtracts a negative prompt, with its own length and positions."""

    family = "SimpleAR"
    first, image = ("<|t2i|>",), ("<|soi|>",)
    opening = "A highly realistic image of "
    negative = (
        "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, "
        "bad eyes, bad limbs, distortion"
    )
    special = {"<|t2i|>": 151665, "<|soi|>": 151667}
    order: TokenOrder = TokenOrder(((151672, 215672),))
    takes_negative = True


class MammothModa2Frame(Frame):
    """Qwen2.5's conversation of one turn, then the size of the picture in codes, width first.

    The row that guidance subtracts has the last tokens of the same prompt alone, of any kind, as its authors mask
    it. Its files hold no tokenizer that is read here: words are split by Qwen2.5's, which lacks the image tokens.
    """

    family = "Qwen2.5"  # by its tokenizer
    TOKEN, START, END = 152069, 152070, 152071  # before and behind the size, and behind a picture
    LAST = 10  # tokens of a prompt that the row without it has
    special = {"<|im_start|>": 151644, "<|im_end|>": 151645}
    opening = "<|im_start|>system\nYou are a helpful image generator.<|im_end|>\n<|im_start|>user\n"
    ending = "<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = "Qwen2.5's: Qwen/Qwen2.5-7B-Instruct"
    closes = END
    order: TokenOrder = TokenOrder(((152072, 168456), (152064, 152065)))

    def tokens_after(self) -> list[int]:
        rows, columns = self.config.grid
        return [self.START, *self.words(f"{columns}*{rows}"), self.TOKEN]

    def without(self, ids: list[int], negative: str | None = None) -> list[int]:
        return ids[-self.LAST :]


class GlmImageFrame(Frame):
    """The prompt, then the grids of picture and preview as numbers, and what begins a picture.

    Sources come first, each between what begins and ends a picture; no preview is drawn then. A prompt is never cut:
    what it says of the picture may stand at its end.
    """

    family = "GLM-Image"
    reads_pictures = 4
    BEGIN, END = "<sop>", "<eop>"
    special = dict.fromkeys((BEGIN, END))

    def check_tokens(self) -> None:
        codes = self.config.codes
        self.token(f"<|dit_token_{codes}|>", codes)
        super().check_tokens()

    def tokens_after(self) -> list[int]:
        """Those of picture and preview as numbers, and what begins a picture."""
        found = []
        for rows, columns in filter(all, (self.config.grid, self.config.preview_grid)):
            size = self.words(f"{rows} {columns}")
            found += [self.id[self.BEGIN], *size, self.id[self.END]]
        return [*found, self.config.codes]

    def ids(self, prompt: str, sources: Sequence[Codes] = ()) -> list[int]:
        begin = self.config.codes
        pictures = [[begin, *chain.from_iterable(codes), begin + 1] for codes in sources]
        words = [*chain.from_iterable(pictures), *self.words(prompt)]
        if len(words) > self.room:
            why, hint = f"{self.family} reads prompts of up to {self.room}", "a shorter prompt"
            if sources:
                why, hint = f"{why}, pictures included", "fewer pictures, or smaller ones"
            raise OptionError(f"the prompt has {len(words)} tokens", why, hint)
        return [*words, *self.after]

    def without(self, ids: list[int], negative: str | None = None) -> list[int]:
        """What guidance subtracts; the authors draw without guidance."""
        return list(self.after)

    def notes(self, prompt: str, negative: bool = False) -> list[str]:
        return []


FRAMES: dict[str, type[Frame]] = {
    "anole": AnoleFrame,
    "lumina": LuminaFrame,
    "lumina-omni": LuminaOmniFrame,
    "lumina2": Lumina2Frame,
    "janus": JanusFrame,
    "emu3": Emu3Frame,
    "emu3.5": Emu35Frame,
    "u0": U0Frame,
    "simplear": SimpleArFrame,
    "mammothmoda2": MammothModa2Frame,
    "glm-image": GlmImageFrame,
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


def code_name(code: int) -> str:
    """The name of one of Chameleon's image tokens: the code's digits as letters."""
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"
