"""What a run sees of its device beside the measured times: limits before them; clocks, energy and traces after them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.config.schema import MeasureConfig
from bench.measure import energy_blocks, probes, profiling
from bench.measure.interleave import MethodArm, Runner
from bench.utils.progress import stage
from methods.decoder import Decoder


def record_peaks(arms: Sequence[MethodArm], device: torch.device, options: MeasureConfig) -> None:
    """Measure the bandwidth of the memory: on a GPU always, on a CPU, where it takes longer, with ``profile``."""
    if device.type == "cuda" or options.profile:
        found = probes.bandwidth(device, torch.bfloat16, torch.get_num_threads())
        for arm in arms:
            arm.folder.update(peaks=found)


def observe(arms: Sequence[MethodArm], runner: Runner, options: MeasureConfig) -> None:
    """Record clocks and, as far as they are asked for and can be had, energy and traces.

    Args:
        arms: methods that were measured.
    """
    log = runner.instruments.clocks
    for arm in arms:
        if log.readings and "clocks" not in arm.folder.manifest:
            arm.folder.update(clocks=log.to_manifest())
    if options.energy_block_s and runner.instruments.energy.joules() is not None:
        stage(f"measuring the energy of blocks of {options.energy_block_s:g} s")
        energy_blocks.measure(runner, arms, options.energy_block_s)
    if options.profile:
        stage("tracing some rounds of each arm")
        _trace(arms, runner)


def _trace(arms: Sequence[MethodArm], runner: Runner) -> None:
    before = _traced(runner, runner.baseline)
    for arm in arms:
        own = _traced(runner, arm.decoder)
        for name, found in (("baseline", before), ("method", own)):
            found.write(arm.folder.path, name)
        arm.folder.update(profile={"baseline": before.facts(), "method": own.facts()})


def _traced(runner: Runner, decoder: Decoder) -> profiling.Trace:
    rng = torch.Generator(device=runner.instruments.device).manual_seed(runner.settings.seed)
    return profiling.trace(decoder, runner.first_prompts(), runner.settings.limit, rng)
