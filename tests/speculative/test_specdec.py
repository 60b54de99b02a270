"""SpecDec: the drafter against a computation node by node, the text against the original model, and the training."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.config import instantiate
from bench.config.schema import PathsConfig, SamplingConfig
from bench.contract import checks
from bench.models import artifacts, loading
from bench.train import command
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.checkpoint_files import WEIGHTS, MissingPart
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.specdec import training as specdec_training
from methods.speculative.specdec.decoder import SpecDec
from methods.speculative.specdec.network import BlockDecoder, DraftPass, Shape, load, save
from methods.speculative.specdec.training import BlockLearner, Blocks, SpecDecTraining, acceptance, reveal
from methods.training import trainer
from methods.training.interface import Example, TrainingContext
from methods.training.trainer import TrainingConfig
from tests.base_models.test_translation import PAIRS, sentences
from tests.engine.test_seq2seq_lm import EOS, FORM, KERNELS, VOCAB, AsText, greedy_reference, ids, tiny
from tests.helpers.interruptions import interrupted_at
from tests.helpers.tiny_translation import MACHINE, make_model, write_data

GREEDY = Sampling()
LENGTHS = (1, 9, 4)


def shape_of(lm: Seq2SeqLM, **changes: int) -> Shape:
    known = {"hidden_size": lm.hidden_size, "layers": lm.n_layers, "vocab_size": lm.vocab_size}
    known["heads"] = lm.hidden_size // 16 if lm.fused else 4
    return Shape(**{"block": 6, "depth": 2, "inner": 40, "positions": 60, **known, **changes})


def random_network(lm: Seq2SeqLM, **changes: int) -> BlockDecoder:
    """Every weight away from its initial value."""
    torch.manual_seed(3)
    network = BlockDecoder(shape_of(lm, **changes))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return network


@cache
def known_texts(lm: Seq2SeqLM) -> list[tuple[list[int], list[int]]]:
    """Sources, and what the model writes behind each."""
    sources = checks.prompts(lm.vocab_size, (1, 2, 9, 17, 5, 14, 8, 6, 3))
    texts = checks.outputs(Autoregressive(lm, GREEDY), sources, 14)
    return [(source.tolist(), text) for source, text in zip(sources, texts, strict=True)]


@cache
def learnt(lm: Seq2SeqLM) -> tuple[BlockDecoder, DraftVocabulary]:
    """A network that half knows what the model writes: drafts of it are kept for a while, and not for ever."""
    torch.manual_seed(0)
    learner = BlockLearner(lm, DraftVocabulary.all(lm.vocab_size), BlockDecoder(shape_of(lm)), 0.0)
    optimizer = torch.optim.Adam(learner.network.parameters(), 3e-3)
    pairs = known_texts(lm)
    for _ in range(60):
        given = [int(torch.randint(1, len(text), ())) for _, text in pairs]
        blocks = Blocks.of(lm.start, [text for _, text in pairs], given, 6, lm.device)
        loss, _ = learner.loss(blocks, learner.read([source for source, _ in pairs]), 0.3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return learner.network, learner.vocabulary


def specdec(lm: CausalLM, sampling: Sampling, **options: Any) -> SpecDec:
    assert isinstance(lm, Seq2SeqLM)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), *learnt(lm))
        return SpecDec(lm, sampling, checkpoint=Path(folder), **options)


@pytest.fixture(scope="module", params=["marian", "bart_forced", "t5", "bart_forced_kernels"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Seq2SeqLM]:
    """In 64 bit, and in 32 by the C++ kernels."""
    variant, options = KERNELS.get(request.param, (request.param, {}))
    model = tiny(variant, **options, tie_word_embeddings=False)  # tied, random models repeat one token
    lm = Seq2SeqLM.from_hf(model, keep_hf=True, linear=FORM if options else "auto")
    assert isinstance(lm, Seq2SeqLM)
    return model, lm


@pytest.fixture(scope="module")
def marian() -> Seq2SeqLM:
    lm = Seq2SeqLM.from_hf(tiny("marian", tie_word_embeddings=False), keep_hf=True)
    assert isinstance(lm, Seq2SeqLM)
    return lm


# ----------------------------------------------------------------------------------------------------- the network


def naive(lm: Seq2SeqLM, network: BlockDecoder, source: Tensor, text: Sequence[int], block: int) -> Tensor:
    """States of a block behind a text, node by node and head by head: no mask, no cache, no other row."""
    shape, weights = network.shape, network.state_dict()
    size = shape.hidden_size // shape.heads
    given = [*lm.start, *text]

    def linear(name: str, x: Tensor) -> Tensor:
        found = x @ weights[f"{name}.weight"].T
        return found + weights[f"{name}.bias"] if f"{name}.bias" in weights else found

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean()
        scaled = centred / (centred.square().mean() + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def position(place: int) -> Tensor:
        rates = [10000.0 ** (-2 * i / shape.hidden_size) for i in range(shape.hidden_size // 2)]
        return torch.tensor([math.sin(place * r) for r in rates] + [math.cos(place * r) for r in rates]).double()

    def attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        parts = []
        for head in range(shape.heads):
            own = slice(head * size, (head + 1) * size)
            scores = torch.stack([query[own] @ key[own] / math.sqrt(size) for key in keys]).softmax(0)
            parts.append(sum(score * value[own] for score, value in zip(scores, values, strict=True)))
        return torch.cat(parts)

    read = [norm("enter", lm.embed(token).double()) for token in source]
    memory = list(lm.encode([source]).states[0].double())
    if shape.encoder_layers:
        memory = [e + position(i) for i, e in enumerate(read)]
    for layer in range(shape.encoder_layers):
        name = f"encoder.{layer}"
        qkv = [linear(f"{name}.qkv", norm(f"{name}.own_norm", state)).chunk(3) for state in memory]
        looked = [attend(query, [k for _, k, _ in qkv], [v for _, _, v in qkv]) for query, _, _ in qkv]
        memory = [state + linear(f"{name}.out", seen) for state, seen in zip(memory, looked, strict=True)]
        inner = [linear(f"{name}.up", norm(f"{name}.mlp_norm", state)).clamp(min=0) for state in memory]
        memory = [state + linear(f"{name}.down", units) for state, units in zip(memory, inner, strict=True)]
    if shape.encoder_layers:
        memory = [norm("encoded", state) for state in memory]
    nodes = [norm("enter", lm.embed(torch.tensor(token)).double()) + position(i) for i, token in enumerate(given)]
    for place in range(block):
        own = position(len(given) + place)
        scores = [own @ linear("copy", e + position(i)) / math.sqrt(shape.hidden_size) for i, e in enumerate(read)]
        copied = sum(share * e for share, e in zip(torch.stack(scores).softmax(0), read, strict=True))
        nodes.append(copied + weights["places"][place] + own)
    for layer in range(shape.depth):
        name = f"layers.{layer}"
        qkv = [linear(f"{name}.qkv", norm(f"{name}.own_norm", node)).chunk(3) for node in nodes]
        across = [linear(f"{name}.key_value", state).chunk(2) for state in memory]
        for i in range(len(nodes)):
            seen = qkv[: i + 1] if i < len(given) else qkv
            node = nodes[i] + linear(f"{name}.out", attend(qkv[i][0], [k for _, k, _ in seen], [v for _, _, v in seen]))
            query = linear(f"{name}.query", norm(f"{name}.cross_norm", node))
            node = node + linear(f"{name}.cross_out", attend(query, [k for k, _ in across], [v for _, v in across]))
            inner = linear(f"{name}.up", norm(f"{name}.mlp_norm", node)).clamp(min=0)
            nodes[i] = node + linear(f"{name}.down", inner)
    return torch.stack([norm("leave", node) for node in nodes[len(given) :]])


@pytest.mark.parametrize("own", [0, 2], ids=["targets_encoder", "own_encoder"])
def test_passes_over_a_cache_are_the_computation_node_by_node(pair: tuple[Any, Seq2SeqLM], own: int) -> None:
    """Ragged sources and texts, over several rounds that commit different numbers of tokens, and blocks of any size."""
    _, lm = pair
    network = random_network(lm, encoder_layers=own).double()
    slow = random_network(lm, encoder_layers=own).double()
    draft = DraftPass(lm, network, DraftVocabulary.all(lm.vocab_size))
    sources = ids(*LENGTHS)
    draft.make_room(3, 40)
    draft.read([source.tolist() for source in sources], lm.prefill(sources, lm.new_cache(3, 40)).memory)
    texts: list[list[int]] = [[], [], []]
    for turn, (counts, block) in enumerate([((1, 1, 1), 6), ((3, 1, 2), 4), ((1, 1, 1), 6), ((0, 4, 1), 1)]):
        new = [row.tolist()[:count] for row, count in zip(ids(4, 4, 4, seed=turn), counts, strict=True)]
        texts = [text + more for text, more in zip(texts, new, strict=True)]
        fed = [[*lm.start, *more] for more in new] if turn == 0 else new
        found = draft.states(fed, block)
        assert draft.written == [len(lm.start) + len(text) for text in texts]
        for row, (source, text) in enumerate(zip(sources, texts, strict=True)):
            wanted = naive(lm, slow, source, text, block)
            bound = 1e-6 if lm.dtype == torch.float64 else 1e-3
            torch.testing.assert_close(found[row].double(), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("own", [0, 2], ids=["targets_encoder", "own_encoder"])
def test_training_sees_what_decoding_sees(marian: Seq2SeqLM, own: int) -> None:
    """The module over whole rows gives the same states, and what stands in the block does not show through."""
    network = random_network(marian, encoder_layers=own).double().eval()
    texts, given, sources = [[5, 9, 3, 7, EOS], [8, EOS], [4, 4, 4, 6, 6, 6, EOS]], [2, 1, 4], ids(*LENGTHS)
    learner = BlockLearner(marian, DraftVocabulary.all(VOCAB), network, 0.0)
    read = network.read(
        marian.embed(torch.nn.utils.rnn.pad_sequence(sources, batch_first=True)),
        marian.encode(sources).states.clone(),
        list(LENGTHS),
    )
    blocks = Blocks.of(marian.start, texts, given, 4, marian.device)
    assert blocks.wanted.tolist() == [[3, 7, EOS, -1], [EOS, -1, -1, -1], [6, 6, EOS, -1]]
    found = network(marian.embed(blocks.tokens), blocks.masked(), blocks.layout, read)
    states = blocks.layout.block(found, 4)
    for row, (source, text, count) in enumerate(zip(sources, texts, given, strict=True)):
        torch.testing.assert_close(states[row], naive(marian, network, source, text[:count], 4), rtol=1e-6, atol=1e-6)
    other = Blocks.of(
        marian.start, [text[:n] + [11] * 9 for text, n in zip(texts, given, strict=True)], given, 4, marian.device
    )
    hidden = network(marian.embed(other.tokens), other.masked(), other.layout, read)
    torch.testing.assert_close(other.layout.block(hidden, 4), states)
    shown = torch.tensor([[False, True, False, False]] * 3)
    opened = network(marian.embed(other.tokens), other.masked(shown), other.layout, read)
    assert (other.layout.block(opened, 4) - states).abs().amax(
        -1
    ).min() > 1e-3  # a revealed token is seen by all places
    assert learner.target is marian


# ---------------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize("block", [2, None])
def test_greedy_text_is_the_targets(pair: tuple[Any, Seq2SeqLM], block: int | None) -> None:
    model, lm = pair
    sources = checks.prompts(VOCAB, (9, 1, 5))
    decoder = specdec(lm, GREEDY, block=block)
    assert decoder.guarantee is Guarantee.EXACT
    wanted = [greedy_reference(model, lm, source, 11) for source in sources]
    assert checks.outputs(decoder, sources, 11) == wanted
    assert checks.outputs(decoder, sources, 1) == [text[:1] for text in wanted]
    steps = list(decoder.decode(sources, 11, torch.Generator()))
    kept, drafted = (sum(sum(getattr(step, name)) for step in steps) for name in ("accepted", "drafted"))
    assert 4 <= kept < drafted, "drafts must be kept now and then, and refused now and then"
    assert all(step.draft_passes == 1 for step in steps[1:])


def test_an_encoder_of_its_own_is_trained_and_stored(marian: Seq2SeqLM, tmp_path: Path) -> None:
    network, pairs = random_network(marian, encoder_layers=1), known_texts(marian)
    learner = BlockLearner(marian, DraftVocabulary.all(VOCAB), network, 0.0)
    blocks = Blocks.of(marian.start, [text for _, text in pairs], [1] * len(pairs), 6, marian.device)
    learner.loss(blocks, learner.read([source for source, _ in pairs]), 0.0)[0].backward()
    assert all(weight.grad.abs().sum() > 0 for weight in network.encoder.parameters() if weight.dim() > 1)
    save(tmp_path, network, learner.vocabulary)
    stored, _ = load(tmp_path, marian)
    assert stored.shape == network.shape and torch.equal(
        stored.encoder[0].up.weight, network.encoder[0].up.weight.half()
    )
    sources = checks.prompts(VOCAB, (9, 1, 5))
    wanted = checks.outputs(Autoregressive(marian, GREEDY), sources, 11)
    assert checks.outputs(SpecDec(marian, GREEDY, checkpoint=tmp_path), sources, 11) == wanted


def test_rows_counters_and_state(pair: tuple[Any, Seq2SeqLM]) -> None:
    _, lm = pair
    checks.check_batch(specdec, lm)
    checks.check_counters(specdec, lm)
    checks.check_no_leak(specdec, lm)


def test_sampling_keeps_the_joint_distribution() -> None:
    """At a temperature the exact rule holds, whatever top_beta."""
    model = tiny("marian", vocab_size=8)
    lm = Seq2SeqLM.from_hf(model, keep_hf=True)
    lm.hf = AsText(model, lm, 6)
    make = lambda target, sampling: specdec(target, sampling, top_beta=3, block=3)  # noqa: E731
    assert make(lm, Sampling(0.8)).guarantee is Guarantee.EXACT
    checks.check_sampling(make, lm, Sampling(0.8), rows=2048)


def test_a_draft_ends_with_the_text(marian: Seq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = specdec(marian, GREEDY)
    filled = torch.tensor([[5, EOS, 7, EOS, 8, 9], [4, 5, 6, 7, 8, 9]])
    monkeypatch.setattr(DraftPass, "fill", lambda self, new, block: filled)
    step = list(decoder.decode(ids(3, 6), 2, torch.Generator()))[1]
    assert step.drafted == [2, 6] and step.depth == [2, 6] and step.nodes == 7
    monkeypatch.setattr(DraftPass, "fill", lambda self, new, block: filled[:1, :2].repeat(2, 1))
    assert list(decoder.decode(ids(3, 6), 2, torch.Generator()))[1].nodes == 3


def test_the_encoder_runs_once(marian: Seq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, calls, encode = specdec(marian, GREEDY), [], Seq2SeqLM.encode
    monkeypatch.setattr(
        Seq2SeqLM, "encode", lambda self, sources: (calls.append(len(sources)), encode(self, sources))[1]
    )
    checks.outputs(decoder, ids(*LENGTHS), 12)
    assert calls == [3]


# ------------------------------------------------------------------------------------------------- Spec-Verification

A, B, C, D, E = 3, 4, 5, 6, 7
SHARES = {A: 0.5, B: 0.3, C: 0.12, D: 0.06, E: 0.02}  # gaps to the best: B 0.51 nats, C 1.43, D 2.12, E 3.22


@pytest.fixture
def scripted(marian: Seq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """A teacher with the same distribution behind every token, and a drafter that always drafts the same."""
    row = torch.full((VOCAB,), 1e-9, dtype=torch.float64)
    row[list(SHARES)] = torch.tensor(list(SHARES.values()), dtype=torch.float64)

    def forward(self: Any, tokens: Tensor, *args: Any, **kwargs: Any) -> Output:
        return Output(row.log().expand(*tokens.shape, -1), torch.zeros(*tokens.shape, 1))

    prefill = Seq2SeqLM.prefill
    monkeypatch.setattr(Seq2SeqLM, "forward", forward)
    monkeypatch.setattr(
        Seq2SeqLM,
        "prefill",
        lambda self, prompts, cache, **kw: replace(
            prefill(self, prompts, cache, **kw), logits=row.log().expand(len(prompts), 1, -1)
        ),
    )

    def decode(drafted: list[list[int]], **options: Any) -> Any:
        monkeypatch.setattr(DraftPass, "fill", lambda self, new, block: torch.tensor(drafted))
        decoder = specdec(marian, GREEDY, **options)
        step = list(decoder.decode(ids(*([4] * len(drafted))), 9, torch.Generator()))[1]
        return decoder.guarantee, step.accepted, step.tokens

    return decode


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({"top_beta": 1}, [1, 0, 2]),
        ({"top_beta": 2, "tau": 9.0}, [2, 1, 6]),
        ({"top_beta": 3, "tau": 1.0}, [2, 1, 6]),
        ({"top_beta": 3, "tau": 1.5}, [4, 3, 6]),
        ({"top_beta": 3, "tau": 9.0}, [4, 3, 6]),
        ({"top_beta": 4, "tau": 2.0}, [4, 3, 6]),
        ({"top_beta": 4, "tau": 2.2}, [5, 4, 6]),
        ({"top_beta": 5, "tau": 9.0}, [6, 5, 6]),
    ],
)
def test_kept_is_what_is_among_the_best_and_near_the_best(
    options: dict[str, Any], accepted: list[int], scripted: Callable[..., Any]
) -> None:
    drafts = [[A, B, C, A, D, E], [B, C, A, D, E, 11], [A, A, B, B, A, B]]
    guarantee, kept, tokens = scripted(drafts, **options)
    assert guarantee is (Guarantee.EXACT if options["top_beta"] == 1 else Guarantee.RELAXED)
    assert kept == accepted
    assert tokens == [[*draft[:count], A] for draft, count in zip(drafts, accepted, strict=True)]


# ---------------------------------------------------------------------------------------------------------- training


def test_glancing_reveals_a_share_of_what_was_wrong() -> None:
    torch.manual_seed(0)
    present = torch.tensor([[True] * 8, [True] * 3 + [False] * 5, [True] * 5 + [False] * 3, [True] + [False] * 7])
    wrong, share = torch.tensor([7, 3, 0, 1]), 0.5
    hits = torch.zeros(present.shape)
    for _ in range(400):
        found = reveal(wrong, present, share)
        assert found.sum(1).tolist() == [3, 1, 0, 0] and not (found & ~present).any()
        hits += found
    assert hits[0].min() > 100 and hits[0].max() < 200  # 3 of 8 places, each 150 times of 400
    assert hits[1, :3].min() > 90


def test_only_what_is_hidden_is_learnt(marian: Seq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the mean over hidden places, in a pass in which the revealed ones show their token."""
    network = random_network(marian).eval()
    vocabulary = DraftVocabulary(torch.tensor([EOS, 3, 5, 6, 7, 9]), VOCAB)
    learner = BlockLearner(marian, vocabulary, network, 0.1)
    blocks = Blocks.of(marian.start, [[5, 9, 3, 7, 11, EOS], [8, 6, EOS]], [2, 1], 5, marian.device)
    sources = learner.read([row.tolist() for row in ids(4, 7)])
    shown = torch.tensor([[True, False, False, False, False], [False, False, False, False, False]])
    monkeypatch.setattr(specdec_training, "reveal", lambda wrong, present, share: shown)
    found, seen = learner.loss(blocks, sources, 0.5)
    states = network(marian.embed(blocks.tokens).float(), blocks.masked(shown), blocks.layout, sources)
    weight, _ = marian.output_rows(vocabulary.ids)
    bias = marian.output_rows(vocabulary.ids)[1]
    total, count = torch.zeros(()), 0
    for row, place, token in [(0, 1, 7), (0, 3, EOS), (1, 0, 6), (1, 1, EOS)]:  # 11 cannot be proposed
        state = blocks.layout.block(states, 5)[row, place]
        log_probs = (state @ weight.float().T + (0 if bias is None else bias.float())).log_softmax(-1)
        total = total - 0.9 * log_probs[vocabulary.of(torch.tensor(token))] - 0.1 * log_probs.mean()
        count += 1
    torch.testing.assert_close(found, total / count)
    assert float(seen["revealed"]) == pytest.approx(1 - 5 / 6)


def test_held_out_acceptance_is_that_of_decoding(pair: tuple[Any, Seq2SeqLM]) -> None:
    _, lm = pair
    network, vocabulary = learnt(lm)
    pairs = known_texts(lm)
    found = acceptance(BlockLearner(lm, vocabulary, network.float().eval(), 0.0), pairs, 6, 4)
    steps, kept, judged = 0, [0] * 6, [0] * 6
    for source, text in pairs:
        written = 1
        for step in list(specdec(lm, GREEDY).decode([torch.tensor(source)], 14, torch.Generator()))[1:]:
            room = min(6, len(text) - written)
            (count,) = step.accepted
            for place in range(min(count + 1, room)):
                judged[place] += 1
                kept[place] += place < count
            written, steps = written + count + 1, steps + 1
    assert found.judged == judged and sum(kept) > 8
    assert found.shares == pytest.approx([k / max(1, n) for k, n in zip(kept, judged, strict=True)])
    assert found.per_step == pytest.approx(sum(len(text) - 1 for _, text in pairs) / steps)
    assert found.accepted == pytest.approx(sum(kept) / steps)


BRIEF = TrainingConfig(steps=120, batch_size=16, learning_rate=5e-3, warmup=0.1, evaluations=2, precision="float32")
SMALL: dict[str, Any] = {"block": 8, "heads": 2, "inner": 64, "depth": 1}


@pytest.fixture(scope="module")
def track(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A tiny corpus, and a teacher that learnt it; ``words`` are the command line of a training for it."""
    root = tmp_path_factory.mktemp("track")
    patch = pytest.MonkeyPatch()
    patch.setenv("DECODEBENCH_DATA", str(write_data(root / "data")))
    patch.setattr(artifacts, "project_data", lambda: root / "shipped")
    make_model((4, 4), root / "cache", steps=300)
    recipe = {name: getattr(BRIEF, name) for name in ("steps", "batch_size", "learning_rate", "warmup", "evaluations")}
    own = [f"train.{key}={value}" for key, value in SMALL.items()]
    own += [f"train.recipe.{key}={value}" for key, value in recipe.items()]
    words = ["method=specdec", "model=multi30k_4_4", *own, *MACHINE, f"paths.cache={root / 'cache'}"]
    paths = PathsConfig(cache=str(root / "cache"), data=str(root / "data"))
    loaded = loading.load(
        {"name": "multi30k_4_4", "_target_": "bench.models.trained.TrainedModel"},
        {"device": "cpu", "dtype": "float32", "threads": 1, "linear": "plain"},
        paths,
    )
    yield SimpleNamespace(root=root, words=words, loaded=loaded)
    patch.undo()


def context(track: SimpleNamespace, folder: Path, points: list[Any] | None = None) -> TrainingContext:
    folder.mkdir(parents=True, exist_ok=True)
    examples = [Example(track.loaded.tokenizer(source)["input_ids"], []) for source, _ in PAIRS]
    log = [].append if points is None else points.append
    shared = {"shared_cache": track.root / "common", "model": track.loaded.lm, "examples": examples}
    return TrainingContext(output=folder, log=log, **shared)


def weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / WEIGHTS)


def test_a_drafter_is_trained_found_and_used(track: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(track.words) == 0, capsys.readouterr().err
    folder = track.root / "cache" / "trained" / "specdec-multi30k_4_4"
    facts = (artifacts.read_card(folder) or {})["facts"]
    assert facts["translations"] + facts["left_out"] == 200 and facts["steps"] == 120 and len(facts["curve"]) == 2
    assert len(facts["acceptance"]) == len(facts["curve"][0]["judged"]) == SMALL["block"]
    assert facts["tokens_per_step"] > 1.6, "a grammar of one sentence is soon learnt"
    network = BlockDecoder(shape_of(track.loaded.lm, **SMALL))
    assert set(weights(folder)) == {"vocabulary", *network.state_dict()}
    assert weights(folder)["places"].dtype == torch.float16
    capsys.readouterr()
    assert command.main(track.words) == 0 and "is already there" in capsys.readouterr().out

    target, group = track.loaded.lm, {"name": "specdec", "_target_": "methods.speculative.specdec.decoder.SpecDec"}
    decoder = instantiate.build_decoder(group, target, SamplingConfig(), checkpoint=folder)
    sources = [torch.tensor(track.loaded.tokenizer(source)["input_ids"]) for source, _ in sentences(24, seed=9)]
    (end,), wanted = target.eos_ids, checks.outputs(Autoregressive(target, GREEDY), sources, 20)
    assert checks.outputs(decoder, sources, 20) == wanted
    written, rounds = 0, 0
    for source, text in zip(sources, wanted, strict=True):
        assert end in text
        left = text.index(end)  # tokens behind the first, up to the end
        for step in list(decoder.decode([source], 20, torch.Generator()))[1:]:
            if left > 0:
                written, rounds, left = written + min(left, len(step.tokens[0])), rounds + 1, left - len(step.tokens[0])
    assert written / rounds > 1.6


def test_an_interrupted_training_ends_like_an_uninterrupted_one(
    track: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = SpecDecTraining(**SMALL, recipe=replace(BRIEF, steps=12))
    points: list[Any] = []
    whole = maker.fit(context(track, tmp_path / "whole", points))
    seen = interrupted_at(8, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        maker.fit(context(track, tmp_path / "broken"))
    facts = maker.fit(context(track, tmp_path / "broken"))
    assert seen == [*range(8), *range(7, 12)] and facts["curve"] == whole["curve"]
    theirs = weights(tmp_path / "whole")
    assert all(weight.equal(theirs[name]) for name, weight in weights(tmp_path / "broken").items())
    assert not (tmp_path / "broken" / trainer.STATE).exists()
    assert {point["step"] for point in points if "held_out/acceptance_8" in point} == {6, 12}


def test_the_share_that_is_revealed_falls(
    track: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    monkeypatch.setattr(specdec_training, "reveal", lambda w, p, share: (shares.append(share), reveal(w, p, share))[1])
    SpecDecTraining(**SMALL, recipe=replace(BRIEF, steps=5)).fit(context(track, tmp_path / "a"))
    assert shares == pytest.approx([0.5, 0.45, 0.4, 0.35, 0.3])
    shares.clear()
    SpecDecTraining(**SMALL, glancing=(0.0, 0.0), recipe=replace(BRIEF, steps=2)).fit(context(track, tmp_path / "b"))
    assert shares == []


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block": 0}, "block must be from 1 to 6.* got 0"),
        ({"block": 7}, "train.block=N"),
        ({"top_beta": 0}, "beta=0"),
        ({"tau": -1.0}, "tau >= 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], said: str, marian: Seq2SeqLM) -> None:
    with pytest.raises(ValueError, match=said):
        specdec(marian, GREEDY, **options)


def test_targets_and_parts_that_do_not_fit_are_refused(marian: Seq2SeqLM, tmp_path: Path) -> None:
    causal = checks.tiny_target()
    with pytest.raises(ValueError, match="needs an encoder-decoder, .*a causal model.*model=multi30k_4_4"):
        SpecDec(causal, GREEDY, checkpoint=tmp_path)
    with pytest.raises(MissingPart, match="python -m bench train method=specdec model=MODEL"):
        SpecDec(marian, GREEDY)
    save(tmp_path, *learnt(marian))
    other = Seq2SeqLM.from_hf(tiny("marian", decoder_layers=1, tie_word_embeddings=False))
    with pytest.raises(ValueError, match="must be of a model like .*, got "):
        SpecDec(other, GREEDY, checkpoint=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"depth": 1}))
    with pytest.raises(ValueError, match="layers.1.down.bias"):
        load(tmp_path, marian)
    with pytest.raises(ValueError, match="at least one token, got an empty one"):
        checks.outputs(specdec(marian, GREEDY), [torch.tensor([], dtype=torch.long)], 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block": 0}, "block must be at least 1, got 0"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"encoder_layers": -1}, "encoder_layers must be at least 0, got -1"),
        ({"glancing": (0.5,)}, "glancing must be two shares"),
        ({"glancing": (1.0, 0.0)}, "from 0 to below 1, got"),
        ({"dropout": 1.0}, "dropout must be from 0 to below 1, got 1.0"),
    ],
)
def test_trainings_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SpecDecTraining(**options)


def test_trainings_that_cannot_work_are_refused(
    track: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["method=specdec", "model=random", "corpus=multi30k", *MACHINE, f"paths.cache={tmp_path}"]
    assert command.main(words) == 2 and "needs an encoder-decoder" in capsys.readouterr().err
    with pytest.raises(ValueError, match="heads must divide the hidden size of .*, got 3"):
        SpecDecTraining(heads=3).fit(context(track, tmp_path / "a"))
    shop = context(track, tmp_path / "b")
    with pytest.raises(ValueError, match="must end at least 2 of its translations, got 1 of 1"):
        SpecDecTraining().fit(replace(shop, examples=shop.examples[:1]))
