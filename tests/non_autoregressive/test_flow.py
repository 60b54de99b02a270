"""Flows: what goes in comes out, determinants are those of autograd's Jacobian, padding changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from methods.non_autoregressive.flowseq.flow import (
    ActNorm,
    Condition,
    Coupling,
    Flow,
    HeadwiseLinear,
    Place,
    initialising,
    log_normal,
    squeeze,
    step,
    unsqueeze,
)


class Mixer(nn.Module):
    """A network for couplings that lets every real position see every other, and the source."""

    def __init__(self, given: int, wanted: int, place: Place) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(given, 16), nn.Linear(16, wanted)
        self.query = nn.Linear(16, 16)

    def forward(self, given: Tensor, condition: Condition) -> Tensor:
        hidden = self.inside(given)
        scores = self.query(hidden) @ hidden.transpose(1, 2)
        weights = scores.masked_fill(~condition.present[:, None], -1e9).softmax(-1)
        return self.out(torch.tanh(hidden + weights @ hidden + condition.source))


def everywhere(rows: int, length: int) -> Condition:
    return Condition(torch.ones(rows, length, dtype=torch.bool), source=0.3)


MAPS: dict[str, Callable[[], nn.Module]] = {
    "actnorm": lambda: ActNorm(4),
    "linear": lambda: HeadwiseLinear(4, interleaved=False),
    "linear_interleaved": lambda: HeadwiseLinear(4, interleaved=True),
    "linear_heads": lambda: HeadwiseLinear(12, interleaved=False),
    "linear_interleaved_heads": lambda: HeadwiseLinear(12, interleaved=True),
    "halves": lambda: Coupling(4, "halves", False, Mixer),
    "halves_flipped": lambda: Coupling(5, "halves", True, Mixer),
    "alternate": lambda: Coupling(4, "alternate", False, Mixer),
    "alternate_flipped": lambda: Coupling(4, "alternate", True, Mixer),
    "time": lambda: Coupling(4, "time", False, Mixer),
    "time_flipped": lambda: Coupling(4, "time", True, Mixer),
    "step": lambda: step(4, True, Mixer),
    "one_level": lambda: Flow(4, [1], Mixer),
    "two_levels": lambda: Flow(4, [1, 1], Mixer),
    "three_levels": lambda: Flow(4, [1, 1, 1], Mixer),
}
every_map = pytest.mark.parametrize("name", MAPS)


def make(name: str, seed: int = 0) -> tuple[nn.Module, int]:
    """A map with random weights in 64 bit, and its channels."""
    torch.manual_seed(seed)
    made = MAPS[name]().double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made, {"halves_flipped": 5, "linear_heads": 12, "linear_interleaved_heads": 12}.get(name, 4)


@every_map
def test_log_determinant_is_that_of_the_jacobian(name: str) -> None:
    made, channels = make(name)
    length = 4 if name == "three_levels" else 2
    for seed in range(3):
        z = torch.randn(1, length, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
        jacobian = torch.autograd.functional.jacobian(lambda x: made(x, everywhere(1, length))[0], z)
        wanted = torch.linalg.slogdet(jacobian.reshape(z.numel(), z.numel()))[1]
        torch.testing.assert_close(made(z, everywhere(1, length))[1][0], wanted)


@every_map
def test_inverse_undoes_the_map(name: str) -> None:
    made, channels = make(name, seed=1)
    z, condition = torch.randn(3, 8, channels).double(), everywhere(3, 8)
    noise = made(z, condition)[0]
    assert (noise - z).abs().max() > 0.05
    torch.testing.assert_close(made.inverse(noise, condition), z)
    torch.testing.assert_close(made(made.inverse(z, condition), condition)[0], z)


@every_map
def test_padding_changes_nothing(name: str) -> None:
    made, channels = make(name, seed=2)
    z = torch.randn(1, 4, channels).double()
    padded = torch.cat([z, 9 * torch.randn(1, 8, channels)], 1)
    inside = Condition(torch.arange(12)[None] < 4, source=0.3)
    alone, log_alone = made(z, everywhere(1, 4))
    among, log_among = made(inside.hide(padded), inside)
    torch.testing.assert_close(among[:, :4], alone)
    torch.testing.assert_close(log_among, log_alone)
    assert (among[:, 4:] == 0).all()
    back = made.inverse(among, inside)
    torch.testing.assert_close(back[:, :4], z)
    assert (back[:, 4:] == 0).all()


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("split", ["halves", "alternate", "time"])
def test_coupling_moves_one_part_and_keeps_the_other(split: str, flipped: bool) -> None:
    torch.manual_seed(0)
    made, z = Coupling(6, split, flipped, Mixer), torch.randn(2, 4, 6)
    kept = (made(z, everywhere(2, 4))[0] == z).all(0)
    first = {
        "halves": (torch.arange(6) < 3).expand(4, 6),
        "alternate": (torch.arange(6) % 2 == 0).expand(4, 6),
        "time": (torch.arange(4) % 2 == 0)[:, None].expand(4, 6),
    }[split]
    assert torch.equal(kept, ~first if flipped else first)


def test_norms_set_themselves_by_real_positions_only() -> None:
    norm, lengths = ActNorm(3), torch.tensor([5, 2])
    inside = Condition(torch.arange(6) < lengths[:, None])
    z = inside.hide(4 + 3 * torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0)))
    with initialising(norm):
        noise, _ = norm(z, inside)
    real = noise[inside.present]
    torch.testing.assert_close(real.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(real.std(0, unbiased=False), torch.ones(3))
    before = norm.shift.clone()
    norm(2 * z, inside)
    assert torch.equal(norm.shift, before), "only the first batch sets it"


def test_every_norm_of_a_flow_is_set_and_the_noise_becomes_standard() -> None:
    torch.manual_seed(0)
    flow, condition = Flow(8, [2, 1], Mixer), everywhere(64, 6)
    z = 5 + 3 * torch.randn(64, 6, 8)
    with initialising(flow):
        flow(z, condition)
    norms = [module for module in flow.modules() if isinstance(module, ActNorm)]
    assert len(norms) == (1 + 2 * 6) + (1 + 4) and all(norm.log_scale.abs().sum() > 0 for norm in norms)
    gap = flow.inverse(flow(z, condition)[0], condition) - z
    assert gap.abs().max() < 1e-3, "in 32 bit too"


def test_density_of_a_flow_integrates_to_one() -> None:
    """Over a grid of two dimensions: T = 1, d = 2."""
    torch.manual_seed(3)
    flow = Flow(2, [1], Mixer).double()
    axis = torch.linspace(-14, 14, 281).double()
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 1, 2)
    with torch.no_grad():
        mass = flow.log_prob(grid, everywhere(len(grid), 1)).exp().sum() * (axis[1] - axis[0]) ** 2
    assert float(mass) == pytest.approx(1.0, abs=2e-3)


def test_squeeze_and_normal_by_hand() -> None:
    z = torch.arange(8.0).view(1, 4, 2)
    assert squeeze(z).tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert torch.equal(unsqueeze(squeeze(z)), z)
    inside = Condition(torch.tensor([[True, False]]))
    found = log_normal(torch.tensor([[[1.0, 2.0], [9.0, 9.0]]]), inside)
    assert float(found) == pytest.approx(-0.5 * (1 + 4 + 2 * math.log(2 * math.pi)))


def test_lengths_come_in_units() -> None:
    assert [Flow(4, steps, Mixer).unit for steps in ([1], [1, 1], [1, 1, 1])] == [1, 2, 4]
