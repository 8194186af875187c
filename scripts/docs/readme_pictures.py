"""Draw the sheet of docs/embedded-model.md: a row of prompts for each seed, by `ar`.

python -m scripts.docs.readme_pictures --output docs/images/examples.png
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from lantern_hpu import LanternPipeline
from lantern_hpu.files import write_file
from lantern_hpu.results.images import encode

PROMPTS = (
    "a red apple",
    "a pyramid in the desert at sunset",
    "a lighthouse in a storm",
    "an orange pumpkin on a table",
    "a red balloon over green hills",
    "a cactus in the desert",
    "a house by a lake at night",
    "purple plums on a table",
)
LABEL = 92  # pixels at the left of each row
HEAD = 34  # pixels above the first row


def sheet(rows: dict[str, list[Image.Image]], size: int) -> Image.Image:
    """Pictures [label][prompt] with the prompts above and the labels at the left."""
    page = Image.new("RGB", (LABEL + size * len(PROMPTS), HEAD + size * len(rows)), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(11)
    for column, prompt in enumerate(PROMPTS):
        place = (LABEL + size * column + size // 2, HEAD // 2)
        text = textwrap.fill(prompt, 18)
        pen.multiline_text(place, text, "black", font, anchor="mm", align="center")
    for line, (label, images) in enumerate(rows.items()):
        top = HEAD + size * line
        pen.text((6, top + size // 2), label, "black", font, anchor="lm")
        for column, image in enumerate(images):
            small = image.resize((size - 6, size - 6), Image.Resampling.LANCZOS)
            page.paste(small, (LABEL + size * column + 3, top + 3))
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the sheet of docs/embedded-model.md.")
    parser.add_argument("--output", type=Path, default=Path("examples.png"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=4, help="pictures a prompt")
    parser.add_argument("--size", type=int, default=134, help="pixels of a picture with its margin")
    args = parser.parse_args()
    pipe, count = LanternPipeline.from_pretrained("builtin"), args.seeds
    images = pipe(PROMPTS, num_images_per_prompt=count, seed=args.seed, method="ar").images
    rows = {f"picture {k + 1}": images[k::count] for k in range(count)}
    write_file(args.output, encode(sheet(rows, args.size)), force=True)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
