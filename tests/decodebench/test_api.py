"""The Python API on a small Llama with random weights: texts, limits, records, views, errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, MarianConfig, MarianMTModel

import decodebench
from bench.config import compose, overrides
from bench.measure import draft_costs
from bench.measure import run as program
from bench.models.random_weights import byte_tokenizer
from bench.records import lookup, run_folder
from decodebench import UserError
from methods.speculative.prompt_lookup import PromptLookup

ROOT = Path(__file__).resolve().parents[2]
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello, hello, hello."}]
WITHOUT_DRAFTS = ["autoregressive", "hf_generate"]
EXACT = [*WITHOUT_DRAFTS, "suffix", "prompt_lookup", "speculative_sampling", "speculative_sampling by name"]
QUICK: dict[str, Any] = {"method": "suffix", "max_new_tokens": 12}


def llama(seed: int, layers: int = 3, **more: Any) -> LlamaForCausalLM:
    """Weights so spread that greedy text is no single repeated token."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=260, num_hidden_layers=layers, max_position_embeddings=512, initializer_range=0.2, **sizes, **more
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Records go to a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("DECODEBENCH_HOME", str(home))
        yield home / "results"


@pytest.fixture(scope="module")
def module() -> LlamaForCausalLM:
    return llama(0)


@pytest.fixture(scope="module")
def target(module: LlamaForCausalLM) -> decodebench.Target:
    return decodebench.load(module, byte_tokenizer(), threads=1)


@pytest.fixture(autouse=True)
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes cost on a busy machine would decide how much is drafted."""
    monkeypatch.setattr(draft_costs, "measure", lambda *_, **__: [[0.0, 0.0], [1.0, 1.0], [64.0, 1.1]])


@pytest.fixture(scope="module")
def draft() -> decodebench.Target:
    return decodebench.load(llama(1, layers=1), byte_tokenizer(), threads=1)


@pytest.fixture(scope="module")
def measured(target: decodebench.Target) -> decodebench.Measurement:
    found = decodebench.benchmark(target, ["Say 1 1 1.", HELLO], **QUICK)
    assert isinstance(found, decodebench.Measurement)
    return found


def greedy(module: LlamaForCausalLM, ids: list[int], limit: int) -> list[int]:
    """What transformers writes."""
    done = module.generate(torch.tensor([ids]), max_new_tokens=limit, do_sample=False, eos_token_id=259, pad_token_id=0)
    return done[0, len(ids) :].tolist()


# ---------------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("method", EXACT)
def test_text_is_that_of_transformers(
    method: str, module: LlamaForCausalLM, target: decodebench.Target, draft: decodebench.Target
) -> None:
    drafts: dict[str, Any] = {"speculative_sampling": draft, "speculative_sampling by name": "random"}
    options = {"draft_model": drafts[method]} if method in drafts else {}
    ids = [5, 6, 7, 8] * 4
    found = decodebench.generate(target, ids, method=method.split()[0], max_new_tokens=30, **options)
    assert isinstance(found, decodebench.Generation) and (found.drafted > 0) == (method not in WITHOUT_DRAFTS)
    assert found.ids == greedy(module, ids, 30) and found.prompt_ids == ids
    assert found.text == str(found) == target.tokenizer.decode(found.ids, skip_special_tokens=True)


def test_counters(target: decodebench.Target, draft: decodebench.Target) -> None:
    plain = decodebench.generate(target, "Hello", method="autoregressive", max_new_tokens=9)
    assert isinstance(plain, decodebench.Generation)
    assert (plain.steps, plain.target_passes, plain.tokens_per_step) == (9, 8, 1.0)
    assert (plain.drafted, plain.accepted, plain.acceptance) == (0, 0, None)
    own = decodebench.load(llama(0), byte_tokenizer(), threads=1)  # the target's twin has everything accepted
    options = {"method": "speculative_sampling", "gamma": 3, "draft_model": own}
    twin = decodebench.generate(target, "Hello", max_new_tokens=9, **options)
    assert isinstance(twin, decodebench.Generation)
    assert twin.ids == plain.ids and twin.acceptance == 1.0 and (twin.steps, twin.tokens_per_step) == (3, 4.0)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_limit_is_kept(limit: int, target: decodebench.Target) -> None:
    options = {"method": "speculative_sampling", "draft_model": target, "gamma": 5}
    found = decodebench.generate(target, "Hello", max_new_tokens=limit, **options)
    assert isinstance(found, decodebench.Generation)
    assert len(found.ids) == limit and found.finish == "length"


def test_text_ends_at_the_end_of_sequence() -> None:
    written = greedy(llama(0), [9, 10, 11], 12)
    end = next(token for place, token in enumerate(written) if place > 2 and token not in written[:place])
    ending = decodebench.load(llama(0, eos_token_id=end), byte_tokenizer(), threads=1)
    for method in ("suffix", "autoregressive"):
        found = decodebench.generate(ending, [9, 10, 11], method=method, max_new_tokens=12)
        assert isinstance(found, decodebench.Generation)
        assert found.ids == written[: written.index(end) + 1] and found.finish == "eos"


def test_a_batch_gives_what_each_prompt_gives_alone(target: decodebench.Target) -> None:
    asked = ["Hello", HELLO, [3, 4, 5], "Another text, which is longer than the others are."] * 3
    together = decodebench.generate(target, asked, method="prompt_lookup", max_new_tokens=11)
    alone = [decodebench.generate(target, each, method="prompt_lookup", max_new_tokens=11) for each in asked]
    assert isinstance(together, list) and [each.ids for each in together] == [each.ids for each in alone]  # type: ignore[union-attr]
    (one,) = decodebench.generate(target, ["Hello"], method="suffix", max_new_tokens=2)  # type: ignore[misc]
    assert len(one.ids) == 2


def test_messages_and_texts_are_put_by_the_chat_template(target: decodebench.Target) -> None:
    found = decodebench.generate(target, ["Hi", HELLO], method="suffix", max_new_tokens=1)
    prompts = [target.tokenizer.decode(each.prompt_ids) for each in found]  # type: ignore[union-attr]
    assert prompts == ["user: Hi\nassistant: ", "system: Be brief.\nuser: Say hello, hello, hello.\nassistant: "]


def test_tensors_are_token_ids(target: decodebench.Target) -> None:
    rows = torch.tensor([[5, 6, 7], [8, 9, 10]])
    found = decodebench.generate(target, rows, method="suffix", max_new_tokens=2)
    assert [each.prompt_ids for each in found] == rows.tolist()  # type: ignore[union-attr]
    one = decodebench.generate(target, rows[0], method="suffix", max_new_tokens=2)
    assert isinstance(one, decodebench.Generation) and one.ids == found[0].ids  # type: ignore[index]


def test_draws_depend_on_the_seed_alone(target: decodebench.Target) -> None:
    def drawn(seed: int) -> list[int]:
        found = decodebench.generate(target, "Hello", method="suffix", max_new_tokens=20, temperature=1.0, seed=seed)
        assert isinstance(found, decodebench.Generation)
        return found.ids

    first = drawn(1)
    assert drawn(2) != first and drawn(1) == first


def test_an_encoder_decoder_in_memory() -> None:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    more = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 259, "decoder_start_token_id": 259}
    torch.manual_seed(0)
    module = MarianMTModel(MarianConfig(vocab_size=260, d_model=16, init_std=0.3, eos_token_id=0, **sizes, **more))
    module.generation_config.forced_eos_token_id = None
    own = decodebench.load(module, byte_tokenizer(), threads=1)
    ids = [5, 6, 7, 8]
    found = decodebench.generate(own, ids, method="prompt_lookup", max_new_tokens=8)
    theirs = module.generate(torch.tensor([ids]), max_new_tokens=8, num_beams=1, do_sample=False)[0, 1:].tolist()
    assert isinstance(found, decodebench.Generation) and found.ids == theirs


# -------------------------------------------------------------------------------------------------------------- load


def test_a_model_in_memory_stays_as_it_is(module: LlamaForCausalLM, target: decodebench.Target) -> None:
    assert (target.name, target.model.hf) == ("module", module)
    assert target.revision and re.fullmatch(r"[0-9a-f]{12}", target.revision)
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert (target.hardware.device, target.hardware.dtype) == ("cpu", "float32")
    assert "Target('module'" in repr(target) and "float32 on cpu" in repr(target)


def test_the_digest_tells_models_apart(target: decodebench.Target) -> None:
    tokenizer = byte_tokenizer()
    assert decodebench.load(llama(0), tokenizer).revision == target.revision
    changed = llama(0)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    other_template = byte_tokenizer()
    other_template.chat_template = "{{ messages[0]['content'] }}"
    others = [
        decodebench.load(changed, tokenizer),
        decodebench.load(llama(0, rope_theta=5000.0), tokenizer),
        decodebench.load(llama(0), other_template),
    ]
    assert len({target.revision, *(other.revision for other in others)}) == 4


def test_a_name_loads_what_the_command_line_loads() -> None:
    found = decodebench.load("random", dtype=torch.float32, device="cpu", threads=1)
    assert (found.name, found.revision, found.model.dtype) == ("random", "seed 0", torch.float32)
    assert found.group == compose.compose(["model=random"]).model


# --------------------------------------------------------------------------------------------------------- benchmark


def test_a_measurement(measured: decodebench.Measurement, target: decodebench.Target, place: Path) -> None:
    assert measured.path is not None and measured.path.parent == place and run_folder.validate(measured.path) == []
    assert measured.path.name.startswith("suffix-prompts-module-")
    manifest = run_folder.read_manifest(measured.path) or {}
    assert manifest["model"]["revision"] == target.revision and manifest["status"] == "finished"
    assert measured.speedup.value == measured.summary["speedup"]["total"]["value"]
    assert measured.valid == (not measured.reasons) == (measured.result == "VALID")
    assert measured.result == measured.summary["verdict"]["result"] and measured.result in repr(measured)
    assert measured.summary["agreement"]["exact"] == 1.0
    assert (measured.summary["peak_memory_bytes"] or 1) < 4 * 2**30


def test_one_row_per_prompt(measured: decodebench.Measurement, target: decodebench.Target) -> None:
    table = measured.to_dataframe()
    assert list(table.columns) == [
        "prompt", "text", "baseline text", "identical", "speed-up", "tokens/step", "acceptance",
    ]  # fmt: skip
    assert table["prompt"].tolist() == ["Say 1 1 1.", "Say hello, hello, hello."]
    written = decodebench.generate(target, ["Say 1 1 1.", HELLO], **QUICK)
    assert table["text"].tolist() == [each.text for each in written]  # type: ignore[union-attr]
    assert table["identical"].all() and (table["speed-up"] > 0).all()
    assert table["tokens/step"].tolist() == [each.tokens_per_step for each in written]  # type: ignore[union-attr]


def test_what_is_measured_is_not_measured_again_unless_fresh(
    measured: decodebench.Measurement, target: decodebench.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = program._measure, []
    monkeypatch.setattr(program, "_measure", lambda *parts: (calls.append(1), real(*parts)))
    monkeypatch.setattr(run_folder, "is_noisy", lambda path: False)
    again = decodebench.benchmark(target, ["Say 1 1 1.", HELLO], **QUICK)
    assert isinstance(again, decodebench.Measurement)
    assert not calls and again.path == measured.path and again.to_dataframe().equals(measured.to_dataframe())
    new = decodebench.benchmark(target, ["Say 1 1 1.", HELLO], fresh=True, **QUICK)
    assert isinstance(new, decodebench.Measurement)
    assert calls == [1] and new.path == measured.path and new.summary["speedup"] != measured.summary["speedup"]


def test_other_weights_prompts_and_instructions_are_other_runs(
    measured: decodebench.Measurement, target: decodebench.Target, draft: decodebench.Target
) -> None:
    def record(target: decodebench.Target, asked: list[Any], **more: Any) -> dict[str, Any]:
        cfg, _ = decodebench.target.configure(target, "suffix", more, ["max_new_tokens=12"])
        task = decodebench.measurement._prompts(asked, None)[1]
        return program.manifest.resolved(program.prepare(cfg, program.Given(target.loaded, task)))

    same = record(target, ["Say 1 1 1.", HELLO])
    known = lookup.resolved(run_folder.read_manifest(measured.path) or {})  # type: ignore[arg-type]
    assert same["data_revision"] == known["data_revision"] and same["model_revision"] == known["model_revision"]
    assert record(draft, ["Say 1 1 1.", HELLO])["model_revision"] != same["model_revision"]
    for other in (["Say 1 1 1.", HELLO[1:]], ["Say 1 1 1."]):
        assert record(target, other)["data_revision"] != same["data_revision"]


def test_several_methods_make_a_leaderboard(
    target: decodebench.Target, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(place.glob("*"))
    found = decodebench.benchmark(
        target, ["Say 1 1 1."], method=["suffix", "prompt_lookup"], max_new_tokens=6, batch_size=2, keep=False
    )
    assert isinstance(found, decodebench.Measurements) and len(found) == 2
    assert sorted(place.glob("*")) == before and found["suffix"].path is None
    table = found.to_dataframe()
    assert set(table["method"]) == {"suffix", "prompt_lookup"}
    assert set(table["result"]) <= {"VALID", "INCONCLUSIVE", "INVALID"}
    capsys.readouterr()
    found.show()
    assert "speed-up" in (shown := capsys.readouterr().out) and shown.count("EXACT") == 2
    assert Cells.of(found._repr_html_()).count("EXACT") == 2
    with pytest.raises(KeyError, match="'eagle' was not measured, but suffix, prompt_lookup"):
        found["eagle"]
    with pytest.raises(UserError, match="keep=True"):
        decodebench.compare(found[0], found[1])


def test_the_table_of_the_command_line(measured: decodebench.Measurement, capsys: pytest.CaptureFixture[str]) -> None:
    measured.show()
    shown = capsys.readouterr().out
    assert "suffix vs autoregressive" in shown and "RESULT: " in shown and "Next:" not in shown
    assert measured.path is not None and measured.path.name in shown


def test_a_data_set_by_name_and_a_file(place: Path, tmp_path: Path) -> None:
    target = decodebench.load("random", dtype="float32", threads=1)
    named = decodebench.benchmark(target, "demo", limit=1, keep=False, **QUICK)
    assert isinstance(named, decodebench.Measurement) and len(named.to_dataframe()) == 1
    (tmp_path / "mine.txt").write_text("First request\nSecond request\n")
    read = decodebench.benchmark(target, tmp_path / "mine.txt", limit=2, keep=False, **QUICK)
    assert isinstance(read, decodebench.Measurement)
    assert read.to_dataframe()["prompt"].tolist() == ["First request", "Second request"]


def test_a_draft_model_in_memory_is_part_of_the_record(target: decodebench.Target, draft: decodebench.Target) -> None:
    asked = {"method": "speculative_sampling", "max_new_tokens": 6, "draft_model": draft}
    found = decodebench.benchmark(target, ["Say 1 1 1."], **asked)
    assert isinstance(found, decodebench.Measurement) and found.summary["agreement"]["exact"] == 1.0
    assert found.config["method"]["draft_model"] == f"module-{draft.revision}"
    other = decodebench.compare(found, found)
    assert "speculative_sampling" in other


# -------------------------------------------------------------------------------------------------------------- HTML


class Cells(HTMLParser):
    """Tags and the text of the cells of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []

    @classmethod
    def of(cls, page: str) -> list[str]:
        parser = cls()
        parser.feed(page)
        assert parser.tags <= {"div", "b", "span", "small", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"}
        return parser.cells

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert all(name == "style" for name, _ in attributes)
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def test_html_escapes_prompts_and_has_no_colour_of_text(target: decodebench.Target) -> None:
    hostile = "<script>alert('x')</script> & \"<b onclick=x>\""
    found = decodebench.benchmark(target, [hostile, "y" * 300], keep=False, **QUICK)
    assert isinstance(found, decodebench.Measurement)
    page = found._repr_html_()
    cells = Cells.of(page)
    assert hostile in cells and "y" * 159 + "…" in cells
    assert not re.search(r"(?<![\w-])(?:color|background)", page), "themes are light and dark"


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "sufix"}, r"Unknown method 'sufix'. Did you mean 'suffix'\?"),
        ({"gama": 4}, r"Unknown setting 'method.gama'. Did you mean 'method.gamma'\?"),
        ({"gamma": "four"}, r"method.gamma must be a whole number, got 'four'"),
        ({"gamma": 0}, r"gamma >= 1"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1}, r"sampling.temperature must be at least 0, got -1"),
        ({"max_new_tokens": 4000}, r"Prompt 1 has \d+ tokens; with max_new_tokens=4,000 the context of 512 allows 0"),
        ({"method": "eagle"}, r"method=eagle has no checkpoint for model=module. .*model=hf model.name=FOLDER;"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str, target: decodebench.Target) -> None:
    with pytest.raises(UserError, match=message):
        decodebench.generate(target, "Hello", **{"method": "suffix", **options})


@pytest.mark.parametrize("prompt", ["", "  ", [], None, 7, [1, 260], [-1], [{"role": "user"}], [[]]])
def test_bad_prompts(prompt: Any, target: decodebench.Target) -> None:
    with pytest.raises(UserError, match="A prompt must be|Token ids must be"):
        decodebench.generate(target, prompt, method="suffix")


@pytest.mark.parametrize(
    ("asked", "options", "message"),
    [
        ([], {}, "prompts must be a list of at least one prompt"),
        ("dmo", {}, r"Unknown dataset 'dmo'. Did you mean 'demo'\?"),
        ([""], {}, "prompt must be a text that is not empty"),
        ([7], {}, "A prompt must be a text or a list of messages, got int"),
        (["Hi"], {"measure": "quik"}, "Unknown measure 'quik'"),
        (["Hi"], {"method": ["suffix", "rest"], "gamma": 2}, "gamma must be of one method, got 2 methods"),
        (["Hi"], {"method": []}, "method must be of one method, got 0 methods"),
    ],
)
def test_bad_benchmarks(asked: Any, options: dict[str, Any], message: str, target: decodebench.Target) -> None:
    with pytest.raises(UserError, match=message):
        decodebench.benchmark(target, asked, **{"method": "suffix", **options})


def test_models_that_cannot_be_used(module: LlamaForCausalLM) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = byte_tokenizer()
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=260, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    hooked = llama(0)
    hooked.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * 1.5)
    for given, options, message in (
        (gpt2, {}, "proven equal .* got 'gpt2'"),
        (torch.nn.Linear(2, 2), {}, "must be a name, a folder or a PreTrainedModel of transformers, got Linear"),
        (LlamaModel(module.config), {}, "must have a language model head, got LlamaModel"),
        (hooked, {}, "compute different logits"),
        (module, {"dtype": "bfloat16"}, "keeps its device and dtype"),
        ("no/such/folder", {"tokenizer": None}, "There is no folder no/such/folder"),
    ):
        with pytest.raises(UserError, match=message):
            decodebench.load(given, **{"tokenizer": tokenizer, **options})
    with pytest.raises(UserError, match="needs its tokenizer, got NoneType"):
        decodebench.load(module)
    with pytest.raises(UserError, match="has its own. Leave it out"):
        decodebench.load("random", tokenizer)
    with pytest.raises(UserError, match=r"hardware.dtype must be one of"):
        decodebench.load("random", dtype="int8")


def test_drafts_must_share_the_vocabulary(target: decodebench.Target) -> None:
    other = byte_tokenizer()
    other.add_tokens(["<more>"])
    turned = {token: 260 - id for token, id in other.get_vocab().items()}
    stranger = decodebench.load(llama(1, layers=1), other, threads=1)
    stranger.tokenizer.get_vocab = lambda: turned  # type: ignore[method-assign]
    with pytest.raises(UserError, match="read different tokens"):
        decodebench.generate(target, "Hi", method="speculative_sampling", draft_model=stranger, vocabulary="same")
    found = decodebench.generate(target, "Hi", method="speculative_sampling", draft_model=stranger, max_new_tokens=9)
    plain = decodebench.generate(target, "Hi", method="autoregressive", max_new_tokens=9)
    assert isinstance(found, decodebench.Generation) and isinstance(plain, decodebench.Generation)
    assert found.ids == plain.ids, "tokens of the same bytes have other ids, and the last one is beyond the model"


def test_a_record_of_what_was_in_memory_says_how_to_repeat_it(measured: decodebench.Measurement) -> None:
    from bench.models import in_memory, loading

    with pytest.raises(UserError, match="model=module was in the memory of a Python program"):
        overrides.command(measured.config)

    with pytest.raises(UserError, match="save_pretrained"):
        loading.load(in_memory.GROUP, {"device": "cpu"}, compose.compose([]).paths)


def test_methods_are_those_of_the_command_line() -> None:
    table = decodebench.methods().set_index("name")
    assert set(table.index) == set(compose.groups()["method"])
    assert table.loc["prompt_lookup"].tolist() == [
        "speculative", PromptLookup.guarantee.value, PromptLookup.needs, PromptLookup.paper,
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ docs/python.md


def test_the_blocks_of_readme_and_docs_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Shortened and on the random model, which has no trained draft network."""
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/python.md"))
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    quick = {'"smollm2"': '"random"', '"eagle")': '"suffix", max_new_tokens=16)', '"eagle"': '"suffix"'}
    quick["limit=5"] = "limit=2, max_new_tokens=8"
    for word, other in quick.items():
        blocks = [block.replace(word, other) for block in blocks]
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert "RESULT: " in capsys.readouterr().out
    assert len(names["answer"].ids) <= 64 and len(names["drafted"].ids) == 16
    assert names["run"].summary["model"] == "module" and names["run"].summary["agreement"]["exact"] == 1.0
