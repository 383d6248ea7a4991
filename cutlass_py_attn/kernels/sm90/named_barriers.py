"""Named barriers of the sm90 backward kernels. Barrier 0 is that of `sync_threads`."""

from enum import IntEnum


class BackwardBarrier(IntEnum):
    """Named barriers of the standard and the per-head kernel."""

    CONSUMER_WARPGROUPS = 1  # both consumer warpgroups
    CONSUMER_0 = 2  # one for each consumer warpgroup
    CONSUMER_1 = 3
    GRAD_QUERY = 4  # the warpgroup of dQ


class Backward2CtaBarrier(IntEnum):
    """Named barriers of the 2-CTA kernel."""

    DS_WARPGROUP = 1  # the warpgroup of dP, dS and dK
    P_FULL_0 = 2  # one for each stage of P
    P_FULL_1 = 3
    GRAD_QUERY = 4  # the warpgroup of dQ
