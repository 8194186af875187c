"""Two nodes, text to image and edit: the server draws, and its images become ComfyUI's tensors."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Coroutine, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from comfy import model_management
from comfy_api.latest import ComfyAPI, io
from PIL import Image

from .client import Event, Server

LOOK, UNTIL = 0.1, asyncio.FIRST_EXCEPTION  # seconds between two looks for an interruption
SEED = {"min": 0, "max": 2**53 - 1, "control_after_generate": True}  # whole numbers of a browser
NUMBER = {"optional": True, "default": -1.0, "min": -1.0, "step": 0.01}
ABOUT = "Drawn by a lantern_hpu server, with speculative decoding."
REPORTED = ("seed", "method", "tree", "metrics", "warnings")


def fields() -> list[io.Input]:
    """Of both nodes. What is optional and left at `auto`, empty or -1 is the server's choice."""
    own, most = "-1: the model's own", "unfinished images to show, at most"
    here, methods = "empty: LANTERN_HPU_URL, or this machine's", "what the server has: scd, ar"
    key = "empty: LANTERN_HPU_API_KEY; workflows keep what stands here, so prefer the variable"
    return [
        io.String.Input("prompt", multiline=True, dynamic_prompts=True),
        io.Int.Input("seed", default=0, tooltip="image i has seed + i", **SEED),
        io.Int.Input("batch_size", default=1, min=1, max=10),
        io.Int.Input("previews", default=4, min=0, max=64, tooltip=most),
        io.String.Input("server", default="", tooltip=here),
        io.String.Input("api_key", default="", tooltip=key),
        io.String.Input("method", optional=True, default="auto", tooltip=methods),
        io.String.Input("size", optional=True, default="auto", tooltip="1024x1024"),
        io.String.Input("negative_prompt", optional=True, default="", multiline=True),
        io.Float.Input("cfg_scale", max=100.0, tooltip=own, **NUMBER),
        io.Float.Input("temperature", max=10.0, tooltip=own, **NUMBER),
    ]


def schema(name: str, title: str, *inputs: io.Input) -> io.Schema:
    report = io.String.Output("report", tooltip="JSON: settings, seconds, steps, warnings")
    return io.Schema(
        node_id=f"Lantern{name}",
        display_name=f"Lantern: {title}",
        category="api/lantern",
        description=ABOUT,
        inputs=list(inputs),
        outputs=[io.Image.Output("images"), report],
    )


class TextToImage(io.ComfyNode):
    """Images from a prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema("TextToImage", "text to image", *fields())

    @classmethod
    async def execute(cls, **values: Any) -> io.NodeOutput:
        return await draw("/v1/images/generations", (), **values)


class ImageEdit(io.ComfyNode):
    """Images from a prompt and pictures, by a server that has `--sources`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        more = [io.Image.Input(f"image_{number}", optional=True) for number in (2, 3, 4)]
        return schema("ImageEdit", "edit", io.Image.Input("image"), *fields(), *more)

    @classmethod
    async def execute(cls, image: torch.Tensor, **values: Any) -> io.NodeOutput:
        more = [values.pop(f"image_{number}", None) for number in (2, 3, 4)]
        batches = [image, *(batch for batch in more if batch is not None)]
        pictures = [png_of(picture) for batch in batches for picture in batch]
        return await draw("/v1/images/edits", pictures, **values)


async def draw(path: str, pictures: Sequence[bytes], **values: Any) -> io.NodeOutput:
    """`batch_size` images, each by a stream of its own; the server decodes them together. An error of one ends all."""
    server = Server.of(values.pop("server"), values.pop("api_key"))
    seed, images, previews = (values.pop(name) for name in ("seed", "batch_size", "previews"))
    parts = previews + 1  # that an image is shown in
    shown, progress = [0] * images, ComfyAPI.Execution()
    request = {name: value for name, value in values.items() if value not in ("auto", "", -1)}
    request |= {"prompt": values["prompt"], "stream": True, "partial_images": previews}

    async def one(number: int) -> Event:
        event: Event = {}
        async for event in server.events(path, {**request, "seed": seed + number}, pictures):
            whole = event["type"].endswith(".completed")
            shown[number] = parts if whole else shown[number] + 1
            image = image_of(event)
            await progress.set_progress(sum(shown), images * parts, preview_image=image)
        return event

    events = await unless_interrupted([one(number) for number in range(images)])
    report = [{name: event[name] for name in REPORTED} for event in events]
    pixels = np.stack([np.asarray(image_of(event)) for event in events])  # [B, H, W, 3]
    return io.NodeOutput(torch.from_numpy(pixels).float() / 255, json.dumps(report, indent=2))


async def unless_interrupted(images: Sequence[Coroutine[Any, Any, Event]]) -> list[Event]:
    """All of them. An error or ComfyUI's interruption closes the connections, which frees the server's slots."""
    tasks = [asyncio.ensure_future(image) for image in images]
    waiting = set(tasks)
    try:
        while waiting:
            model_management.throw_exception_if_processing_interrupted()
            done, waiting = await asyncio.wait(waiting, timeout=LOOK, return_when=UNTIL)
            await asyncio.gather(*done)
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def image_of(event: Event) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(event["b64_json"]))).convert("RGB")


def png_of(picture: torch.Tensor) -> bytes:
    """A file of [H, W, 3], or of 4 channels with transparency, 0 to 1."""
    values = picture.detach().cpu().float().clamp(0, 1) * 255
    file = BytesIO()
    Image.fromarray(values.round().to(torch.uint8).numpy()).save(file, "PNG")
    return file.getvalue()
