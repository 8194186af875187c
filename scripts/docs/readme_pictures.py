"""Draw the sheet of docs/embedded-model.md: a row of prompts for each seed, by `ar`.

python -m scripts.docs.readme_pictures --output docs/images/examples.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from lantern_hpu import LanternPipeline
from lantern_hpu.files import write_file
from lantern_hpu.results.images import encode

PROMPTS = (
    "a red apple",
    "snowy mountains at sunrise",
    "a lighthouse in a storm",
    "a sailboat on the sea at sunset",
    "a red balloon over green hills",
    "a cactus in the desert",
    "a house by a lake at night",
    "purple plums on a table",
)
LABEL = 92  # pixels at the left of each row
HEAD = 34  # pixels above the first row


def caption(prompt: str) -> str:
    """The prompt in lines short enough to stand above its picture."""
    words, lines = prompt.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 18:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def sheet(rows: dict[str, list[Image.Image]], prompts: tuple[str, ...], size: int) -> Image.Image:
    """Pictures [method][prompt] with the prompts above and the methods at the left."""
    width, height = LABEL + size * len(prompts), HEAD + size * len(rows)
    page = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(11)
    for column, prompt in enumerate(prompts):
        place = (LABEL + size * column + size // 2, HEAD // 2)
        pen.multiline_text(place, caption(prompt), "black", font, anchor="mm", align="center")
    for line, (label, images) in enumerate(rows.items()):
        top = HEAD + size * line
        pen.multiline_text((6, top + size // 2), label, "black", font, anchor="lm")
        for column, image in enumerate(images):
            small = image.resize((size - 6, size - 6), Image.Resampling.LANCZOS)
            page.paste(small, (LABEL + size * column + 3, top + 3))
    return page


def by_seed(pipeline: LanternPipeline, seed: int, count: int) -> dict[str, list[Image.Image]]:
    """Several pictures of each prompt."""
    images = pipeline(PROMPTS, num_images_per_prompt=count, seed=seed, method="ar").images
    return {f"picture {k + 1}": images[k::count] for k in range(count)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the sheet of docs/embedded-model.md.")
    parser.add_argument("--output", type=Path, default=Path("docs/images/examples.png"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=4, help="pictures a prompt")
    parser.add_argument("--size", type=int, default=134, help="pixels of a picture with its margin")
    arguments = parser.parse_args()
    pipeline = LanternPipeline.from_pretrained("builtin")
    rows = by_seed(pipeline, arguments.seed, arguments.seeds)
    write_file(arguments.output, encode(sheet(rows, PROMPTS, arguments.size)), force=True)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
