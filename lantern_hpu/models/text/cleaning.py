"""Caption cleaning, as the public DeepFloyd IF and PixArt pipelines do it before their T5.

Models conditioned on T5 features were trained on captions that went through these rules, twice. Cleaning
differently would show them words they have never seen, so the rules are kept as they are, odd ones
included. Source: `clean_caption` of DeepFloyd IF and PixArt, as in diffusers (Apache-2.0). No torch here.
"""

from __future__ import annotations

import html
import re
import warnings
from urllib.parse import unquote_plus

from lantern_hpu.errors import needing

Rule = tuple[re.Pattern[str], str]  # what to find, what to write in its place

_LINK = r"[a-z0-9.\-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_FILE = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DASHES = (
    "-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
    "\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
)


def _table(*rows: tuple[str, str]) -> list[Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in rows]


# Before tags are read, so that a link takes no tag with it.
LINKS = _table(
    ("<person>", "person"),  # else it would be taken for a tag
    (rf"\b(?:https?:(?:/{{1,3}}|[a-z0-9%])|{_LINK})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-z0-9%])|{_LINK})", ""),
)
SYMBOLS = _table(
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
CLUTTER = _table(
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
# The last strip comes after these: a space at an end shields what lies behind it until the second round.
EDGES = _table(
    ("^[\"']([\\w\\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)


def clean_caption(text: str) -> str:
    """One round of cleaning; see `clean`.

    Raises:
        OptionError: ftfy or bs4 is not installed.
    """
    with needing("ftfy", "it mends captions"):
        from ftfy import fix_text
    text = unquote_plus(text).strip().lower()
    text = _without_markup(_replace(text, LINKS))
    text = _replace(text, SYMBOLS)
    if len(re.findall("[-_]", text)) > 3:  # this-is-my-cute-cat, but not black-and-white
        text = re.sub("[-_]", " ", text)
    text = html.unescape(html.unescape(fix_text(text))).strip()
    return _replace(_replace(text, CLUTTER), EDGES).strip()


def clean(text: str) -> str:
    """A caption as T5-conditioned models expect it: cleaned twice, as in their training.

    Raises:
        OptionError: ftfy or bs4 is not installed.
    """
    return clean_caption(clean_caption(text))


def _replace(text: str, rules: list[Rule]) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _without_markup(text: str) -> str:
    with needing("bs4", "it takes the tags out of captions"):
        from bs4 import BeautifulSoup
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a caption looks like a file name or an address
        return BeautifulSoup(text, features="html.parser").text
