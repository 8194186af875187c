"""What `generate` is to draw, and with what: checked as far as it can be before torch is imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lantern_hpu.commands import options
from lantern_hpu.decode.spec import batch_size_for
from lantern_hpu.errors import OptionError, require
from lantern_hpu.methods.request import MAX_IMAGES, Request, Sampling, size_of
from lantern_hpu.methods.setting import Resolved, Setting, check_drafter, lacks_drafter
from lantern_hpu.models.files.parts import Given
from lantern_hpu.models.options import DeviceOptions
from lantern_hpu.models.text.classes import class_index
from lantern_hpu.models.text.frames import no_negative, takes_negative
from lantern_hpu.results.prompts import read_prompts
from lantern_hpu.zoo.sizes import stretch_sizes

if TYPE_CHECKING:
    from lantern_hpu.models.files.load import Opened
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results.outputs import Outputs


@dataclass(frozen=True)
class GenerateJob:
    """What to draw, with what; all of it checked as far as it can be without torch.

    Attributes:
        prompts: one an image. labels: whether some are class labels.
        setting: as asked for; resolved once the model is loaded.
        known: settings of the image that is to be drawn again.
    """

    prompts: list[str]
    seed: int
    model: str
    given: Given
    device: DeviceOptions
    batch_size: int | None = None
    labels: bool = False
    negative: str | None = None
    size: tuple[int, int] | None = None
    setting: Setting = field(default_factory=Setting)
    known: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        batch_size_for(len(self.prompts), self.batch_size)
        for index, prompt in enumerate(self.prompts):
            Request(prompt, self.seed + index, size=self.size)

    def check_model(self, opened: Opened) -> None:
        """Refuse what a model cannot draw, before its weights are read.

        Raises:
            OptionError: it reads no class labels or no negative prompt, or has no drafter for the method.
        """
        condition, name = opened.config.condition, opened.source.name
        if self.labels and condition.kind != "classes":
            why = f"{name} draws from text"
            raise OptionError("--class-label cannot be used", why, "--prompt")
        if self.negative is not None and not takes_negative(condition):
            raise no_negative(name)
        setting = self.setting if self.known is None else Setting(self.known["method"])
        if opened.config.drafter is None and setting.needs_drafter:
            raise lacks_drafter(name, f"--method {setting.method}")


def job_of(args: argparse.Namespace) -> GenerateJob:
    """What the options ask for.

    Raises:
        LanternError: they contradict each other, or one is out of range.
    """
    require(args.preview_every >= 0, "--preview-every", args.preview_every, "0 (off) or more")
    if args.resume and (args.force or args.grid or args.save_tokens):
        why = "it keeps the images that are there, and only their pixels"
        raise OptionError("--resume excludes --force, --grid and --save-tokens", why)
    if args.from_png:
        from lantern_hpu.commands.generate_again import job_again

        return job_again(args)
    return new_job(args)


def new_job(args: argparse.Namespace) -> GenerateJob:
    listed = read_prompts(args.prompts_file) if args.prompts_file else []
    prompts = [*(prompt.strip() for prompt in args.prompt), *args.class_label, *listed]
    if not prompts:
        raise OptionError("nothing to draw", "no prompt was given", '--prompt "a red apple"')
    count = 1 if args.num_images is None else args.num_images
    most = MAX_IMAGES // len(prompts)
    require(1 <= count <= most, "--num-images", count, f"1 to {most}")
    for label in args.class_label:
        class_index(label)
    setting = options.setting_of(args)
    check_drafter(setting.method, args.drafter)
    if args.stretch is not None:
        stretch_sizes(args.stretch, options.given_parts(args))
    job = GenerateJob(
        prompts=[prompt for prompt in prompts for _ in range(count)],
        seed=args.seed or 0,
        model=args.model or "builtin",
        given=options.given_parts(args),
        device=options.device_options(args),
        batch_size=args.batch_size,
        labels=bool(args.class_label),
        negative=args.negative_prompt,
        size=size_of(args.height, args.width),
        setting=setting,
    )
    options.sampling_options(args, Sampling())
    return job


def outputs_of(args: argparse.Namespace, prompts: Sequence[str]) -> Outputs:
    """The files of a run.

    Raises:
        OutputError, OptionError: some could not be written later.
    """
    from lantern_hpu.results.outputs import Outputs

    return Outputs.of(
        args.output,
        prompts,
        sheet=args.grid,
        previews=bool(args.preview_every),
        report=args.report,
        tokens=args.save_tokens,
        resume=args.resume,
        force=args.force,
    )


def resolve_job(
    job: GenerateJob, pipeline: LanternPipeline, args: argparse.Namespace
) -> tuple[Resolved, Sampling]:
    """What was left to the model and the device, or is that of the image to draw again.

    Raises:
        WeightsError: the image was drawn with other weights.
    """
    if job.known is not None:
        from lantern_hpu.results.again import settings_again

        return settings_again(args.from_png, job.known, job.model, pipeline.model.files)
    setting = pipeline.resolve(job.setting, batch_size_for(len(job.prompts), job.batch_size))
    return setting, options.sampling_options(args, pipeline.model.sampling)


def requests_of(job: GenerateJob, chosen: Resolved, sampling: Sampling) -> list[Request]:
    """One an image, each with the next seed."""
    shared = (sampling, chosen.relaxation, job.negative, job.size)
    return [Request(p, job.seed + i, *shared) for i, p in enumerate(job.prompts)]
