"""Schedule of the sm90 backward: the order in which a consumer warpgroup takes the steps of one query block.

A step is the name of the consumers' method that takes it. Steps issue_... start a GEMM, steps finish_... wait for one,
and the others compute while GEMMs are in flight. How many stay in flight during a wait follows from the order.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_py_attn.kernels.backward_parts.layout import starts_from_logsumexp
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import KEEPS_DS


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of an iteration; dK of the iteration before is in flight when it starts.

    block: of this query block, up to its dS
    next_block: those that begin the next one, behind which dK of this one is issued
    """

    block: tuple[str, ...]
    next_block: tuple[str, ...]

    def has(self, step: str) -> bool:
        """Returns whether an iteration takes the step."""
        return step in self.block + self.next_block

    def pending(self, finished: str) -> int:
        """Returns how many GEMMs may be in flight once `finished` has ended: scores, dp, dv or dk."""
        steps, in_flight = self.block + self.next_block, ["dk"]
        for step in steps[: steps.index(f"finish_{finished}") + 1]:
            verb, _, gemm = step.partition("_")
            if verb == "issue":
                in_flight.append(gemm)
            elif verb == "finish" and gemm in in_flight:
                del in_flight[: in_flight.index(gemm) + 1]
        return len(in_flight)


def schedule_of(build: Build) -> Schedule:
    """Returns the order of a build of the sm90 backward.

    If a thread has registers for it, the logsumexp is read while S is multiplied. In the variants that keep dS in
    registers, P takes the registers of the last dS, and so does the bias, which is read before P is computed; dS takes
    those of P. Where dV is issued before dP, it ends with dP.
    """
    starts_lse, has_bias = starts_from_logsumexp(build), build.has("bias")
    is_narrow = build.block_queries <= 64 and not {"dropout", "softcap"} & {*build.features}
    read = "" if is_narrow or starts_lse else "read_logsumexp"
    read_next = "read_next_logsumexp" if is_narrow and not starts_lse else ""
    load_bias = "load_bias" if has_bias else ""
    weights = "convert_weights wait_for_grad_output"
    if build.variant not in KEEPS_DS:
        return _schedule(
            f"{read} locate apply_terms exponentiate {weights} issue_dp issue_dv {load_bias} finish_dk finish_dp "
            "read_delta compute_ds store_ds",
            f"issue_scores issue_dk {read_next} finish_dv",
        )
    scores = "finish_dk apply_terms exponentiate" if has_bias else "apply_terms exponentiate finish_dk"
    issued = "issue_dp issue_dv" if starts_lse else "issue_dv issue_dp"
    return _schedule(
        f"{read} locate {scores} {weights} {issued} {load_bias} finish_dp compute_ds finish_dv store_ds",
        f"issue_scores issue_dk {read_next}",
    )


def steps_of(build: Build) -> tuple[str, ...]:
    """Returns the steps of an iteration."""
    schedule = schedule_of(build)
    return schedule.block + schedule.next_block


def _schedule(block: str, next_block: str) -> Schedule:
    return Schedule(tuple(block.split()), tuple(next_block.split()))
