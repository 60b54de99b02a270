"""What every decoder must satisfy, as functions."""

from bench.contract.checks import (
    Make,
    check_batch,
    check_counters,
    check_greedy_identity,
    check_guarantee,
    check_no_leak,
    check_sampling,
    greedy_reference,
    joint_distribution,
    outputs,
    prompts,
    tiny_target,
)

__all__ = [
    "Make",
    "check_batch",
    "check_counters",
    "check_greedy_identity",
    "check_guarantee",
    "check_no_leak",
    "check_sampling",
    "greedy_reference",
    "joint_distribution",
    "outputs",
    "prompts",
    "tiny_target",
]
