"""CTranslate2 behind the interface: the target's own translations in 32 bit, its beam search, what is refused."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.external.ctranslate2 import CTranslate2
from tests.engine.test_seq2seq_lm import EOS, VOCAB, begun, full, ids, tiny

MISSING = CTranslate2.missing_library()
installed = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
FORBIDDEN = (0, 5, 9)


def teacher(kind="pegasus", dtype=torch.float32):
    """A random model with forbidden tokens, as the models of the project have."""
    model = tiny(kind, dtype)
    model.generation_config.bad_words_ids = [[id] for id in FORBIDDEN]
    return Seq2SeqLM.from_hf(model, keep_hf=True)


@pytest.fixture(scope="module", params=["pegasus", "marian"])
def target(request):
    return teacher(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def cut(rows):
    """Up to the end-of-sequence token, as the runner cuts."""
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


@installed
def test_greedy_translations_of_a_ragged_batch_are_the_targets(target, folder):
    rival, batch = CTranslate2(target, Sampling(), storage=folder), ids(5, 1, 14, 30)
    assert rival.guarantee is Guarantee.EXACT
    for limit in (1, 25):
        wanted = cut(checks.outputs(Autoregressive(target, Sampling()), batch, limit))
        assert checks.outputs(rival, batch, limit, eos_ids=[EOS]) == wanted
        assert [checks.outputs(rival, [source], limit, eos_ids=[EOS])[0] for source in batch] == wanted


@installed
def test_a_token_that_is_forbidden_is_not_written(folder):
    """One that the model would write; the search then goes on as the target's."""
    model, batch = tiny("pegasus", torch.float32), ids(5, 1, 14, 30)
    free = CTranslate2(Seq2SeqLM.from_hf(model, keep_hf=True), Sampling(), storage=folder)
    written = [token for row in checks.outputs(free, batch, 25) for token in row if token != EOS]
    forbidden = max(written, key=written.count)
    model.generation_config.bad_words_ids = [[forbidden]]
    target = Seq2SeqLM.from_hf(model, keep_hf=True)
    rows = checks.outputs(CTranslate2(target, Sampling(), storage=folder), batch, 25, eos_ids=[EOS])
    assert not any(forbidden in row for row in rows)
    assert rows == cut(checks.outputs(Autoregressive(target, Sampling()), batch, 25))


def mean_logprob(target, source, row):
    logits = full(target.hf, source, begun(target, *row))[len(target.start) - 1 : -1].clone()
    logits[:, list(FORBIDDEN)] = -torch.inf
    return float(logits.log_softmax(-1).gather(1, torch.tensor(row)[:, None]).mean())


@installed
def test_beams_find_what_is_likelier(target, folder):
    """Two tokens, all first ones kept: the best pair is that of the enumeration."""
    rival = CTranslate2(target, Sampling(), num_beams=VOCAB, storage=folder)
    assert rival.guarantee is Guarantee.RELAXED
    source, allowed = ids(6)[0], [token for token in range(VOCAB) if token not in FORBIDDEN]
    (found,) = checks.outputs(rival, [source], 2, eos_ids=[EOS])
    pairs = [[EOS]] + [[a, b] for a in allowed if a != EOS for b in allowed]
    best = max(mean_logprob(target, source, pair) for pair in pairs)
    assert mean_logprob(target, source, found) == pytest.approx(best, abs=1e-5)


@installed
def test_steps_and_times(target, folder):
    for beams in (1, 3):
        rival = CTranslate2(target, Sampling(), num_beams=beams, storage=folder)
        steps = list(rival.decode(ids(7, 4), 9, torch.Generator()))
        times = [step.at_ns for step in steps]
        assert times == sorted(times) and len(steps) <= 9 and {step.nodes for step in steps} == {beams}
        assert (len(set(times)) > 1) == (beams == 1)
        assert all(step.rows == sum(map(len, step.tokens)) for step in steps)


@installed
def test_eight_bits_are_near_the_target(folder):
    target = teacher()
    rival = CTranslate2(target, Sampling(), weights="int8", storage=folder)
    assert rival.guarantee is Guarantee.RELAXED
    batch = ids(5, 9, 14, 30)
    ours = cut(checks.outputs(Autoregressive(target, Sampling()), batch, 12))
    for source, row, other in zip(batch, checks.outputs(rival, batch, 12, eos_ids=[EOS]), ours, strict=True):
        assert not set(row) & set(FORBIDDEN)
        assert mean_logprob(target, source, row) > mean_logprob(target, source, other) - 0.5


@installed
def test_the_files_are_written_once_per_content(tmp_path):
    first, again = (CTranslate2(teacher(), Sampling(), storage=tmp_path).folder for _ in range(2))
    changed = teacher()
    with torch.no_grad():
        changed.hf.model.encoder.layers[0].fc1.bias[0] += 1e-3
    other = CTranslate2(changed, Sampling(), storage=tmp_path).folder
    assert first == again and {first, other} == set((tmp_path / "models" / "ctranslate2").iterdir())
    alone = CTranslate2(teacher(), Sampling())
    made = alone.folder
    assert made.is_dir()
    del alone
    assert not made.exists()


@installed
def test_a_type_that_the_machine_lacks_is_refused(monkeypatch):
    import ctranslate2

    monkeypatch.setattr(ctranslate2, "get_supported_compute_types", lambda device: {"int8", "float16"})
    with pytest.raises(ValueError, match="float32; it has float16, int8. Set hardware=cpu_fp32"):
        CTranslate2(teacher(), Sampling())


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("pegasus", {"num_beams": 0}, "num_beams must be at least 1, got 0"),
        ("pegasus", {"sampling": Sampling(0.7)}, "temperature=0.7"),
        ("t5", {}, "must be of a type"),
        ("mbart", {}, "got mbart"),
    ],
)
def test_what_is_refused(kind, options, said):
    target = Seq2SeqLM.from_hf(tiny(kind), keep_hf=True)
    with pytest.raises(ValueError, match=said):
        CTranslate2(target, **{"sampling": Sampling(), **options})


def test_models_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="needs an encoder-decoder"):
        CTranslate2(checks.tiny_target(), Sampling())
    with pytest.raises(ValueError, match="keep_hf=True"):
        CTranslate2(Seq2SeqLM.from_hf(tiny("pegasus")), Sampling())


def test_where_it_is_not_installed_one_message_says_how(monkeypatch):
    def not_there(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_there)
    with pytest.raises(ValueError, match=r"ctranslate2, which is optional.*pip install 'decodebench\[rivals\]'"):
        CTranslate2(teacher(), Sampling())
