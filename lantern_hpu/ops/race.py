"""Fixed noise of places and tokens: a counter-based generator in whole numbers that fit int32 everywhere.

To draw a token from probs p is to let tokens race: token x arrives after e[x] / p[x], with e[x] exponential, and the
first one wins. (This is the Gumbel-max trick without its logarithms.) With e a function of (seed, place, token) alone,
draws at one place from two distributions that differ little are mostly the same.

e comes from a Feistel network over the token's number, in the manner of Philox (Salmon et al., SC 2011) with words of
16 bits: products stay below 2**31, so that no device's overflow or shift of negative numbers matters. The keys of a
place come from `decode/noise.py`.
"""

from __future__ import annotations

from torch import Tensor

ROUNDS = 6
FACTORS = (0x7A2D, 0x5E63, 0x6B4F, 0x72D5, 0x4F9B, 0x69A7)  # odd, 15 bits
WORD = 0xFFFF


def race(keys: Tensor, token: Tensor) -> Tensor:
    """How fast tokens are: 1 / e, for `probs * race(...)`, whose largest entry is the token drawn.

    Args:
        keys: [..., ROUNDS] int32, 16 bits each.
        token: [V] int32.

    Returns [..., V] float32, 0 to 2**33.
    """
    high, low = token >> 16, token & WORD
    for number, factor in enumerate(FACTORS):
        product = low * factor  # below 2**31
        high, low = product & WORD, (product >> 16) ^ high ^ keys[..., number : number + 1]
    # Small numbers decide races, and a float holds them to 24 digits of their own
    share = (low.float() * 65536.0 + high.float() + 0.5) * 2.0**-32
    return -1.0 / (-share).log1p()
