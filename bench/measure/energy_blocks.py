"""Energy of each arm over a block of seconds.

The counter of a GPU advances every 20 to 100 ms, while a prompt takes less than a second and the arms take turns, so
the energy of one section is partly that of its neighbour. A block decodes with one arm alone, prompts of the run over
and over, between two readings of the counter.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.measure.interleave import MethodArm, Runner
from methods.decoder import Decoder


def measure(runner: Runner, arms: Sequence[MethodArm], least_s: float) -> None:
    """Measure a block of the baseline and one of each method, into the manifests; known ones are kept.

    Args:
        least_s: seconds of a block, which ends with the prompt that it is at.
    """
    todo = [arm for arm in arms if "energy" not in arm.folder.manifest]
    if not todo:
        return
    baseline = _block(runner, runner.baseline, least_s)
    for arm in todo:
        arm.folder.update(energy={"baseline": baseline, "method": _block(runner, arm.decoder, least_s)})


def _block(runner: Runner, decoder: Decoder, least_s: float) -> dict[str, float]:
    before = runner.instruments.energy.joules()
    seconds, tokens = runner.decode_for(decoder, least_s)
    after = runner.instruments.energy.joules()
    assert before is not None and after is not None, "asked for where there is a counter"
    return {"seconds": seconds, "joules": after - before, "tokens": float(tokens)}
