"""Our cross-entropy against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from methods.training.losses import cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_and_its_gradient_are_those_of_pytorch(smoothing: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, wanted = (3 * torch.randn(7, 11)).to(dtype), torch.randint(11, (7,))
    wide = torch.promote_types(dtype, torch.float32)
    ours, theirs = logits.clone().requires_grad_(), logits.to(wide).requires_grad_()
    found = cross_entropy(ours, wanted, smoothing)
    expected = F.cross_entropy(theirs, wanted, label_smoothing=smoothing)
    (2 * found).backward()
    (2 * expected).backward()
    assert found.dtype == wide
    torch.testing.assert_close(found, expected)
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad.to(dtype))


def test_no_rows_lose_nothing() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(0, dtype=torch.long), 0.1)
    loss.backward()
    assert loss == 0
