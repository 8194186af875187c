"""Draw images from prompts: `python -m lantern_hpu.generate --prompt "a red apple" --output apple.png`."""

import sys

from lantern_hpu.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
