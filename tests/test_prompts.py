"""Lists of prompts as people save them: each is read as it was meant, or refused with what was found."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lantern_hpu.commands import generate
from lantern_hpu.core import Request
from lantern_hpu.errors import LanternError, OptionError, exit_code
from lantern_hpu.results.prompts import numbered_prompts, read_prompts
from lantern_lab.evaluate.sets import read_set
from tests.test_properties import examples

TWO = ["red cat", "blue apple"]
COCO = {
    "info": {"year": 2017},
    "images": [{"id": 9, "file_name": "9.jpg"}],
    "annotations": [{"image_id": 9, "id": n, "caption": text} for n, text in enumerate(TWO)],
}
# What is in a file of this ending -> its two prompts
MEANT = {
    "lantern's script": (
        "json",
        {f"prompt_{n}": {"prompt": t, "seed": n} for n, t in enumerate(TWO)},
    ),
    "list in an object": ("json", {"prompts": TWO}),
    "objects in an object": ("json", {"prompts": [{"text": text} for text in TWO]}),
    "captions": ("json", [{"Caption": text, "id": 7} for text in TWO]),
    "captions of pictures": ("json", [{"image": "a.jpg", "captions": TWO}]),
    "COCO's": ("json", COCO),
    "pandas, by column": ("json", {"id": {"0": 5, "1": 6}, "prompt": {"0": TWO[0], "1": TWO[1]}}),
    "pandas, a series": ("json", {"0": TWO[0], "1": TWO[1]}),
    "lines as .json": ("json", '{"prompt": "red cat"}\n{"prompt": "blue apple"}\n'),
    "lines": ("jsonl", '{"prompt": "red cat"}\n\n"blue apple"\n'),
    "mark before text": ("txt", "\ufeffred cat\nblue apple"),
    "mark before a table": ("tsv", "\ufeffPrompt\tid\nred cat\t1\nblue apple\t2\n"),
    "mark before JSON": ("json", '\ufeff["red cat", "blue apple"]'),
    "other line ends": ("txt", "red cat\r\nblue apple\r"),
    "upper case": ("TXT", "red cat\nblue apple"),
    "id and text": ("tsv", "id\ttext\n1\tred cat\n2\tblue apple\n"),
    "COCO's table": ("tsv", "image_id\tcaption\n1\tred cat\n2\tblue apple\n"),
    "commas": ("csv", "id,prompt\n1,red cat\n2,blue apple\n"),
    "semicolons": ("csv", "id;prompt\n1;red cat\n2;blue apple\n"),
    "Excel": ("csv", "sep=;\nid;prompt\n1;red cat\n2;blue apple\n"),
    "an index": ("csv", ",prompt\n0,red cat\n1,blue apple\n"),
    "quotes": ("csv", 'prompt\n"red cat"\n"blue apple"\n'),
    "empty cells behind": ("tsv", "id\tprompt\n1\tred cat\t\n2\tblue apple\t\t\n"),
    "no head": ("tsv", "red cat\nblue apple\n"),
}


def saved(folder: Path, kind: str, content: object) -> Path:
    file = folder / f"p.{kind}"
    text = content if isinstance(content, str) else json.dumps(content)
    file.write_bytes(text.encode())
    return file


# What is in a file, and its prompts: marks in a text stay in it
TEXTS = {kind: (*given, TWO) for kind, given in MEANT.items()} | {
    "a string": ("json", '"red cat"', ["red cat"]),
    "an object": ("json", '{"prompt": "red cat"}', ["red cat"]),
    "one quote": ("tsv", 'Prompt\n5" pipe\n"open\nblue', ['5" pipe', '"open', "blue"]),
    "quote at the end": ("tsv", 'id\tPrompt\n1\tpipe of 5"\n2\tblue', ['pipe of 5"', "blue"]),
    "line break in a cell": ("csv", 'id,prompt\n1,"a\nb"\n2,c\n', ["a\nb", "c"]),
    "doubled quotes": ("csv", 'prompt\n"a ""red"" cat, big"\n', ['a "red" cat, big']),
    "line separators": ("txt", "a\u2028b\u0085c\x0cd\ne", ["a\u2028b\u0085c\x0cd", "e"]),
    "separators in a table": ("tsv", "prompt\na\u2028b\ne", ["a\u2028b", "e"]),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_each_form_of_a_list_is_read_as_it_was_meant(kind: str, tmp_path: Path) -> None:
    ending, content, prompts = TEXTS[kind]
    assert read_prompts(saved(tmp_path, ending, content)) == prompts


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lines, in UTF-8."""
    for data, wanted in (
        ("\ufeffa b\r\n\nein Käse".encode(), {0: "a b", 1: "ein Käse"}),
        (b"\xff", "byte 0xff"),
    ):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        if isinstance(wanted, dict):
            assert numbered_prompts(Path("-")) == wanted
            continue
        with pytest.raises(OptionError, match=wanted):
            numbered_prompts(Path("-"))


def test_a_blank_entry_keeps_the_numbers_of_those_behind_it(model: Path, tmp_path: Path) -> None:
    for kind, content in (
        ("tsv", "id\tprompt\n0\tred cat\n1\t\n2\tblue apple\n"),
        ("csv", 'prompt\nred cat\n""\nblue apple\n'),
        ("json", ["red cat", " ", {"prompt": "blue apple"}]),
    ):
        file = saved(tmp_path, kind, content)
        assert numbered_prompts(file) == {0: "red cat", 2: "blue apple"}
    words = ["--model", str(model), "--prompts-file", str(file), "--output", str(tmp_path / "out")]
    assert generate.main([*words, "--report", str(tmp_path / "r.json")]) == 0
    drawn = json.loads((tmp_path / "r.json").read_text())["images"]
    assert [(Path(image["file"]).name, image["seed"]) for image in drawn] == [
        ("000-red-cat.png", 0),
        ("002-blue-apple.png", 2),
    ]


REFUSED = {
    "annotations without captions": ("json", {"annotations": [{"bbox": [1]}]}, "bbox"),
    "settings": ("json", {"seed": 7, "steps": 9}, "seed, steps, and no prompt"),
    "texts by name": ("json", {"title": "cat", "author": "me"}, "title, author"),
    "a number": ("json", "7", "not text: 7"),
    "lists in a list": ("json", [["red cat", "blue"]], "entry 0 is not text"),
    "a name twice": ("json", '{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
    "a broken line": ("jsonl", '"cat"\n{"prompt":', "line 2"),
    "no name for a column": ("tsv", "0\tred cat\n1\tblue apple\n", "names no column"),
    "a comma too many": ("csv", "id,prompt\n1,cat\n2,a cat, red\n", "row 3 has 3 cells"),
    "half an emoji": ("json", r'["red cat", "\ud83d"]', "prompt 1 of"),
    "a control character": ("txt", "red\x1b cat", "control character"),
    "no characters": ("txt", "r\0e\0d\0", "control character"),
    "a pointer": (
        "txt",
        "version https://git-lfs.github.com/spec/v1\noid sha256:0",
        "git lfs pull",
    ),
    "a web page": ("tsv", "<!DOCTYPE html>\n<html>", "web page"),
    "another ending": ("md", "red cat", "unknown format"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_certain_is_refused_with_what_was_found(kind: str, tmp_path: Path) -> None:
    ending, content, says = REFUSED[kind]
    with pytest.raises(LanternError, match=says):
        read_prompts(saved(tmp_path, ending, content))


@pytest.mark.parametrize(
    ("encoding", "says"),
    [
        ("utf-16", "line 1 is UTF-16"),
        ("latin-1", "line 2 is not UTF-8"),
        ("utf-16-le", "line|control"),
    ],
)
def test_another_encoding_is_one_error_that_names_the_line(
    encoding: str, says: str, tmp_path: Path
) -> None:
    for kind in ("txt", "tsv", "csv", "json", "jsonl"):
        file = tmp_path / f"p.{kind}"
        file.write_bytes("red cat\na café\n".encode(encoding))
        with pytest.raises(OptionError, match=says if kind != "json" else "cannot read"):
            read_prompts(file)


def test_sets_of_evaluate_are_read_with_a_byte_order_mark(tmp_path: Path) -> None:
    for name, file, text in (
        ("coco-val2017", "c.json", json.dumps(COCO)),
        ("parti", "p.tsv", "Prompt\tCategory\nred cat\tAnimals\n"),
        ("geneval", "g.jsonl", json.dumps({"prompt": "red cat"}) + "\n"),
        ("dpg", "dpg/1.txt", "red cat"),
    ):
        place = tmp_path / file
        place.parent.mkdir(exist_ok=True)
        place.write_text(text, encoding="utf-8-sig")
        where = place.parent if name == "dpg" else place
        assert {item.prompt for item in read_set(name, where, "first", None)} == {"red cat"}
        place.write_bytes(text.encode().replace(b"red cat", b"caf\xe9"))
        with pytest.raises(OptionError, match="is not UTF-8"):
            read_set(name, where, "first", None)


@pytest.mark.parametrize("words", [["--prompt", "caf\udce9"], ["--negative-prompt", "\ud83d"]])
def test_text_that_cannot_be_encoded_is_refused_before_loading(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("lantern_hpu.pipeline.load_model", None)
    given = ["--prompt", "cat", *words, "--output", str(tmp_path / "x.png")]
    assert generate.main(given) == 2
    assert "is not valid text" in capsys.readouterr().err
    with pytest.raises(OptionError, match="is not valid text"):
        Request("cat", negative="\ud83d")


def test_what_a_console_cannot_show_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="cp1252"))
    assert exit_code(lambda: print("りんご.png, caf\udce9.png")) == 0
    sys.stdout.flush()
    assert b".png" in shown.getvalue() and b"\\u308a" in shown.getvalue()


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@examples(30)
@given(st.lists(texts.filter(lambda t: t.strip()), min_size=1, max_size=6), st.sampled_from(",;\t"))
def test_prompts_that_pandas_or_a_program_wrote_come_back(
    tmp_path: Path, prompts: list[str], mark: str
) -> None:
    wanted = [prompt.strip() for prompt in prompts]
    cells = ['"' + text.replace('"', '""') + '"' for text in prompts]
    table = "\n".join(["id" + mark + "prompt", *(f"{n}{mark}{c}" for n, c in enumerate(cells))])
    assert read_prompts(saved(tmp_path, "csv", table)) == wanted
    assert read_prompts(saved(tmp_path, "json", {"prompts": prompts})) == wanted
    if not prompts[0].startswith("\ufeff"):
        assert read_prompts(saved(tmp_path, "txt", "\n".join(prompts))) == wanted
