"""The C++ kernels: products as torch's, and bits that do not depend on what else is in a pass."""

from __future__ import annotations

import logging
import os
import platform
import subprocess

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.cpp_extension import get_cxx_compiler

from methods.engine import cpu_kernels
from methods.engine.causal_layers import RMSNorm
from methods.engine.causal_lm import CausalLM
from methods.engine.linear import BlockLinear, LinearForm, PanelLinear, ScreenedLinear, make_linear
from tests.engine.test_causal_lm import tiny

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="the kernels cannot be compiled here")
TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [2, 96, 1570, 1600])  # the last in several chunks
@pytest.mark.parametrize("outputs", [1, 16, 65, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_torch(dtype: torch.dtype, inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(outputs)
    weight, added = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype) if bias else None
    product = PanelLinear(weight, added)
    assert torch.equal(product.dense, weight)
    for rows in (1, 2, 5, 6, 7, 12, 13, 40):
        x = torch.randn(rows, inputs).to(dtype)
        exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
        found = product(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=1e-5 if dtype == torch.float32 else 4e-3, atol=2e-4)
        for row in range(rows):
            assert torch.equal(product(x[row : row + 1]), found[row : row + 1])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its instructions are known")
def test_weights_are_asked_for_ahead() -> None:
    """Compilers drop a prefetch that stands in a function of its own; each shape of a tile has at least one."""
    prefetch = b"\x0f\x18"
    assert cpu_kernels._compiled().read_bytes().count(prefetch) > 50


def test_no_rows_are_no_work_and_rows_have_any_shape() -> None:
    panels, x = cpu_kernels.Panels(torch.randn(3, 4), None), torch.randn(2, 5, 4)
    assert panels.times(torch.empty(0, 4)).shape == (0, 3)
    assert torch.equal(panels.times(x), panels.times(x.flatten(0, 1)).view(2, 5, 3))


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_scores(dtype: torch.dtype) -> None:
    require_rows(dtype)


def require_rows(dtype: torch.dtype) -> None:
    """The largest scores come in the order of their size, equal ones in that of places; sums and norms are exact."""
    torch.manual_seed(0)
    shapes = [(1, 1), (4, 37), (2, 3, 128), (2, 8192), (1, 49152), (9, 5000)]
    for scores in [(3 * torch.randn(shape)).to(dtype) for shape in shapes] + [torch.zeros(2, 300, dtype=dtype)]:
        scores[..., -1] = -torch.inf if scores.shape[-1] > 1 else 0.0
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        for count in {1, min(3, scores.shape[-1]), min(37, scores.shape[-1])}:
            assert torch.equal(cpu_kernels.largest(scores, count), order[..., :count])
        wanted = scores.double().logsumexp(-1)
        torch.testing.assert_close(cpu_kernels.log_totals(scores).double(), wanted, rtol=1e-6, atol=1e-6)
        for temperature in (0.3, 1.0, 4.0):
            probs = cpu_kernels.probabilities(scores, temperature)
            exact = (scores.double() / temperature).softmax(-1)
            torch.testing.assert_close(probs.double(), exact, rtol=1e-5, atol=1e-30)
            assert probs.dtype == torch.float32 and not probs[scores == -torch.inf].any()
    assert cpu_kernels.log_totals(torch.full((2, 40), -torch.inf, dtype=dtype)).tolist() == [-torch.inf] * 2
    rows, weight = torch.randn(70, 3, 200).to(dtype)[:, ::2], torch.rand(200)
    bias, wide = torch.randn(200), (rows.double(), (200,), weight.double())
    norms = [(None, F.rms_norm(*wide, 1e-5)), (bias, F.layer_norm(*wide, bias.double(), 1e-5))]
    for added, exact in norms:
        found = cpu_kernels.norm(rows, weight, added, 1e-5).double()
        torch.testing.assert_close(found, exact, rtol=1e-5 if dtype == torch.float32 else 4e-3, atol=2e-6)


def test_rows_that_are_differentiated_or_of_other_types_are_left_to_torch() -> None:
    rows = torch.randn(2, 8, requires_grad=True)
    assert not cpu_kernels.reads(rows) and not cpu_kernels.reads(rows.detach().double())
    assert not cpu_kernels.reads(torch.empty(2, 8, device="meta"))
    with torch.no_grad():
        assert cpu_kernels.reads(rows)
    RMSNorm(torch.rand(8), 1e-6)(rows).sum().backward()
    assert rows.grad is not None and bool(rows.grad.abs().sum() > 0)


@pytest.fixture(scope="module", params=[(dtype, size) for dtype in TYPES for size in (16, 64)], ids=str)
def lm(request: pytest.FixtureRequest) -> CausalLM:
    return panels(*request.param)


def panels(dtype: torch.dtype, head_dim: int = 16, linear: LinearForm = "panels") -> CausalLM:
    # feed-forward layers of whole panels and of others
    model = tiny("llama", head_dim=head_dim, intermediate_size=80 if head_dim % 32 else 96)
    made = CausalLM.from_hf(model.to(dtype), linear=linear)
    assert made.batch_invariant == (linear == "panels")
    return made


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128])
@pytest.mark.usefixtures("two_threads")
def test_heads_of_any_size_attend_as_those_of_torch(dtype: torch.dtype, head_dim: int) -> None:
    lm, plain = panels(dtype, head_dim), panels(dtype, head_dim, "plain")
    tokens, parents = torch.randint(3, 97, (2, 20)), (torch.arange(19).repeat(2, 1) - 1) // 2
    logits = []
    for model in (lm, plain):
        cache = model.new_cache(2, 80)
        model.prefill([torch.arange(3, 50), torch.arange(3, 12)], cache)
        logits.append(model.forward(tokens, parents, cache).logits.double())
    assert (logits[0] - logits[1]).norm() < (1e-5 if dtype == torch.float32 else 0.03) * logits[1].norm()


@pytest.mark.usefixtures("two_threads")
def test_bits_depend_on_nothing_else_in_a_pass(lm: CausalLM) -> None:
    prompts = [torch.randint(3, 97, (n,)) for n in (21, 3, 40, 1)]
    text = torch.randint(3, 97, (4, 30))
    cache = lm.new_cache(4, 96)
    lm.prefill(prompts, cache)
    together = lm.forward(text, None, cache).logits
    for row, prompt in enumerate(prompts):
        for chunk in (5, 512):
            own = lm.new_cache(1, 80)
            lm.prefill([prompt], own, chunk=chunk)
            assert torch.equal(lm.forward(text[row : row + 1], None, own).logits[0], together[row])
        for place in range(30):
            step = lm.forward(text[row : row + 1, place : place + 1], None, own).logits
            assert torch.equal(step[0, 0], together[row, place])
            own.advance([1])


@pytest.mark.parametrize("length", [1, 17, 30, 32])  # the tree lies before, across and after a group of keys
@pytest.mark.usefixtures("two_threads")
def test_a_path_of_a_tree_has_the_bits_of_the_chain_and_stays_so_when_it_is_packed(lm: CausalLM, length: int) -> None:
    prompt, tokens = torch.randint(3, 97, (length,)), torch.randint(3, 97, (1, 7))
    cache, own = lm.new_cache(1, 64), lm.new_cache(1, 64)
    for each in (cache, own):
        lm.prefill([prompt], each)
    tree = lm.forward(tokens, torch.tensor([[-1, 0, -1, 2, 1, 4]]), cache).logits
    path = [0, 1, 2, 5, 6]
    assert torch.equal(tree[:, path], lm.forward(tokens[:, path], None, own).logits)
    cache.pack(torch.tensor([[0, 1, 4, 5]]))
    for each in (cache, own):
        each.advance([5])
    root = torch.tensor([[5]])
    assert torch.equal(lm.forward(root, None, cache).logits, lm.forward(root, None, own).logits)


@pytest.mark.parametrize("parents", [None, torch.tensor([[-1, -1, 0, 2], [-1, 0, 1, 1]])])
@pytest.mark.usefixtures("two_threads")
def test_a_pass_with_norm_and_output_matrix_has_the_bits_of_its_parts(lm: CausalLM, parents: Tensor | None) -> None:
    cache = lm.new_cache(2, 40)
    lm.prefill([torch.arange(3, 20), torch.arange(3, 8)], cache)
    tokens = torch.randint(3, 97, (2, 5))
    whole = lm.forward(tokens, parents, cache, hidden_layers=(0, lm.n_layers - 1))
    last, seen = lm.forward_layers(tokens, parents, cache, None, (0, lm.n_layers - 1))
    assert torch.equal(whole.hidden, lm.norm(last)) and torch.equal(whole.logits, lm.head(whole.hidden))
    assert whole.best is not None and torch.equal(whole.best, whole.logits.argmax(-1))
    assert all(torch.equal(whole.hidden_layers[layer], state) for layer, state in seen.items())
    assert whole.of_rows([1]).best.tolist() == whole.best[1:].tolist()


def test_taps_and_portions_of_layers_are_those_of_the_whole(lm: CausalLM) -> None:
    ids = torch.randint(3, 97, (2, 9))
    whole = lm.forward(ids, None, lm.new_cache(2, 16), hidden_layers=(0, 3, 4))
    state = lm.begin(ids, None, lm.new_cache(2, 16))
    before = state.hidden
    for layer in range(lm.n_layers):
        kept = state.hidden
        lm.run(state, [layer])
        assert layer not in whole.hidden_layers or torch.equal(state.hidden, whole.hidden_layers[layer])
        assert kept is not state.hidden, "earlier states stay as they are"
    assert torch.equal(before, lm.embed(ids))
    assert torch.equal(lm.norm(state.hidden), whole.hidden)


def test_without_a_compiler_the_operators_of_torch_do(monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    cpu_kernels.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert cpu_kernels.library() is None
        assert "cannot be compiled" in caplog.text and "CXX" in caplog.text
        with pytest.raises(ValueError, match=r"hardware.linear=panels needs .* a C\+\+ compiler"):
            make_linear([torch.randn(4, 4)], [None], "panels")
        lm = CausalLM.from_hf(tiny("llama", head_dim=16))
        assert not lm.fused and lm.linear_form != "panels"
    finally:
        cpu_kernels.library.cache_clear()


@pytest.mark.parametrize("processor", ["sapphirerapids", "icelake-server", "skylake-avx512", "haswell", "x86-64"])
def test_the_source_is_correct_for_processors_that_are_not_here(processor: str) -> None:
    compiler, flags = get_cxx_compiler(), [flag for flag in cpu_kernels._FLAGS if not flag.startswith("-march")]
    check = [compiler, *flags, f"-march={processor}", "-w", "-fsyntax-only", "-x", "c++"]
    if subprocess.run([*check, os.devnull], capture_output=True).returncode:
        pytest.skip(f"the compiler does not know {processor}")
    done = subprocess.run([*check, str(cpu_kernels._SOURCE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of other processors")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("without", ["avx512f", "avx512bf16", "amx-bf16"])
def test_a_processor_without_some_instructions(monkeypatch, tmp_path, dtype: torch.dtype, without: str) -> None:
    """Its kernels give logits that are close, and bits of their own that depend on nothing else either."""
    ids, lm = torch.randint(3, 97, (1, 12)), panels(dtype, 32)
    wide = lm.forward(ids, None, lm.new_cache(1, 16)).logits
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_kernels, "_FLAGS", (*cpu_kernels._FLAGS, f"-mno-{without}"))
    cpu_kernels.library.cache_clear()
    try:
        require_rows(dtype)
        narrow = panels(dtype, 32)
        cache = narrow.new_cache(1, 16)
        found = narrow.forward(ids, None, cache).logits
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(found, wide, rtol=tolerance, atol=tolerance)
        for place in range(12):
            assert torch.equal(narrow.forward(ids[:, place : place + 1], None, cache).logits[0, 0], found[0, place])
            cache.advance([1])
    finally:
        cpu_kernels.library.cache_clear()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("two_threads")
def test_the_largest_of_a_screened_product_are_those_of_the_full_weight(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(4)
    weight, added = torch.randn(300, 64).to(dtype), torch.randn(300).to(dtype) if bias else None
    full, rounded = PanelLinear(weight, added), BlockLinear(weight, added, "int4")
    x = torch.randn(5, 64).to(dtype)
    found, wanted, screen = ScreenedLinear(full, 8)(x), full(x), rounded(x)
    for row in range(5):
        places = torch.zeros(300, dtype=torch.bool).scatter(0, screen[row].topk(8).indices, True)
        assert torch.equal(found[row, places], wanted[row, places])
        assert torch.equal(found[row, ~places], screen[row, ~places])


@pytest.mark.parametrize("count", [8, 20])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.usefixtures("two_threads")
def test_a_pass_with_a_screened_output_matrix_has_the_bits_of_its_product(dtype: torch.dtype, count: int) -> None:
    sizes = {"head_dim": 16, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 96}
    target = CausalLM.from_hf(tiny("llama", **sizes).to(dtype), linear="panels")
    view, cache = target.rounded(0, count), target.new_cache(2, 40)
    view.prefill([torch.arange(3, 20), torch.arange(3, 8)], cache)
    tokens = torch.randint(3, 97, (2, 5))
    made = view.forward(tokens, None, cache)
    assert torch.equal(made.logits, view.head(made.hidden))
    screen = BlockLinear(target._head.dense, None, "int4")(made.hidden.flatten(0, 1)).view_as(made.logits)
    exact = target.head(made.hidden)
    assert made.best is not None
    for logits, row, best in zip(screen.flatten(0, 1), exact.flatten(0, 1), made.best.flatten(), strict=True):
        places = logits.topk(count).indices
        assert best == min(place for place in places.tolist() if row[place] == row[places].max())
    ran = view.rounds([5, 6], cache, 3, [True, True], ())
    for row in range(2):
        own, root = view.new_cache(2, 40), torch.tensor([[5], [6]])
        view.prefill([torch.arange(3, 20), torch.arange(3, 8)], own)
        for step in range(3):
            best = view.forward(root, None, own).best
            assert best is not None and best[row, 0] == ran.tokens[step][row]
            own.advance([1, 1])
            root = best
