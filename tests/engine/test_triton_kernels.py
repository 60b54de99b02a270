"""Triton's kernels equal torch: each its eager twin, and the layers of a model those that torch runs.

Without a GPU they run in Triton's interpreter, which rounds to bfloat16 towards zero.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import cli, errors
from bench.config import compose, identity
from bench.config.schema import HardwareConfig, PathsConfig
from bench.contract import checks
from bench.errors import UserError
from bench.measure.run import run
from bench.models import loading
from bench.report import collect, terminal
from methods.autoregressive import Autoregressive
from methods.early_exit.calm import Calm
from methods.engine import token_tree
from methods.engine.causal_lm import CausalLM
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.sampling import Sampling
from methods.engine.triton_layers import TritonLayers
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.self_speculative.decoder import SelfSpeculative
from methods.speculative.token_recycling import TokenRecycling
from tests.engine import test_seq2seq_lm
from tests.engine.test_causal_lm import tiny
from tests.speculative import test_rounds

triton = pytest.importorskip("triton", reason="no package named triton, which the dev extra brings on Linux")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = [pytest.mark.gpu] if ON_GPU else []  # of a GPU's tests, too
with pytest.MonkeyPatch.context() as _patch:
    if not ON_GPU:
        _patch.setenv("TRITON_INTERPRET", "1")
    from methods.engine import triton_kernels as kernels

    for _name in ("triton_rounds", "triton_trees"):  # interpreted as well
        importlib.import_module(f"methods.engine.{_name}")
if not ON_GPU:  # the interpreter looks for overflows, a fifth of its time, and says so in its debugging mode alone
    _interpreter = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    _interpreter.options = replace(_interpreter.options, sanitize_overflow=False)

TYPES = {torch.float32: 1e-4 if ON_GPU else 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
PROMPTS = [[3, 5, 7, 5, 3, 5, 7], [11, 2], [4, 4, 4, 4, 9, 8, 1, 2, 3, 4, 4]]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor, most: float = TYPES[torch.float32]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=most, atol=most)


def any_tree(batch: int, nodes: int) -> torch.Tensor:
    """Parents of the draft's nodes, other ones in each row."""
    rows = [[-1, *(int(torch.randint(-1, i, ())) for i in range(1, nodes - 1))] for _ in range(batch)]
    return torch.tensor([row[: nodes - 1] for row in rows], device=DEVICE)


# -- each kernel against its twin -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "nodes", "heads", "kv_heads", "dim", "capacity", "tree"),
    [
        (1, 1, 9, 3, 64, 200, False),
        (2, 5, 4, 2, 80, 130, False),
        (3, 7, 8, 2, 128, 140, True),
        (1, 64, 2, 1, 8, 128, True),
    ],
)
def test_attention(
    dtype: torch.dtype, batch: int, nodes: int, heads: int, kv_heads: int, dim: int, capacity: int, tree: bool
) -> None:
    torch.manual_seed(0)
    store = random(batch, 2 * kv_heads, capacity, dim, dtype=dtype).transpose(1, 2)
    query = random(batch, nodes, heads, dim, dtype=dtype)
    length = torch.tensor([capacity - nodes - 3, 0, 30][:batch], device=DEVICE)
    bits = kernels.pack_bits(token_tree.ancestors(any_tree(batch, nodes), nodes)) if tree else None
    wanted = kernels.attend_eager(query, store, length, bits, dim**-0.5)
    for row, end in enumerate((length + nodes).tolist()):
        store[row, end:] = torch.nan  # nothing after a row's end is read
    for splits in (1, 4, None):
        close(kernels.attend(query, store, length, bits, dim**-0.5, splits), wanted, TYPES[dtype])


def test_a_node_sees_what_the_tree_says_alone() -> None:
    """The twin is no judge of it: here attention copies the values of the nodes that are seen."""
    parents = torch.tensor([[-1, 0, -1]], device=DEVICE)
    bits = kernels.pack_bits(token_tree.ancestors(parents, 3))
    assert bits.tolist() == [[0b0001, 0b0011, 0b0111, 0b1001]]
    store = torch.zeros(1, 16, 2, 16, device=DEVICE)
    store[0, 2:6, 1, :4] = torch.eye(4, device=DEVICE)
    found = kernels.attend(torch.zeros(1, 4, 1, 16, device=DEVICE), store, torch.tensor([2], device=DEVICE), bits, 1.0)
    counts = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]  # beside the two tokens before
    close(found[0, :, 0, :4], torch.tensor([[x / (2 + sum(row)) for x in row] for row in counts], device=DEVICE))


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_nodes_see_those_of_earlier_passes(tree: bool) -> None:
    """A level of a draft after others attends as it does in one pass over all."""
    torch.manual_seed(0)
    batch, before, nodes = 2, 5, 9
    store = random(batch, 4, 60, 16).transpose(1, 2)
    query, length = random(batch, nodes, 4, 16), torch.tensor([7, 30], device=DEVICE)
    bits = kernels.pack_bits(token_tree.ancestors(any_tree(batch, nodes), nodes)) if tree else None
    wanted = kernels.attend_eager(query, store, length, bits, 0.25)[:, before:]
    for row, end in enumerate((length + nodes).tolist()):
        store[row, end:] = torch.nan
    given = query[:, before:], store, length, bits if bits is None else bits[:, before:].contiguous(), 0.25
    for splits in (1, 4):
        close(kernels.attend(*given, splits, earlier=before), wanted)
    store[torch.isnan(store)] = 0.0
    close(kernels.attend_eager(*given, earlier=before), wanted)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("rotary", "shared", "dim"), [(64, False, 64), (40, True, 80), (0, True, 16)], ids=["whole", "half", "none"]
)
def test_rotary_embedding_and_cache(dtype: torch.dtype, rotary: int, shared: bool, dim: int) -> None:
    torch.manual_seed(0)
    batch, nodes, heads, kv_heads = 2, 3, 9, 3
    every = random(batch, nodes, heads + 2 * kv_heads, dim, dtype=dtype)
    tables = [random(1 if shared else batch, nodes, 1, rotary, dtype=dtype) if rotary else None for _ in range(2)]
    length = torch.tensor([4, 17], device=DEVICE)
    before = random(batch, 2 * kv_heads, 20, dim, dtype=dtype)
    stores = [before.clone().transpose(1, 2) for _ in range(2)]
    queries = kernels.turn_write(every, *tables, stores[0], length)
    close(queries, kernels.turn_write_eager(every, *tables, stores[1], length), TYPES[dtype])
    close(stores[0], stores[1], TYPES[dtype])
    kernels.turn_write(every, *tables, stores[0], length - 4, earlier=4)
    close(stores[0], stores[1], TYPES[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [72, 2304])
def test_sum_and_norm(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    hidden, update = random(2, 3, width, dtype=dtype)
    weight = random(width, dtype=dtype)
    for given in ((hidden, update, weight, 1e-5, 0.22), (hidden, None, weight, 1e-6), (hidden, update, None)):
        for ours, theirs in zip(kernels.add_norm(*given), kernels.add_norm_eager(*given), strict=True):
            close(ours, theirs, TYPES[dtype])
    assert kernels.add_norm(hidden, None, None)[0] is hidden


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(3, 100), (2, 1536), (0, 8)])
def test_gate(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(0)
    both = random(rows, 2 * width, dtype=dtype)
    close(kernels.gate_up(both), kernels.gate_up_eager(both), TYPES[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("batch", "width", "k"), [((2, 3), 3000, 10), ((1,), 1024, 4), ((5,), 61, 7)])
def test_the_most_likely_tokens(dtype: torch.dtype, batch: tuple[int, ...], width: int, k: int) -> None:
    torch.manual_seed(0)
    logits = random(*batch, width, dtype=dtype) * 5
    wanted, ids = kernels.top_log_probs_eager(logits, k)
    wide = torch.stack([logits, logits + 1.0], -2)[..., 0, :]  # rows that are not side by side
    for given in (logits, wide):
        found, places = kernels.top_log_probs(given, k)
        assert places.tolist() == ids.tolist()
        close(found, wanted)


def test_of_equal_tokens_the_first_are_the_most_likely() -> None:
    logits = torch.zeros(1, 2500, device=DEVICE)
    logits[0, ::2], logits[0, 1100], logits[0, 2400], logits[0, 7] = -0.0, 3.0, 3.0, -torch.inf
    assert kernels.top_log_probs(logits, 5)[1].tolist() == [[1100, 2400, 0, 1, 2]]


@pytest.mark.skipif(ON_GPU, reason="the other tests compile the kernels")
def test_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To machine code, which takes no GPU, and within the memory of one multiprocessor."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = dict.fromkeys(("LENGTH", "BITS", "TOPS", "IDS"), "*i64")
    pointers |= dict.fromkeys(("ACC", "BEST", "TOTAL", "LOG_PROBS"), "*fp32")
    floats = ("scale", "factor", "eps")
    attention = {"KV_HEADS": 3, "GROUPS": 3, "DIM": 80, "WIDTH": 128, "ROWS": 64, "KEYS": 64, "WIDEN": False}
    turning = {"QUERIES": 9, "KV_HEADS": 3, "DIM": 80, "WIDTH": 128, "TURNED": 40, "BLOCK": 8}
    for kernel, constants in (
        (kernels._attend_split, attention | {"TREE": True, "SPLITS": 8}),
        (kernels._merge_splits, {"DIM": 80, "WIDTH": 128, "SPLITS": 8}),
        (kernels._add_norm, {"ADD": True, "NORM": True, "BLOCK": 4096}),
        (kernels._turn_write, turning),
        (kernels._gate_up, {"BLOCK": 1024}),
        (kernels._top_of_chunk, {"K": 10, "BLOCK": 1024}),
        (kernels._top_of_row, {"K": 10, "BLOCK": 512, "CHUNKS": 64}),
    ):
        function = triton.runtime.JITFunction(kernel.fn)
        types = {
            name: "constexpr" if name in constants else "fp32" if name in floats
            else pointers.get(name, "*bf16") if name.isupper() and name != "WIDTH" else "i32"
            for name in function.arg_names
        }  # fmt: skip
        made = triton.compile(ASTSource(function, types, constexprs=constants), target=GPUTarget("cuda", 90, 32))
        assert made.asm["cubin"] and made.metadata.shared <= 48 << 10


# -- the layers of a model --------------------------------------------------------------------------------------------


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.25)
    return model


def both(make: Callable[[], Any] = llama) -> tuple[CausalLM, CausalLM]:
    """Of one model the layers by torch, and those by Triton."""
    plain, ours = (CausalLM.from_hf(make().to(DEVICE), linear="plain") for _ in range(2))
    ours.use_triton()
    assert not plain.fused and not ours.fused and (plain.kernels, ours.kernels) == ("torch", "triton")
    return plain, ours


def outputs(lm: CausalLM, parents: torch.Tensor | None, rows: int, nodes: int, times: int = 1) -> list[torch.Tensor]:
    cache = lm.new_cache(rows, 100)
    first = lm.prefill([torch.tensor(prompt, device=DEVICE) for prompt in PROMPTS[:rows]], cache)
    tokens = torch.arange(rows * nodes, device=DEVICE).view(rows, nodes) % 50 + 1
    for _ in range(times):
        found = lm.forward(tokens, parents, cache, hidden_layers=(0, 1))
    kept = [cache.view(layer, 12 + nodes)[0] for layer in range(2)]
    held = [keys[row, :, : cache.lengths[row] + nodes] for keys in kept for row in range(rows)]
    return [first.logits, found.logits, found.hidden, *found.hidden_layers.values(), *held]


@pytest.mark.parametrize("rows", [1, 3], ids=["one", "ragged"])
@pytest.mark.parametrize(("nodes", "tree"), [(1, False), (5, False), (6, True), (70, True)])
def test_logits_are_those_of_torch(rows: int, nodes: int, tree: bool) -> None:
    """Of chains and trees, and of passes that are too large for the kernels."""
    torch.manual_seed(1)
    parents = any_tree(rows, nodes) if tree else None
    for theirs, ours in zip(*(outputs(lm, parents, rows, nodes) for lm in both()), strict=True):
        close(ours, theirs)


def test_kernels_run_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attend = kernels.attend
    monkeypatch.setattr(
        kernels, "attend", lambda *given, **more: calls.append(given[0].shape[1]) or attend(*given, **more)
    )
    _, ours = both()
    outputs(ours, None, 1, 1)
    assert calls == [7, 7, 1, 1], "a short prompt and a pass, through two layers"
    calls.clear()
    outputs(ours, any_tree(1, 70), 1, 70)
    assert calls == [7, 7]


FAMILIES = {
    "qwen3": {},  # norms of heads
    "olmo2": {},  # norms after the sub-layers, and of all heads together
    "granite": {},  # a factor of the residual
    "gemma": {},  # norms whose weight is stored less one; no SiLU
    "smollm3": {"num_hidden_layers": 4},  # layers without rotary positions
    "mixtral": {"sliding_window": None},  # experts
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    made = both(lambda: tiny(family, **{"num_hidden_layers": 2, **FAMILIES[family]}))
    parents = torch.tensor([[-1, -1], [-1, 0]], device=DEVICE)
    for theirs, ours in zip(*(outputs(lm, parents, 2, 3) for lm in made), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_pass_of_fixed_shape_is_made_once_for_all_lengths() -> None:
    plain, ours = both()
    fixed = GraphedLM.of(ours, capture=False)
    parents = torch.tensor([[-1, -1], [-1, 0]], device=DEVICE)
    for theirs, found in zip(outputs(plain, parents, 2, 3), outputs(fixed, parents, 2, 3, times=3), strict=True):
        close(found, theirs)
    assert fixed.graphs.captured == 1
    caches = [lm.new_cache(1, 256) for lm in (plain, fixed)]
    tokens = torch.tensor([[4, 9, 3]], device=DEVICE)
    for length in (200, 3, 253):
        found = []
        for lm, cache in zip((plain, fixed), caches, strict=True):
            lm.prefill([torch.arange(length, device=DEVICE) % 50], cache)
            found.append([lm.forward(tokens, None, cache).logits for _ in range(2)][-1])
        close(found[1], found[0])
    assert fixed.graphs.captured == 2, "one for each batch size, whatever the length"
    assert fixed.graphs.missed == 4, "the first of each size, and two that would fill up beyond the cache"


DECODERS = {
    "prompt_lookup": (PromptLookup, False),
    "prompt_lookup, fixed": (PromptLookup, True),
    "token_recycling": (lambda target, sampling: TokenRecycling(target, sampling, tree="small"), False),
    "calm": (lambda target, sampling: Calm(target, sampling, 1.0, exits=[1], head="lens"), False),
    "layer_skip": (lambda target, sampling: SelfSpeculative(target, sampling, skip_attention=[1], skip_mlp=[0]), False),
}


def decode(decoder: Any, prompts: list[list[int]], limit: int = 8) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in prompts]
    generator = torch.Generator(DEVICE).manual_seed(0)
    for step in decoder.decode([torch.tensor(row, device=DEVICE) for row in prompts], limit, generator):
        for row, new in zip(rows, step.tokens, strict=True):
            row.extend(new)
    return [row[:limit] for row in rows]


@pytest.mark.parametrize("name", DECODERS)
def test_texts_are_those_of_torch(name: str) -> None:
    plain, ours = both()
    make, fixed = DECODERS[name]
    target = GraphedLM.of(ours, capture=ON_GPU) if fixed else ours
    wanted = decode(Autoregressive(plain, Sampling()), PROMPTS[:2])
    assert decode(make(target, Sampling()), PROMPTS[:2]) == wanted
    if fixed:
        assert target.graphs.captured > 0


@pytest.mark.parametrize(
    "name", ["eagle_chain", "eagle_static", "eagle_2", "eagle_dynamic", "p_eagle", "dflash", "dspark"]
)
def test_recorded_drafts_of_networks_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, found, run_layers = [], [], TritonLayers.run
    monkeypatch.setattr(TritonLayers, "run", lambda *given, **more: ran.append(given[0]) or run_layers(*given, **more))
    for target in both(lambda: checks.tiny_target(layers=3).hf.float()):
        decoder = test_rounds.DRAFTED[name](GraphedLM.of(target, capture=ON_GPU), Sampling())
        found.append([test_rounds.drafted(decoder, PROMPTS[:2], limit) for limit in (3, 5)])
    for theirs, ours in zip(*found, strict=True):
        test_rounds.require_equal(ours, theirs)
    assert decoder.drafter.network.triton in ran


# -- the option -------------------------------------------------------------------------------------------------------


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert HardwareConfig().kernels == "auto"
    lm = CausalLM.from_hf(llama().to(DEVICE), linear="plain")
    for kernels_ in ("auto", "torch"):
        loading._hand_over(lm, {"kernels": kernels_})
        assert lm.kernels == "torch"
    loading._hand_over(lm, {"kernels": "triton"})
    assert lm.kernels == "triton"


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernels")
@pytest.mark.parametrize("reason", ["no CUDA", "no package named triton"])
def test_it_is_refused_where_no_kernel_runs(
    reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    if reason != "no CUDA":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["method=prompt_lookup", "dataset=demo", "model=random", "hardware=cpu_fp32", "hardware.kernels=triton"]
    assert cli.main(words) == errors.BAD_INPUT
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("hardware.kernels must be auto or torch where Triton's kernels cannot run, got triton")
    assert f"(device cpu, {reason})" in said and "Set hardware.kernels=torch" in said


def test_models_that_the_kernels_lack_something_of_are_refused() -> None:
    for family, options in (("mistral", {"sliding_window": 5}), ("gemma2", {}), ("gpt_oss", {})):
        lm = CausalLM.from_hf(tiny(family, **options).to(DEVICE))
        with pytest.raises(ValueError, match=r"without a sliding window, a soft cap or sinks, got .* in float32\. Set"):
            lm.use_triton()
    with pytest.raises(ValueError, match=r"needs a decoder-only model .*, got bart\. Set hardware\.kernels=torch"):
        loading._hand_over(test_seq2seq_lm.Seq2SeqLM.from_hf(test_seq2seq_lm.tiny("bart")), {"kernels": "triton"})
    with pytest.raises(UserError, match="hardware.compile must be false with hardware.kernels=triton"):
        HardwareConfig(kernels="triton", compile=True)


@pytest.mark.skipif(ON_GPU, reason="of the interpreter")
def test_a_run_says_which_kernels_it_used(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"question_id": 0, "category": "chat", "turns": ["Say."]}) + "\n")
    words = ["method=prompt_lookup", "model=random", "hardware=cpu_fp32", "hardware.threads=1", "max_new_tokens=2"]
    words += ["model.layers=1", "model.heads=2", "model.kv_heads=1"]  # the interpreter takes a millisecond an operation
    quick = ["measure.bootstrap_samples=100", "measure.cost_curve=false", "measure.warmup=0", "dataset=jsonl"]
    paths = PathsConfig(results=str(tmp_path / "results"), cache=str(tmp_path / "cache"))
    cfg = replace(compose.compose([*words, *quick, f"dataset.path={file}"]), paths=paths)
    assert "kernels" not in identity.strip(cfg.to_dict()).get("hardware", {}), "other runs keep their id"
    outcome = run(replace(cfg, hardware=replace(cfg.hardware, kernels="triton")))
    assert json.loads((outcome.path / "manifest.json").read_text())["kernels"] == outcome.summary["kernels"] == "triton"
    assert outcome.summary["agreement"]["exact"] == 1.0
    assert ", triton kernels" in terminal.render(outcome.summary, outcome.path)
    plain = run(cfg).summary
    assert "kernels" not in plain and len(collect.groups([plain, outcome.summary])) == 2
