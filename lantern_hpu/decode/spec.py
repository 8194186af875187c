"""What fixes a step's graph. Needs no torch.

Values that differ from request to request are rounded up to a few classes, so that two requests that differ a
little share one graph and one state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lantern_hpu.core import Request
from lantern_hpu.errors import Arg, OptionError, require, words
from lantern_hpu.methods.relaxation import Relaxation, Residual, refused
from lantern_hpu.methods.setting import check_acceptance
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.tree import Tree, Window

BLOCK = 16  # most steps between two host reads
BATCHES = (1, 2, 3, 4, 6, 8)  # sizes of a batch where none is asked for
LEAST_CLASS = 16  # of top-k and neighbours
LEAST_RANKS = 7  # of a cluster, as published
# Fields of a spec whose larger values serve the smaller ones too
GROWING = (
    "guidance use_greedy max_top_k use_top_p neighbours annealed ranks blended logprobs".split()
)
LOSSLESS_HINT = words("a lossless method:", Arg("method", "ar"), "or scd")
NOISE_BYTES = 2**28  # of a batch's fixed noise, at most; more is made in each step


@dataclass(frozen=True)
class Spec:
    """A different spec is a different graph."""

    images: int  # B
    guidance: bool  # two rows an image
    tree: Tree
    block: int = BLOCK  # most steps between two host reads; uniforms are copied in for that many
    max_top_k: int = 0  # 0: no image uses top-k
    use_top_p: bool = False
    use_greedy: bool = False  # some image is greedy
    use_sampled: bool = True  # some image is sampled
    neighbours: int = 0  # K, neighbours kept; 0: no image lends their mass
    annealed: bool = False  # some image weighs its drafts by depth
    ranks: int = 0  # most ranks that a cluster reaches up and down; 0: no image has clusters
    blended: bool = False  # some image blends the drafter's distribution into the target's
    together: bool = False  # drafts are verified together
    residual: Residual = "sound"
    metered: bool = False  # what relaxation costs an image is added up
    logprobs: bool = False  # some image keeps the log-probabilities of its tokens
    open: bool = False  # images are also admitted one by one, while others go on
    grid: tuple[int, int] | None = None  # of the picture; None: the model's
    prefix: int | None = None  # P; None: the model's

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        tree: Tree,
        images: int,
        config: TransformerConfig,
    ) -> Spec:
        """What these requests need, in a batch of that many images; what none of them uses is left out.

        `config` is of the target, for their size.
        """
        samplings = [request.sampling for request in requests]
        need = neighbours_needed(requests, config.codes)
        check_drawable(tree, requests, config)
        reach = max((r.relaxation.limits[0] for r in requests if r.relaxation.clusters), default=0)
        limited = [s.top_k for s in samplings if 0 < s.top_k < config.vocab_size and not s.greedy]
        return cls(
            images,
            any(s.cfg_scale != 1 for s in samplings),
            tree,
            max_top_k=min(rounded_up(max(limited, default=0)), config.vocab_size),
            use_top_p=any(s.top_p < 1 and not s.greedy for s in samplings),
            use_greedy=any(s.greedy for s in samplings),
            use_sampled=not all(s.greedy for s in samplings),
            neighbours=min(rounded_up(need), config.codes - 1),
            annealed=any(r.relaxation.weighs for r in requests),
            ranks=(1 << max(reach, LEAST_RANKS).bit_length()) - 1 if reach else 0,
            blended=any(r.relaxation.tv > 0 for r in requests),
            together=verified_together(requests),
            residual=common_residual(requests),
            metered=tree.commit > 1
            or (tree.depth > 0 and any(r.relaxation.metered for r in requests)),
            logprobs=any(r.logprobs for r in requests),
            grid=config.grid if config.code_pixels else None,
            prefix=config.prefix if config.prefixes or config.sourced else None,
        )

    def first_missing(self, need: Spec) -> str:
        """The first field of which another spec needs more than this graph does; empty if it serves that one."""
        more = (name for name in GROWING if getattr(need, name) > getattr(self, name))
        other = "residual" if need.neighbours > 0 and need.residual != self.residual else ""
        return next(more, "together" if need.together != self.together else other)

    def sizes(self, config: TransformerConfig) -> TransformerConfig:
        """A target's, as these images need them."""
        grid, prefix = self.grid or config.grid, self.prefix or config.prefix
        same = (grid, prefix) == (config.grid, config.prefix)
        return config if same else replace(config, grid=grid, prefix=prefix)

    @property
    def rows(self) -> int:
        """R, sequences on the device."""
        return self.images * (2 if self.guidance else 1)

    @property
    def draws(self) -> int:
        """Uniforms a step takes for an image: drafts, acceptance, bonus token; the last is there if no other is."""
        tries = 0 if self.tree.commit else self.tree.depth * self.tree.max_children
        tries = self.tree.size - 1 if self.together else tries
        return self.tree.draws + tries + 1

    @property
    def max_step_tokens(self) -> int:
        """Most tokens that one step can add; on a fixed schedule as many as each step adds."""
        return self.tree.commit or self.tree.depth + 1


def common_residual(requests: Sequence[Request]) -> Residual:
    """That of the requests whose neighbours lend; an OptionError if there are two."""
    residuals = {r.relaxation.residual for r in requests if r.relaxation.lends} or {"sound"}
    if len(residuals) > 1:
        raise OptionError("two residuals in one batch", "the residual is part of the graph")
    return residuals.pop()


def verified_together(requests: Sequence[Request]) -> bool:
    """Whether the drafts of these requests are; an OptionError if those of some alone are."""
    ways = {r.relaxation.verify == "block" for r in requests}
    if len(ways) > 1:
        why = "how drafts are verified is part of the graph"
        raise OptionError("block and token in one batch", why, "verify=token", field="method")
    return True in ways


def neighbours_needed(requests: Sequence[Request], codes: int) -> int:
    """Neighbours of a code that some request looks at."""
    most = max((r.relaxation.k for r in requests if r.relaxation.lends), default=0)
    if most >= codes:
        raise refused(f"k is {most}", f"allowed: 0 to {codes - 1}, the neighbours of a code")
    # The published residual looks one neighbour further than the bound.
    return min(most + 1, codes - 1) if most else 0


def check_drawable(tree: Tree, requests: Sequence[Request], config: TransformerConfig) -> None:
    """Raise an OptionError for a tree that these images cannot be drawn with."""
    if tree.max_children > config.codes:
        why = f"allowed: at most {config.codes} children of a node"
        raise refused(f"the tree is {tree.name}", why)
    for request in requests:
        check_acceptance(tree, request.relaxation)
        if request.logprobs and (why := why_no_logprobs(tree, request.relaxation)):
            raise OptionError("logprobs cannot be had", why, LOSSLESS_HINT, field="logprobs")
    most = config.tokens - 1
    if isinstance(tree, Window) and tree.width > most:
        why = f"allowed: at most {most}, the rest of the image"
        raise refused(f"the window is {tree.width}", why)


def why_no_logprobs(tree: Tree, relaxation: Relaxation) -> str:
    """Why a token's distribution is not known; empty where it is the target's."""
    if relaxation.active:
        return "relaxed acceptance draws from no distribution that is known"
    if tree.commit > 1:
        return "a fixed schedule of several tokens draws them from distributions a step old"
    return ""


def keeps_noise(config: TransformerConfig, tree: Tree, images: int) -> bool:
    """Whether the fixed noise of a window is kept for whole images, or made in each step."""
    if not isinstance(tree, Window) or tree.rule == "sjd-pac":
        return False
    return 4 * images * config.tokens * config.vocab_size <= NOISE_BYTES


def rounded_up(count: int) -> int:
    """The least power of two that holds a count; 0 stays 0."""
    return max(LEAST_CLASS, 1 << (count - 1).bit_length()) if count else 0


def batch_size_for(images: int, wanted: int | None = None) -> int:
    """How many of n images are decoded together, if it is not settled.

    Ten images in batches of at most eight are two batches of six, not eight and two.
    """
    require(wanted is None or wanted >= 1, "batch_size", wanted, "1 or more")
    if wanted:
        return wanted
    batches = -(-images // BATCHES[-1])
    return BATCHES[bisect_left(BATCHES, -(-images // max(batches, 1)))]


def token_columns(config: TransformerConfig, tree: Tree) -> int:
    """Width of an image's row of tokens: the image, and scratch for what a step writes past its end."""
    return config.tokens + tree.depth + 1


def capacity(config: TransformerConfig, tree: Tree) -> int:
    """S: prefix, image and one tree beyond them, so that a finished image still writes into its own row."""
    need = config.prefix + config.tokens + max(tree.size, tree.depth + 1, tree.scratch)
    return -(-need // 64) * 64
