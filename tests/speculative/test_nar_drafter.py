"""Non-autoregressive students as drafters: where their guesses are taken up, and that the text is the teacher's own."""

from __future__ import annotations

import itertools
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator

from bench.config import compose, instantiate
from bench.config.schema import PathsConfig, SamplingConfig
from bench.contract import checks
from bench.models import artifacts
from bench.utils import files
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee
from methods.drafting import Context
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.checkpoint_files import MissingPart
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.non_autoregressive.cmlm import CmlmStudent, MaskPredict
from methods.non_autoregressive.ctc import CtcStudent
from methods.non_autoregressive.depa import DepaStudent
from methods.non_autoregressive.flowseq.model import FlowSeqStudent
from methods.non_autoregressive.glat import GlatStudent
from methods.non_autoregressive.nat import NatStudent
from methods.non_autoregressive.network import Network
from methods.non_autoregressive.student import load_student
from methods.speculative.nar_drafter import Alignment, Completion, SpecDecNat
from methods.training.trainer import added
from tests.engine.test_seq2seq_lm import AsText, greedy_reference
from tests.helpers import tiny_students
from tests.helpers.tiny_students import VOCABULARY, batch_of, save, student

GREEDY, END = Sampling(), 1
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "nat": (NatStudent, {"classes": 4, "positional": True}),
    "glat": (GlatStudent, {"positional": False}),
    "cmlm": (CmlmStudent, {}),
    "ctc": (CtcStudent, {"upsample": 2}),
    "depa": (DepaStudent, {"backward": 0.0, "words": None}),
    "flowseq": (
        FlowSeqStudent,
        {
            "latent": 4,
            "width": 8,
            "inner": 8,
            "steps": [1],
            "posterior_layers": 1,
            "autoencoding": 0.9,
            "annealing": 0.1,
        },
    ),
}
ASKED = [*((name, False) for name in KINDS), *((name, True) for name in ("glat", "cmlm", "depa"))]
ways = pytest.mark.parametrize(("name", "redraft"), ASKED, ids=[f"{name}{'_anew' * anew}" for name, anew in ASKED])


@cache
def teacher(family: str = "marian") -> tuple[Any, Seq2SeqLM]:
    """The original model and ours; nothing is forbidden, for the original would write it.

    Its output matrix is its own: tied, random models repeat one token.
    """
    model = tiny_students.network(family=family, tie_word_embeddings=False)
    model.generation_config.bad_words_ids = None
    lm = Seq2SeqLM.from_hf(model, keep_hf=True)
    assert isinstance(lm, Seq2SeqLM)
    return model, lm


@cache
def texts_of(lm: Seq2SeqLM) -> list[tuple[list[int], list[int]]]:
    """Sources, and what the teacher writes behind each, up to its end."""
    sources = checks.prompts(VOCABULARY, (9, 1, 5, 14, 8, 6, 3, 2, 17, 11, 7))
    written = checks.outputs(Autoregressive(lm, GREEDY), sources, 9)
    cut = [list(itertools.takewhile(lambda token: token != END, text)) or [5] for text in written]
    return [(source.tolist(), text) for source, text in zip(sources, cut, strict=True)]


@cache
def learnt(name: str, lm: Seq2SeqLM) -> Any:
    """A student that half knows what the teacher writes."""
    kind, options = KINDS[name]
    made = student(kind, lm, own=True, **options)
    pairs = [pair for pair in texts_of(lm) if name != "ctc" or 2 * max(1, len(pair[0]) - 1) >= 2 * len(pair[1])]
    notes = [spread(len(text), len(source)) for source, text in pairs]
    batch = batch_of(pairs, notes)
    optimizer = torch.optim.Adam([p for p in made.parameters() if p.requires_grad], 1e-2)
    torch.manual_seed(0)
    for _ in range(120 if name == "cmlm" else 60):
        loss, _ = made.objective(batch, 0.0, 0.0)
        optimizer.zero_grad()
        added(loss).backward()
        optimizer.step()
    return made.eval()


def spread(count: int, places: int) -> list[int]:
    """Fertilities that sum to ``count``, the end's among them."""
    content = max(1, places - 1)
    found = [count // content + (place < count % content) for place in range(content)]
    return [min(3, fertility) for fertility in found] + [0] * (places - content)


def decoder(lm: CausalLM, sampling: Sampling, name: str, **options: Any) -> SpecDecNat:
    assert isinstance(lm, Seq2SeqLM)
    with tempfile.TemporaryDirectory() as folder:
        return SpecDecNat(lm, sampling, name, checkpoint=save(learnt(name, lm), Path(folder), lm), **options)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- the alignment


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ([], [4, 5, 6, 7, 8]),
        ([4, 5], [6, 7, 8]),
        ([4, 9], [6, 7, 8]),  # another word in the place of 5
        ([4, 9, 5], [6, 7, 8]),  # a word more
        ([4, 5, 7], [8]),  # a word less
        ([5, 6, 7], [8]),
        ([9, 9, 9], [7, 8]),
        ([4, 5, 6, 7, 8], []),
        ([4, 5, 6, 7, 8, 9, 9], []),
    ],
)
def test_guess_is_taken_up_where_the_text_is(text: list[int], rest: list[int]) -> None:
    whole, piecemeal = (Alignment([4, 5, 6, 7, 8]) for _ in range(2))
    whole.follow(text)
    for count in range(len(text) + 1):
        piecemeal.follow(text[:count])
    assert whole.rest == piecemeal.rest == rest


def test_alignment_is_of_least_edit_distance() -> None:
    """Against the definition by recursion."""

    @cache
    def distance(one: tuple[int, ...], two: tuple[int, ...]) -> int:
        if not one or not two:
            return len(one) + len(two)
        replaced = distance(one[:-1], two[:-1]) + (one[-1] != two[-1])
        return min(replaced, distance(one[:-1], two) + 1, distance(one, two[:-1]) + 1)

    rows = torch.randint(0, 3, (60, 11), generator=Generator().manual_seed(0)).tolist()
    for number, row in enumerate(rows):
        guess, text = row[:5], row[5 : 5 + number % 7]
        aligned = Alignment(guess)
        aligned.follow(text)
        taken = len(guess) - len(aligned.rest)
        costs = [distance(tuple(text), tuple(guess[:n])) for n in range(6)]
        assert costs[taken] == min(costs)


# ----------------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize(
    ("name", "redraft", "family"),
    [*((*way, "marian") for way in ASKED), ("glat", False, "pegasus"), ("cmlm", True, "pegasus")],
)
def test_greedy_text_is_the_teachers(name: str, redraft: bool, family: str) -> None:
    model, lm = teacher(family)
    sources = [torch.tensor(source) for source, _ in texts_of(lm)][:4]
    made = decoder(lm, GREEDY, name, redraft=redraft)
    assert made.guarantee is Guarantee.EXACT
    wanted = [greedy_reference(model, lm, source, 9) for source in sources]
    assert checks.outputs(made, sources, 9) == wanted
    assert checks.outputs(made, sources, 1) == [text[:1] for text in wanted]
    steps = list(made.decode(sources, 9, Generator()))
    kept, drafted = (sum(sum(getattr(step, name)) for step in steps) for name in ("accepted", "drafted"))
    assert 1 <= kept < drafted, "drafts must be kept now and then, and refused now and then"


@ways
def test_rows_counters_and_state(name: str, redraft: bool) -> None:
    lm = teacher()[1]
    make = lambda target, sampling: decoder(target, sampling, name, redraft=redraft, block=3)  # noqa: E731
    checks.check_batch(make, lm)
    checks.check_counters(make, lm)
    checks.check_no_leak(make, lm)


@pytest.mark.parametrize(("name", "redraft"), [("nat", False), ("cmlm", True)])
def test_sampling_keeps_the_joint_distribution(name: str, redraft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lm = teacher()
    learnt(name, lm)
    monkeypatch.setattr(lm, "hf", AsText(model, lm, 6))
    make = lambda target, sampling: decoder(target, sampling, name, redraft=redraft, block=2)  # noqa: E731
    checks.check_sampling(make, lm, Sampling(1.3), rows=2048, horizon=2)


# ------------------------------------------------------------------------------------------------------------ drafts


@ways
def test_passes_are_counted_and_the_source_is_read_once(
    name: str, redraft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = teacher()[1]
    made, calls = decoder(lm, GREEDY, name, redraft=redraft), {"encode": 0, "decode": 0}
    for call in calls:
        original = getattr(Network, call)

        def counted(self: Any, *args: Any, call: str = call, original: Any = original, **options: Any) -> Any:
            calls[call] += 1
            return original(self, *args, **options)

        monkeypatch.setattr(Network, call, counted)
    sources = [torch.tensor(source) for source, _ in texts_of(lm)][:3]
    steps = list(made.decode(sources, 9, Generator()))
    assert calls["encode"] == 1 and len(steps) > 2
    assert sum(step.draft_passes for step in steps) == sum(calls.values())
    if not redraft:
        assert not any(step.draft_passes for step in steps[2:])


@pytest.mark.parametrize("name", ["glat", "cmlm", "depa"])
def test_redrafting_reads_the_text(name: str) -> None:
    """Row by row: the committed tokens in their places, the blank input behind them, and one pass."""
    lm = teacher()[1]
    made = learnt(name, lm)
    pairs = texts_of(lm)[:5]
    sources = [torch.tensor(source) for source, _ in pairs]
    prefixes = [text[:count] for (_, text), count in zip(pairs, (2, 0, 1, 4, 3), strict=True)]
    asked = Completion(made)
    with torch.no_grad():
        assert asked.read(sources, Generator()) == 1
        found, passes = asked.behind(prefixes, 3)
        assert passes == 1
        for source, prefix, draft in zip(sources, prefixes, found, strict=True):
            memory = made.network.encode(source[None], torch.tensor([len(source)]))
            length = made.lengths.best(memory)[0]
            inputs = made.inputs(memory, length, int(length)).clone()
            read = made.network.embed(torch.tensor(prefix, dtype=torch.long))
            inputs[0, : len(prefix)] = read[: int(length)]
            tokens, _ = made.choose(made.network.decode(inputs, None, memory))
            assert draft == [*tokens[0, len(prefix) :].tolist(), END][:3]
        other, _ = asked.behind([[token + 1 for token in prefix] for prefix in prefixes], 3)
        assert other != found, "what was committed does not matter"
        past = [[5] * 60 for _ in prefixes]
        assert asked.behind(past, 3) == ([[END]] * 5, 0)


def test_mask_predict_behind_nothing_is_its_first_iteration() -> None:
    lm = teacher()[1]
    made = learnt("cmlm", lm)
    sources = [torch.tensor(source) for source, _ in texts_of(lm)][:4]
    asked = Completion(made)
    with torch.no_grad():
        asked.read(sources, Generator())
        found, _ = asked.behind([[] for _ in sources], 50)
        lengths = torch.tensor([len(source) for source in sources])
        rows = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True)
        whole = MaskPredict(1)(made, made.network.encode(rows, lengths), Generator())
    for row, draft in enumerate(found):
        assert draft == [*whole.tokens[row, 0, : int(whole.lengths[row, 0])].tolist(), END]


def test_nothing_is_drafted_behind_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = teacher()[1]
    made = decoder(lm, GREEDY, "glat", block=4)
    drafter: Any = made.drafter
    monkeypatch.setattr(drafter._continuation, "read", lambda sources, rng: 2)
    monkeypatch.setattr(drafter._continuation, "behind", lambda texts, most: ([[7, 8]] * len(texts), 0))
    drafter.reset([[5, 6], [5]], 9)
    output = Output(torch.zeros(2, 1, VOCABULARY), torch.zeros(2, 1, 16))
    texts = [[5, 6, 9], [5, 4, END]]
    context = Context(texts, torch.tensor([9, END]), output, None, GREEDY, Generator())
    draft = drafter.propose(context)
    assert draft.tokens.tolist() == [[7, 8], [-1, -1]] and draft.sizes == [2, 0] and draft.passes == 2
    context.tokens, context.path = [[5, 6, END], [5, 4, END]], torch.zeros(2, 1, dtype=torch.long)
    assert drafter.propose(context).tokens.shape == (2, 0)


# --------------------------------------------------------------------------------------------------- parts and refusals


def test_part_is_that_of_the_method_that_drafts(tmp_path: Path) -> None:
    lm = teacher()[1]
    folder = tmp_path / "trained" / "cmlm-own"
    save(learnt("cmlm", lm), folder, lm, data="distilled")
    files.write_json(folder / artifacts.CARD, {"model": {"revision": None}})
    paths = PathsConfig(cache=str(tmp_path))
    words = ["method=specdec_nat", "dataset=multi30k"]
    group = dict(compose.compose([*words, "method.drafter=cmlm"]).method)
    found = artifacts.find(group, "own", None, paths)
    assert found is not None and found.folder == folder
    assert artifacts.find(dict(compose.compose(words).method), "own", None, paths) is None
    made: Any = instantiate.build_decoder(group, lm, SamplingConfig(), checkpoint=found.folder)
    assert made.stats()["data"] == "distilled" and set(made.memory()) == {"student"}
    assert isinstance(load_student(CmlmStudent, lm, folder)[0], CmlmStudent)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafter": "cmlm"}, "python -m bench train method=cmlm model=MODEL"),
        ({"drafter": "nat", "redraft": True}, "redraft must be false with drafter=nat.* got true"),
        ({"block": 0}, "block must be at least 1, got 0"),
    ],
)
def test_refusals(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        SpecDecNat(teacher()[1], GREEDY, **options)
    assert isinstance(raised.value, MissingPart) is said.startswith("python")


def test_a_causal_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="encoder-decoders of the Marian or Pegasus family"):
        SpecDecNat(checks.tiny_target(), GREEDY, checkpoint=tmp_path)
