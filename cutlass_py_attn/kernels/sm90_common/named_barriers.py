"""Named barriers of the sm90 backwards, the wide kernels and the MLA decode. Barrier 0 is that of `sync_threads`."""

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


class WideBarrier(IntEnum):
    """Named barriers of the wide kernels; P or dS of a tile lies in the buffer of the warpgroup that computes it."""

    P_FULL_0 = 1  # one for each buffer of P: its warpgroup arrives, the other waits
    P_FULL_1 = 2
    P_EMPTY_0 = 3  # the other way
    P_EMPTY_1 = 4
    WARPGROUP_0 = 5  # one for each warpgroup alone
    WARPGROUP_1 = 6
    SUMS_0 = 7  # one for each warpgroup's row sums: it arrives, the other waits
    SUMS_1 = 8


class MlaDecodeBarrier(IntEnum):
    """Named barriers of the MLA decode; P of a latent tile lies in its slot, which one warpgroup computes."""

    P_FULL_0 = 1  # one for each slot: its warpgroup arrives, the other waits
    P_FULL_1 = 2
    WARPGROUP_0 = 3  # one for each warpgroup alone
    WARPGROUP_1 = 4
    # A pair for each place where both wait for each other: a warpgroup arrives at its own, and the other waits there.
    # One pair is not enough: a warpgroup may pass the next place before the other has waited at this one.
    QUERY_EMPTY_0 = 5
    QUERY_EMPTY_1 = 6
    QUERY_FULL_0 = 7
    QUERY_FULL_1 = 8
    SUMS_0 = 9
    SUMS_1 = 10
