"""Nodes of ComfyUI that draw with a lantern_hpu server, over HTTP: a folder for ComfyUI's `custom_nodes`."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .nodes import ImageEdit, TextToImage


class LanternExtension(ComfyExtension):
    """What ComfyUI loads."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TextToImage, ImageEdit]


async def comfy_entrypoint() -> LanternExtension:
    return LanternExtension()
