"""The named static trees: those of the published LANTERN++, EAGLE and Medusa configurations, a chain, small ones."""

from __future__ import annotations

# Child counts of the nodes, level by level, in the order of their parents; a tree is fully described by
# them, since a node's children have the ranks 0 .. c-1. Trailing leaves are left out of each level.
NAMED: dict[str, tuple[tuple[int, ...], ...]] = {
    "naive_extend_57": (
        (5,),
        (4, 3, 3, 2, 1),
        (4, 3, 3, 2, 2, 1, 0, 1),
        (4, 3, 2, 1, 2, 1, 0, 1),
        (3, 2, 0, 0, 2, 1, 0, 1),
    ),
    "mc_sim_7b_63": ((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,)),
    "mc_sim_7b_63_balanced": ((3,), (3, 3, 2), (3, 2, 0, 2, 2), (3,), (2,)),
    "reverse_balanced_25": ((3,), (2, 1, 1), (3, 2, 1), (3, 2), (4, 3)),
    "medusa_2_7b_63": (
        (10,),
        (10, 5, 2, 2, 1, 1, 1, 1),
        (9, 4, 2, 1, 1, 1, 0, 0, 0, 0, 3, 1, 0, 0, 0, 1),
        (4, 1, 1, 0, 0, 0, 0, 0, 0, 1),
    ),
    "chain": ((1,), (1,), (1,), (1,), (1,)),
    "chain_2": ((1,), (1,)),
    "flat_4": ((4,),),
    "broad_7": ((4,), (2, 1)),
    "deep_7": ((2,), (2,), (1,), (1,), (1,)),
}
