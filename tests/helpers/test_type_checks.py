"""A wrong type is refused in every test, early or late among the calls of a function, and in a data class."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from methods.decoder import Step
from methods.engine.sampling import argmax
from tests.helpers import type_checks


@pytest.mark.parametrize("calls", [0, type_checks.FIRST - 1, 63])
def test_a_wrong_shape_is_refused(calls: int) -> None:
    for _ in range(calls):
        argmax(torch.zeros(2, 3))
    with pytest.raises(TypeCheckError):
        argmax([0.0])


def test_other_calls_are_not_checked() -> None:
    for _ in range(type_checks.FIRST):
        argmax(torch.zeros(2, 3))
    with pytest.raises(AttributeError):
        argmax([0.0])


def test_a_data_class_is_checked() -> None:
    with pytest.raises(TypeCheckError):
        Step([[0]], drafted="none", accepted=[0], layers=[1.0], depth=[0])
