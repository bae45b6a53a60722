"""Measures at load whether steps of more than a few rows multiply with a packed weight in bands or in groups of warps.

Both are kernels of ours: see `packed_bands` and `packed_groups`. They give a row other numbers, so a pass takes what
its step takes. Each width of steps has its own choice.
"""

from __future__ import annotations

import logging

from millstream.backend.kernels import matmul_tilings, matmul_tuning, packed_groups
from millstream.backend.kernels.compiled import rehearse
from millstream.backend.kernels.matmul_tuning import Key, Role
from millstream.backend.kernels.weights import Dense, Packed
from millstream.backend.layers import matmul_choice, packed_products
from millstream.backend.layers.matmul_choice import Agrees, Measure

log = logging.getLogger(__name__)

MIN_BYTES = 1 << 20
"""Of a weight that is worth measuring."""


def tune_groups(role: Role, weight: Packed, measure: Measure, agrees: Agrees) -> None:
    """Choose for all weights of this size, unless that is done. Groups are taken where they are faster, once their
    numbers were seen to be right. A weight with counters decides, if there should be any."""
    size = matmul_tuning.size_of(weight)
    widths = [width for width in packed_groups.GROUP_WIDTHS if not matmul_tuning.groups_known(size, width)]
    if not widths or weight.packed.nbytes < MIN_BYTES or not packed_groups.takes():
        return
    if packed_groups.parts_of(weight) != matmul_tilings.parts_of(weight.outputs):
        return

    def take(key: Key, groups: bool) -> float:
        matmul_tuning.decide_groups(size, key[-1], groups)
        return measure(key, weight, False)

    keys: list[Key] = [(role, weight.outputs, weight.inputs, width) for width in widths]
    rehearse(lambda: [take(key, groups) for key in keys for groups in (False, True)])
    for key in keys:
        width, taken = key[-1], False
        try:
            bands, groups = take(key, False), take(key, True)
            right = agrees(key, weight)
            taken = right and groups < bands
        except RuntimeError as error:  # one of them cannot be compiled or launched
            log.warning(
                "products of %dx%d, %s, are computed in bands for %d rows: %s", *key[1:3], size[0], width, error
            )
        else:
            if not right:
                log.warning(
                    "products of %dx%d, %s, are computed in bands for %d rows: groups give other numbers",
                    *key[1:3],
                    size[0],
                    width,
                )
            log.debug("%s of %dx%d, %d rows: %.3f ms in groups, %.3f in bands", *key, 1e3 * groups, 1e3 * bands)
        matmul_tuning.decide_groups(size, width, taken)


def agrees(key: Key, weight: Packed) -> bool:
    """Whether our kernel gives the numbers of MLX with the unpacked weight, but for rounding."""
    plain = packed_products.unpacked_by_mlx(weight, matmul_choice.dtype_of(weight))
    return matmul_choice.agrees(key, weight, Dense(plain))
