"""Caption features of a T5 encoder (google/flan-t5-xl and the like), for LlamaGen's text models."""

from __future__ import annotations

import html
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote_plus

import torch
from torch import Tensor, nn

from lantern_hpu.errors import WeightsError, needing
from lantern_hpu.files import check_content, reading
from lantern_hpu.models.config import T5Config
from lantern_hpu.models.files.checkpoint import SINGLES, open_as_stored
from lantern_hpu.models.files.names import indexed_files, weights_files
from lantern_hpu.models.text.prefix import TextConditioner, TextFeatures
from lantern_hpu.ops.buffers import ToDevice, leave, to_device

CACHED = 1024  # prompts whose features stay on the host, at most 0.5 GB for flan-t5-xl
TAGS = 32  # a caption with more is not markup, and the parser's time grows with their square
# The time of some rules grows with its length
LONG_RUN = re.compile(r"(\S{256})(?=\S)|(\s{64})\s+")
HINT = "download all files of google/flan-t5-xl into one folder"
TOKENIZERS = ("tokenizer.json", "spiece.model")

# Rules of caption cleaning: what to find, and what replaces it. Models conditioned on T5 features were trained
# on captions that went through these rules twice, so they are kept as they are, odd ones included. Source:
# `clean_caption` of DeepFloyd IF and PixArt, as in diffusers (Apache-2.0).
Rules = tuple[tuple[str, str], ...]

_LINK = r"[a-z0-9.\-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_FILE = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DASHES = (
    "-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
    "\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
)


# Before tags are read, so that a link takes no tag with it.
LINKS: Rules = (
    ("<person>", "person"),  # else it would be taken for a tag
    (rf"\b(?:https?:(?:/{{1,3}}|[a-z0-9%])|{_LINK})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-z0-9%])|{_LINK})", ""),
)
SYMBOLS: Rules = (
    (r"@\w+\b", ""),  # @nick
    ("[\u31c0-\u9fff]+", ""),  # CJK strokes to unified ideographs
    (f"[{_DASHES}]+", "-"),
    ("[`´«»“”¨]", '"'),
    ("[‘’]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # IP address
    (r"\d:\d\d\s+$", ""),  # article id
    (r"\\n", " "),  # the two characters, not a line break
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.(?:{_FILE})", ""),  # file name
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
CLUTTER: Rules = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # jc6640
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),  # jc6640vc
    (r"\b\d+[a-zA-Z]+\d+\b", ""),  # 6640vc231
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILE})(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),  # j2d1a2a
    ("\\b\\d+\\.?\\d*[x\u0445\u00d7]\\d+\\.?\\d*\\b", ""),  # 1024x768, also Cyrillic and times sign
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
)
# The last strip comes after these: a space at an end shields what is behind it until the second round.
EDGES: Rules = (
    ("^[\"']([\\w\\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)


def clean_caption(text: str) -> str:
    """One round of cleaning; see `clean`."""
    with needing("ftfy", "it mends captions"):
        from ftfy import fix_text
    text = LONG_RUN.sub(lambda m: f"{m[1]} " if m[1] else m[2], unquote_plus(text)).strip().lower()
    text = _without_markup(_replace(text, LINKS))
    text = _replace(text, SYMBOLS)
    if len(re.findall("[-_]", text)) > 3:  # this-is-my-cute-cat, but not black-and-white
        text = re.sub("[-_]", " ", text)
    text = html.unescape(html.unescape(fix_text(text))).strip()
    return _replace(_replace(text, CLUTTER), EDGES).strip()


@lru_cache(CACHED)
def clean(text: str) -> str:
    """A caption as T5-conditioned models expect it: cleaned twice, as in their training."""
    return clean_caption(clean_caption(text))


def _replace(text: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def _without_markup(text: str) -> str:
    with needing("bs4", "it takes the tags out of captions"):
        from bs4 import BeautifulSoup
    if text.count("<") > TAGS:
        return text.replace("<", " ")
    # `<![a]` is one of several that releases of the parser reject, each in its way
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a caption looks like a file name or an address
        return BeautifulSoup(text, features="html.parser").text
    return text.replace("<", " ")


class T5Conditioner(TextConditioner):
    """Prompts to T5 features, encoded once and kept on the host; the encoder is loaded for prompts not known yet."""

    def __init__(
        self,
        folder: Path,  # in the Hugging Face format
        prefix: int = 120,  # P; longer prompts are cut
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
        to_device: ToDevice = to_device,
        keep: str = "host",  # where the encoder stays between prompts; "free" drops it and reads it again
        compile_parts: Callable[
            [nn.Module], None
        ] = leave,  # what is done to a new encoder that stays
    ) -> None:
        check_t5_files(folder)
        self.folder = folder
        self.prefix = prefix
        self.dtype = dtype
        self.device = device
        self.keep = keep
        self.to_device = to_device
        self.compile_parts = compile_parts
        # A server encodes in one thread, reads what is known in another, and counts tokens in a third
        self._encoding = threading.Lock()  # of the encoder
        self._lock = threading.Lock()  # of the tokenizer and of what is known: never held for long
        with reading(folder / "config.json", HINT) as hf_config:
            T5Config.from_json(hf_config)  # before a library allocates what it asks for
            self.width = int(hf_config["d_model"])  # C
        # Missing packages show now, not after the image model is loaded.
        with needing("transformers", "it encodes captions"):
            import transformers
        clean_caption("")
        self._transformers: Any = transformers
        self._encoder: Any = None
        self._known: dict[str, Tensor] = {}  # prompt -> [v, C] on the host, oldest first

    def clean(self, prompt: str) -> None:
        clean(prompt)

    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        """Features [B, P, C] and valid [B, P] of a batch, put together on the host so that one copy goes up."""
        found = self._features_of(prompts)
        features = torch.zeros(len(prompts), self.prefix, self.width, dtype=self.dtype)
        valid = torch.zeros(features.shape[:2], dtype=torch.bool)
        for row, known in enumerate(found[prompt] for prompt in prompts):
            features[row, self.prefix - len(known) :] = known
            valid[row, self.prefix - len(known) :] = True
        up = self.to_device
        return TextFeatures(up(features, self.device), up(valid, self.device))

    def prepare(self, prompts: Sequence[str]) -> None:
        """Encode the prompts that are not known yet, then put the encoder where `keep` says."""
        self._features_of(prompts)

    def _features_of(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Features [v, C] by prompt. Those that are known do not wait for others to be encoded."""
        wanted = list(dict.fromkeys(prompts))
        found = self._keep(wanted, {})
        if len(found) < len(wanted):
            with self._encoding:
                unknown = [prompt for prompt in wanted if prompt not in self._known]
                found = self._keep(wanted, self._encode(unknown))
        return found

    def _keep(self, wanted: Sequence[str], news: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add to what is known. -> what of it is wanted, now the youngest"""
        with self._lock:
            self._known.update(news)
            found = {prompt: self._known.pop(prompt) for prompt in wanted if prompt in self._known}
            self._known.update(found)
            # What was just asked for stays, even where it is more than fits.
            for old in list(self._known)[: max(0, len(self._known) - max(CACHED, len(wanted)))]:
                del self._known[old]
        return found

    def _encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """One at a time: in bfloat16 a batch rounds otherwise, and an image must not depend on its company."""
        try:
            self._load_encoder()
            return {prompt: self._features(prompt) for prompt in prompts}
        finally:
            if self.keep == "free":
                self._encoder = None
            elif self.keep != "device" and self._encoder is not None:
                self._encoder = self._encoder.cpu()

    def notes(self, prompt: str) -> list[str]:
        text = clean(prompt)
        if not text:
            after = " after cleaning" if prompt.strip() else ""
            return [f"the prompt is empty{after}, so the model may draw anything"]
        with self._lock, quiet(self._transformers):  # which warns of long prompts in its own words
            ids = self._tokenizer(text)["input_ids"]
            if len(ids) <= self.prefix:
                return []
            # The mark of the end takes the last place.
            cut = self._tokenizer.decode(ids[self.prefix - 1 :], skip_special_tokens=True).strip()
        return [f"the prompt has {len(ids)} tokens, {self.prefix} are read; left out: {cut!r}"]

    @torch.no_grad()
    def _features(self, prompt: str) -> Tensor:
        """Features [v, C] of a prompt's v tokens, on the host; pads become zeros on the left."""
        with self._lock, quiet(self._transformers):
            tokens = self._tokenizer(
                [clean(prompt)],
                max_length=self.prefix,
                padding="max_length",
                truncation=True,
                return_tensors="pt",
            )
        count = int(tokens["attention_mask"].sum())  # of [1, P] int64, pads on the right
        encoded = self._encoder(**tokens.to(self.device))
        hidden = encoded.last_hidden_state[0].to(self.dtype).cpu()  # [P, C]
        return hidden[:count].clone()

    @cached_property
    def _tokenizer(self) -> Any:
        with quiet(self._transformers), self._loading("tokenizer"):
            tokenizer = self._transformers.AutoTokenizer.from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
        tokenizer.padding_side = "right"  # `_features` relies on it
        return tokenizer

    def _load_encoder(self) -> None:
        if self._encoder is None:
            # Half the memory of the default, which is the files' dtype; the option's name has changed.
            version = [int(n) for n in self._transformers.__version__.split(".")[:2]]
            option = "dtype" if version >= [4, 56] else "torch_dtype"
            with quiet(self._transformers), self._loading("encoder"):
                encoder, info = self._transformers.T5EncoderModel.from_pretrained(
                    str(self.folder),
                    local_files_only=True,
                    output_loading_info=True,
                    **{option: self.dtype},
                )
            # transformers fills what is missing with noise, but for the table, which is tied
            if info["missing_keys"]:
                stored = open_as_stored(self.folder).within("model.")
                missing = {*info["missing_keys"]} - {"encoder.embed_tokens.weight", *stored.shapes}
                if missing:
                    why = f"it lacks {', '.join(sorted(missing)[:5])}"
                    raise WeightsError(f"{self.folder} is not a T5 encoder", why)
                held = {name: stored.read(name) for name in encoder.state_dict() if name in stored}
                encoder.load_state_dict(held, strict=False)
            self._encoder = encoder.eval().requires_grad_(False).to(self.device)
            if self.keep == "device":  # elsewhere it takes longer to get there than to launch
                self._encoder.whole = ("forward",)
                self.compile_parts(self._encoder)
        elif self.keep != "device":
            self._encoder = self._encoder.to(self.device)

    @contextmanager
    def _loading(self, part: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            what = f"cannot load the T5 {part} in {self.folder}"
            raise WeightsError(what, str(error), HINT) from error


def check_t5_files(folder: Path) -> None:
    """Raise unless a folder has all files of a T5 encoder, every part of divided weights included."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += _missing_weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        missing.append(" or ".join(TOKENIZERS))
    if missing:
        why = f"missing: {', '.join(missing)}" if folder.is_dir() else "there is no such folder"
        raise WeightsError(f"no T5 encoder in {folder}", why, HINT)
    for file in (*weights_files(folder), *(folder / name for name in TOKENIZERS)):
        if file.is_file():
            check_content(file)


def _missing_weights(folder: Path) -> list[str]:
    for name in SINGLES:
        if (folder / name).is_file():
            return []
        index = folder / f"{name}.index.json"
        if index.is_file():
            parts = set(indexed_files(index).values())
            return sorted(part.name for part in parts if not part.is_file())
    return [" or ".join(SINGLES)]


@contextmanager
def quiet(transformers: ModuleType) -> Iterator[None]:
    """No loading bars and no warnings of transformers; a checkpoint's decoder is left out on purpose."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
