"""Our losses against the plain formulas and PyTorch's gradients of them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from methods.training import losses
from methods.training.losses import (
    DraftLoss,
    LossKind,
    cross_entropy,
    ctc_loss,
    draft_loss,
    draft_loss_of_states,
    log_probs_at,
)


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


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_some_log_probabilities_and_their_gradient_are_those_of_the_whole_softmax(rows: int) -> None:
    torch.manual_seed(0)
    logits, places = 3 * torch.randn(rows, 11, dtype=torch.float64), torch.randint(11, (rows, 4))
    weights = torch.randn(rows, 4, dtype=torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found, expected = log_probs_at(ours, places), theirs.log_softmax(-1).gather(1, places)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_alignments_cost_and_teach_what_pytorchs_function_says() -> None:
    torch.manual_seed(0)
    targets = torch.tensor([[3, 3, 5, 3], [4, 1, 0, 0], [2, 2, 2, 7], [6, 6, 9, 9]])
    lengths, places = torch.tensor([4, 2, 4, 3]), torch.tensor([8, 6, 5, 7])  # the third does not fit: it needs 6
    present = torch.arange(8) < places[:, None]
    logits = torch.randn(4, 8, 11, dtype=torch.float64)
    ours, theirs = logits[present].requires_grad_(), logits.clone().requires_grad_()
    found = ctc_loss(ours, present, targets, lengths, 10)
    log_probs = theirs.log_softmax(-1).transpose(0, 1)
    expected = F.ctc_loss(log_probs, targets, places, lengths, 10, reduction="none", zero_infinity=True)
    weights = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected)
    assert found[2] == 0
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad[present])


# -- losses of drafts -------------------------------------------------------------------------------------------------

KINDS = get_args(LossKind)


def plain(loss: DraftLoss, logits: torch.Tensor, p: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The formulas of the docstring, for PyTorch to differentiate."""
    q = logits.softmax(-1)
    ce, overlap = -(p * q.log()).sum(-1), torch.minimum(p, q).sum(-1)
    kl, shares = (p * (p / q).log()).sum(-1), weights / weights.sum()
    far = torch.exp(-3 * (overlap.detach() @ shares))
    each = {
        "ce": ce,
        "kl": kl,
        "tv": 1 - overlap,
        "nla": -overlap.log(),
        "lk_hybrid": far * kl + (1 - far) * -overlap.log(),
        "ce_tv": 0.1 * ce + 0.9 * (p - q).abs().sum(-1),
    }[loss.kind]
    if loss.top_k:
        best = p.topk(loss.top_k)
        each = each - loss.top_k_weight * (best.values * q.log().gather(1, best.indices)).sum(-1)
    return each @ shares


@pytest.mark.parametrize("mass", [1.0, 0.7])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_loss_has_the_value_and_the_gradient_of_its_formula(
    kind: LossKind, top_k: int, mass: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In portions, with rows of unequal weight, and with a part of the target outside the draft vocabulary."""
    monkeypatch.setattr(losses, "_CHUNK", 3)
    torch.manual_seed(0)
    logits, p = (3 * torch.randn(7, 11, dtype=torch.double) for _ in range(2))
    logits.requires_grad_()
    p, weights = mass * p.softmax(-1), torch.rand(7, dtype=torch.double)
    loss = DraftLoss(kind, top_k, 0.6)
    found, overlap = draft_loss(loss, logits, p, weights)
    wanted = plain(loss, logits, p, weights)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(overlap, torch.minimum(p, logits.softmax(-1)).sum(-1))
    ours, theirs = (torch.autograd.grad(2 * value, logits)[0] for value in (found, wanted))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_states_and_matrices(kind: LossKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CHUNK", 3)
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, dtype=torch.double) for shape in ((7, 5), (11, 5), (7, 4), (11, 4))]
    bias, taught = torch.randn(11).double(), torch.randn(4, 11).double().softmax(-1)
    index, loss = torch.tensor([3, 0, 0, 1, 2, 2, 3]), DraftLoss(kind)
    learnt = [
        tensor.requires_grad_() for place, tensor in enumerate(tensors) if place != 1
    ]  # the first matrix is frozen
    products = [(tensors[0], tensors[1]), (tensors[2], tensors[3])]
    wanted = plain(loss, sum(s @ m.T for s, m in products) + bias, taught[index], torch.ones(7).double())
    found, _ = draft_loss_of_states(loss, products, bias, taught, index)
    torch.testing.assert_close(found, wanted)
    ours, theirs = (torch.autograd.grad(2 * value, learnt) for value in (found, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_drafted_is_lost_whatever_is_drafted(kind: LossKind) -> None:
    """The best q is the target's conditional distribution for all; the overlap is then the mass that can be drafted."""
    p = torch.tensor([[0.4, 0.2, 0.1]], dtype=torch.double)
    logits = p.log().requires_grad_()
    value, overlap = draft_loss(DraftLoss(kind), logits, p)
    torch.testing.assert_close(overlap, torch.tensor([0.7], dtype=torch.double))
    assert {"tv": value > 0.29, "nla": value > 0.35}.get(kind, True)
    worse = draft_loss(DraftLoss(kind), torch.tensor([[0.1, 0.2, 0.4]]).double().log(), p)[0]
    assert value < worse


@pytest.mark.parametrize("kind", KINDS)
def test_hopeless_and_missing_rows_have_finite_losses(kind: LossKind) -> None:
    """Also in 32 bit where no draft can be right, and for a batch without a row or with rows of weight 0 alone."""
    logits = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    value, _ = draft_loss(DraftLoss(kind, 2), logits, torch.tensor([[0.0, 0.0, 1.0]]))
    value.backward()
    assert value.isfinite() and logits.grad is not None and logits.grad.isfinite().all()
    for rows, weights in ((0, None), (2, torch.zeros(2))):
        empty = torch.zeros(rows, 3, requires_grad=True)
        value, _ = draft_loss(DraftLoss(kind), empty, torch.full((rows, 3), 1 / 3), weights)
        value.backward()
        assert value == 0 and empty.grad is not None and not empty.grad.any()


def test_a_token_is_taught_like_a_distribution_without_doubt() -> None:
    torch.manual_seed(0)
    states, matrix = torch.randn(4, 3), torch.randn(5, 3)
    tokens, loss = torch.tensor([0, 4, 2, 2]), DraftLoss("ce_tv", 2)
    one_hot = draft_loss_of_states(loss, [(states, matrix)], None, F.one_hot(tokens, 5).float())
    torch.testing.assert_close(draft_loss_of_states(loss, [(states, matrix)], None, tokens), one_hot)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="top_k must be at least 0, got -1"):
        DraftLoss("ce", -1)
