"""The certificate of a server: a right one passes, each wrong one is caught and named, and errors are one message."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from bench import validate
from bench.config import compose
from bench.lossless import certificate
from bench.lossless import command as lossless
from bench.lossless.served import KEY, Completion
from bench.models import loading
from bench.models.source import Loaded
from methods.engine.sampling import Sampling
from tests.helpers.fake_server import NAME, Behaviour, serve

TARGET = ["model=random", "hardware=cpu_fp32", "hardware.threads=1"]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    cfg = compose.compose(TARGET)
    return loading.load(cfg.model, asdict(cfg.hardware), cfg.paths)


@pytest.fixture
def ask(loaded, tmp_path, capsys):
    """Exit code, record and what was printed, of the certificate of a server."""

    def asked(how: Behaviour, *more: str) -> tuple[int, dict[str, Any], str]:
        with serve(loaded, how) as url:
            words = [f"url={url}", *TARGET, f"paths.results={tmp_path}", "max_new_tokens=12", "prompts=4", *more]
            code = lossless.main(words)
        found = capsys.readouterr()
        record = {}
        if folders := list((tmp_path / "lossless").glob("served-*")):
            record = json.loads((folders[0] / "result.json").read_text())
            assert validate.check_one(folders[0]).problems == [] and url not in json.dumps(record)
        return code, record, found.out + found.err

    return asked


# ------------------------------------------------------------------------------------------------- right servers


@pytest.mark.parametrize(
    ("tokens", "tokens_by"),
    [("token_ids", "token ids"), ("token_id", "token ids"), ("llama.cpp", "token ids"), ("text", "text")],
)
def test_an_exact_server_passes_however_it_returns_tokens(ask, tokens, tokens_by):
    code, record, text = ask(Behaviour(tokens=tokens), "n=120")
    assert code == 0 and record["passed"] and record["server"]["owner"] == "fake"
    assert record["server"]["tokens_by"] == [tokens_by] and record["server"]["prompts_as"] == "token ids"
    assert sum(row["identical"] for row in record["prompts"]) == 4 and all(
        row["regret"] == 0 for row in record["prompts"]
    )
    drawn = [cell for cell in record["cells"] if cell["test"] != "later"]
    assert len(drawn) == 12 and all(cell["draws"] == 120 for cell in drawn)
    assert ("later" in record["verdicts"]) == (tokens != "text") == ("later tokens: consistent" in text)
    assert {record["verdicts"][test]["state"] for test in ("top_p", "top_k")} == {"held"}
    assert "greedy: as the target: 4 of 4 texts identical" in text and "sampling: consistent" in text


def test_tokens_as_text_are_ids_where_each_text_is_one_token(ask):
    code, record, _ = ask(Behaviour(tokens="pieces"), "n=50")
    assert code == 0 and {row["tokens_by"] for row in record["prompts"]} <= {"tokens as text", "text"}


def test_a_server_of_text_alone_that_refuses_other_fields_passes(ask):
    how = Behaviour(tokens="text", strict=True)
    code, record, text = ask(how, "n=10")
    assert code == 0 and record["server"]["prompts_as"] == "text" and "top_k" not in record["verdicts"]
    assert "top_k: not tested: refused" in text and "encoded again" in text
    assert set(record["server"]["refused"]) >= {"top_k", "return_token_ids"}
    draws = [body for body in how.asked if body["temperature"] == 1.0]
    assert len(draws) == 2 * 4 * 10 + 4 * 1 and [body for body in draws if "n" in body] == draws[:1]


def test_a_server_with_chat_alone_is_asked_through_its_template(ask):
    code, record, _ = ask(Behaviour(chat_only=True), "n=50")
    assert code == 0 and record["server"]["prompts_as"] == "a chat message"
    code, _, text = ask(Behaviour(chat_only=True, extra_prompt_tokens=4))
    assert code == 2 and "tokens where the target reads" in text and "a chat message" in text


def test_fields_that_a_server_presets_are_always_sent(ask):
    how = Behaviour()
    ask(how, "n=50")
    assert all({"top_k", "top_p", "min_p", "repetition_penalty", "temperature"} <= set(body) for body in how.asked)
    assert {body["top_k"] for body in how.asked} == {-1, 20} and {body["top_p"] for body in how.asked} == {1.0, 0.8}


# ------------------------------------------------------------------------------------------------- wrong servers


@pytest.mark.parametrize("tokens", ["token_ids", "text"])
def test_a_wrong_token_is_caught_with_what_it_costs(ask, tokens):
    code, record, text = ask(Behaviour(wrong_token=5, tokens=tokens), "n=50")
    assert code == 3 and not record["verdicts"]["greedy"] and record["verdicts"]["temperature"]["state"] == "consistent"
    assert "greedy: deviates: 0 of 4 texts identical" in text
    for row in record["prompts"]:
        assert row["violation"] >= 1 and row["regret"] >= row["max_gap"] > record["near_tie_gap"]
        assert row["first_divergence"] == 5 or tokens == "text"  # where tokens share a character


def test_a_text_that_ends_too_early_is_caught(ask):
    code, record, text = ask(Behaviour(cut=7), "n=50")
    assert code == 3 and all(row["cut"] and row["violation"] == 0 for row in record["prompts"])
    assert "4 of 4 texts end before the limit" in text


@pytest.mark.parametrize(("field", "state"), [("top_k", "top_k: IGNORED"), ("top_p", "top_p: IGNORED")])
def test_a_server_that_ignores_a_truncation_is_named(ask, field, state):
    code, record, text = ask(Behaviour(ignores=(field,)))
    other = {"top_k": "top_p", "top_p": "top_k"}[field]
    assert code == 3 and state in text and record["verdicts"][field]["outside"] > 50
    assert record["verdicts"][other]["state"] == "held" and record["verdicts"]["temperature"]["state"] == "consistent"


def test_a_wrong_temperature_is_caught_and_found(ask):
    code, record, text = ask(Behaviour(temperature=0.4), "n=400", "prompts=2")
    assert code == 3 and record["verdicts"]["greedy"] and "sampling: not consistent" in text
    found = float(record["verdicts"]["temperature"]["why"].split()[-1])
    assert 0.3 < found < 0.5


def test_a_wrong_rule_for_later_tokens_is_caught(ask):
    code, record, text = ask(Behaviour(later_temperature=0.3), "n=320", "prompts=2")
    assert code == 3 and record["verdicts"]["temperature"]["state"] == "consistent" and record["verdicts"]["greedy"]
    assert "later tokens: not consistent" in text


def test_a_server_that_never_samples_is_named(ask):
    code, record, text = ask(Behaviour(temperature=0.0), "n=100")
    assert code == 3 and "it decodes greedily" in text and record["verdicts"]["greedy"]
    assert record["verdicts"]["top_p"]["state"] == "not consistent"


def test_too_few_draws_to_notice_are_said_to_be_unsure(ask):
    code, record, text = ask(Behaviour(), "n=5", "top_k=259")
    assert code == 0 and record["verdicts"]["top_k"]["state"] == "unsure" and "raise n" in text


# -------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("how", "more", "code", "answer"),
    [
        ({}, ["served_model=other"], 2, f"does not exist. It lists {NAME}. Set served_model=NAME"),
        ({"models_status": 500}, [], 2, "lists no model. Set served_model=NAME"),
        ({"key": "secret"}, [], 2, f"wants a key. Set the environment variable {KEY}"),
        ({"status": 400}, [], 2, "HTTP 400 to /completions: the engine is broken"),
        ({"status": 500, "after": 8}, [], 1, "HTTP 500 to /completions: the engine is broken"),
        ({"body": "<html>"}, [], 2, "is not JSON"),
        ({"body": "{}"}, [f"served_model={NAME}"], 2, "has no choices"),
        ({"wait_s": 0.4}, ["timeout_s=0.05"], 1, "did not answer within 0.05 s. Set timeout_s=SECONDS"),
        ({"extra_prompt_tokens": 1}, [], 2, "Serve the same model"),
    ],
)
def test_what_a_server_can_do_wrong_is_one_message(ask, tmp_path, how, more, code, answer):
    found, _, text = ask(Behaviour(**how), *more)
    said = [line for line in text.splitlines() if not line.startswith(("greedy", "model", "loading"))]
    assert found == code and answer in said[-1] and "Traceback" not in text
    assert not (tmp_path / "lossless").exists()


def test_the_key_is_sent_and_not_recorded(ask, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "hidden-word")
    code, _, text = ask(Behaviour(key="hidden-word"), "n=50")
    assert code == 0 and "hidden-word" not in text
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and b"hidden-word" in file.read_bytes()]


def test_no_server_at_all(capsys, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    assert lossless.main([f"url={url}", *TARGET, f"paths.results={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert f"No server answers at {url} (Connection refused)" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["url=localhost:8000"], "url must start with http"),
        (["url=http://x", "n=0"], "n must be at least 1, got 0"),
        (["url=http://x", "prompts=9"], "prompts must be at most 8, got 9"),
        (["url=http://x", "top_p=1.0"], "top_p must be between 0 and 1"),
        (["url=http://x", "temperature=0"], "temperature must be above 0"),
        (["url=http://x", "dataset=mtbench"], "the prompts are fixed"),
        (["url=http://x", "method=eagle"], "the server decodes"),
        (["url=http://x", "sampling.temperature=1"], "set temperature"),
        (["url=http://x", "experiment=greedy"], "tested in all ways"),
        (["url=http://x", "served_modl=a"], "Did you mean 'served_model'"),
    ],
)
def test_bad_words_get_one_message(words, answer, capsys):
    assert lossless.main(words) == 2
    said = capsys.readouterr().err
    assert answer in said and said.count("\n") == 1


# -------------------------------------------------------------------------------------------------------- pieces


def test_the_edge_of_a_set_is_what_rounding_may_swap():
    logits = torch.tensor([3.0, 2.0, 1.9999, 1.0])
    two = certificate.Truncation.of(logits, Sampling(1.0, top_k=2), 1e-3)
    assert two.kept.tolist() == [True, True, False, False] and two.edge.tolist() == [False, False, True, False]
    assert not certificate.Truncation.of(logits, Sampling(1.0, top_k=2), 1e-5).edge.any()
    halves = torch.tensor([0.5, 0.3, 0.2]).log()
    close = certificate.Truncation.of(halves, Sampling(1.0, top_p=0.4999), 1e-3)
    assert close.kept.tolist() == [True, False, False] and close.edge.tolist() == [False, True, False]


def test_draws_at_the_edge_do_not_count(loaded):
    logits = torch.full((loaded.lm.vocab_size,), -20.0)
    logits[:3] = torch.tensor([3.0, 2.0, 1.9999])
    drawn = [Completion("", [token], None, False) for token in [0] * 60 + [1] * 30 + [2] * 10]
    reader = certificate.Reader(loaded)
    found = certificate.cell(drawn, logits, Sampling(1.0, top_k=2), reader, 1e-3)
    assert (found["edge"], found["outside"], found["draws"]) == (10, 0, 90) and found["p_value"] > 0.01
    found = certificate.cell(drawn, logits, Sampling(1.0, top_k=1), reader, 1e-3)
    assert (found["edge"], found["outside"]) == (0, 40) and found["p_value"] == 0.0


def test_the_fitted_temperature_is_that_of_the_draws():
    logits = torch.linspace(0, 5, 40)
    probs = (logits / 2.0).softmax(-1).double().numpy()
    counts = np.append(np.random.default_rng(0).multinomial(20_000, probs), 0).astype(float)
    assert certificate.fitted_temperature(logits, np.arange(40), counts) == pytest.approx(2.0, rel=0.05)
    assert certificate.fitted_temperature(logits, np.arange(40), np.eye(41)[3]) is None


def test_a_text_is_read_along_the_target_s_own(loaded):
    reader, tokenizer = certificate.Reader(loaded), loaded.tokenizer
    own = list(tokenizer("the same words", add_special_tokens=False)["input_ids"])
    assert reader.ids_of_text("the same words", own) == own
    other = list(tokenizer("the same world", add_special_tokens=False)["input_ids"])
    assert reader.ids_of_text("the same world", own) == other
    assert reader.ids_of_text("", own) == []
