"""The training loop: batches that differ between epochs, and the gradients of a loss in parts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from methods.training import trainer as trainer_module
from methods.training.interface import TrainingContext
from methods.training.trainer import Epochs, Trainer, TrainingConfig, added
from methods.training.translation import batches


def test_epochs_may_have_different_numbers_of_batches() -> None:
    made: list[int] = []

    def make(epoch: int) -> list[list[int]]:
        made.append(epoch)
        return [[epoch, place] for place in range(2 + epoch)]

    epochs = Epochs(make)
    wanted = [[epoch, place] for epoch in range(4) for place in range(2 + epoch)]
    assert [epochs.batch(step) for step in range(14)] == wanted and made == [0, 1, 2, 3]
    assert Epochs(make).batch(9) == [3, 0], "a training resumes anywhere"
    assert [epochs.count(step) for step in (0, 1, 2, 5, 7)] == [0.0, 0.5, 1.0, 2.0, 2.5]


def test_a_mixed_batch_has_different_lengths_and_each_epoch_other_ones() -> None:
    rng = random.Random(0)
    pairs = [([1] * rng.randint(3, 9), [1] * rng.randint(3, 9)) for _ in range(400)]
    whole = [batches(pairs, 90), *(batches(pairs, 90, 3.0, random.Random(seed)) for seed in (1, 1, 2))]
    for found in whole:
        assert sorted(place for batch in found for place in batch) == list(range(400))
        for batch in found:
            assert len(batch) * max(max(map(len, pairs[place])) for place in batch) <= 90
    equal, mixed, same, other = whole
    assert mixed == same != other
    lengths = [[len({len(pairs[place][0]) for place in batch}) for batch in found] for found in (equal, mixed)]
    assert sum(lengths[1]) / len(lengths[1]) > 1.5 * sum(lengths[0]) / len(lengths[0])


class Two(nn.Module):
    """Two weights, each in its own part of the loss, and one in both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.both = (nn.Parameter(torch.ones(())) for _ in range(3))


def test_gradients_of_the_parts_are_logged_before_clipping(tmp_path: Path) -> None:
    module, points = Two(), list[dict[str, Any]]()
    config = TrainingConfig(steps=100, learning_rate=1e-9, clip=0.1, precision="float32", evaluations=1)
    context = TrainingContext(output=tmp_path, shared_cache=tmp_path, log=points.append)
    trainer = Trainer(config, module, context, "data")

    def loss(batch: int, step: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        return {"first": 3 * module.one + 4 * module.both, "second": 12 * module.two - 5 * module.both}, {}

    trainer.run(loss, lambda step: step, lambda: ({}, {}))
    logged = [point for point in points if "gradient_first" in point]
    assert [point["step"] for point in logged] == [100] and len(points) > 5
    assert logged[0]["gradient_first"] == pytest.approx(5) and logged[0]["gradient_second"] == pytest.approx(13)
    assert logged[0]["gradient"] == pytest.approx((9 + 144 + 1) ** 0.5), "of the sum"
    assert logged[0]["loss"] == pytest.approx(3 + 4 + 12 - 5)


def test_parts_are_added() -> None:
    assert float(added({"one": torch.tensor(2.0), "two": torch.tensor(3.0)})) == 5 == float(added(torch.tensor(5.0)))


def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, **options: Any) -> tuple[Trainer, list[int]]:
    """A training whose every step takes so long by the clock; the places of its steps."""
    now, places = [0.0], list[int]()
    monkeypatch.setattr(trainer_module, "process_time", lambda: now[0])
    config = TrainingConfig(precision="float32", **options)
    trainer = Trainer(config, Two(), TrainingContext(output=tmp_path, shared_cache=tmp_path), "data")

    def loss(batch: int, place: int) -> tuple[Tensor, dict[str, float]]:
        places.append(place)
        now[0] += seconds
        return trainer.module.both**2, {}

    trainer.run(loss, lambda step: step, lambda: ({}, {}))
    return trainer, places


def test_minutes_end_a_training_and_run_through_its_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, places = timed(tmp_path, monkeypatch, 1.5, minutes=1.0, steps=1000, evaluations=4)
    assert trainer.step == 40 and places == [25 * step for step in range(40)]
    assert trainer.facts["minutes"] == 1.0 and trainer.seconds == 60
    assert [(point["step"], point["minutes"]) for point in trainer.curve] == [
        (10, 0.25),
        (20, 0.5),
        (30, 0.75),
        (40, 1),
    ]
    rates = [trainer.config.rate(place) for place in places]
    assert rates[0] < max(rates) and rates[-1] < 0.1, "it rises, and has fallen at the end"


def test_a_step_longer_than_all_minutes_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, places = timed(tmp_path, monkeypatch, 90.0, minutes=1.0, steps=1000, evaluations=4)
    assert places == [0] and [point["step"] for point in trainer.curve] == [1]


def test_time_counts_over_interruptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = timed(tmp_path, monkeypatch, 2.0, minutes=1.0, steps=100, evaluations=1)
    assert first.step == 30
    again, places = timed(tmp_path, monkeypatch, 2.0, minutes=2.0, steps=100, evaluations=1)
    assert (again.step, places[0]) == (60, 50), "the state of the first minute is taken up"


def test_minutes_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"minutes must be above 0, got 0\.0"):
        TrainingConfig(minutes=0.0)
