"""Load a model by name onto the hardware, and check that a draft model shares the target's tokens."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bench.config import compose, instantiate
from bench.config.schema import PathsConfig, RunConfig, parallel_of, weights_of
from bench.errors import UserError
from bench.models.source import Loaded, Read, Source

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from bench.models.architectures import Architecture
    from methods.engine.causal_lm import CausalLM
    from methods.engine.compiled_layers import Compiled
    from methods.engine.tensor_parallel import Devices
    from methods.engine.vocabulary import ForeignModel

_BY_NAME = {"smollm2": "bench.models.embedded.EmbeddedModel", "random": "bench.models.random_weights.RandomModel"}
_ELSE = "bench.models.hub.HubModel"


def settle_libraries(hardware: Mapping[str, Any]) -> None:
    """Import what loading imports and, on a CPU, let a small model read a prompt.

    Otherwise the memory of code, which is read into memory at its first use, would count as the model's.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    device, dtype = resolve_hardware(hardware)
    if device.type == "cpu":
        _read_a_prompt(dtype)


@functools.cache
def _read_a_prompt(dtype: torch.dtype) -> None:
    import torch

    from bench.models.random_weights import RandomModel
    from methods.engine.causal_lm import CausalLM

    lm = CausalLM.from_hf(RandomModel(layers=1).read(dtype, Path()).model.requires_grad_(False))
    with torch.inference_mode():
        lm.prefill([torch.arange(32)], lm.new_cache(1, 32))


def load(model: Mapping[str, Any], hardware: Mapping[str, Any], paths: PathsConfig, *, keep_hf: bool = False) -> Loaded:
    """Load a model onto the hardware asked for.

    Args:
        model: the ``model`` group; without ``_target_`` its name is ``smollm2``, ``random``, a hub id or a folder.
        hardware: the ``hardware`` group.
        paths: where fetched models lie.
        keep_hf: leave the Hugging Face model usable beside ours (peers need it).

    Raises:
        UserError: no such hardware, no such model, one of a family that is not proven, or no weights of this kind here.
    """
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # in a log file each update of a bar would be a line
    quantised = weights_of(model)
    if keep_hf and quantised != "full":
        raise UserError(
            f"model.weights={quantised} is of the engine of this project, and a method of transformers needs the whole "
            "weights. Set model.weights=full, or choose another method."
        )
    device, dtype = resolve_hardware(hardware)
    _settle_kernels(device)
    source = source_of(model)
    if (size := parallel_of(model)) > 1:
        return _load_parallel(model, hardware, paths, size, keep_hf=keep_hf)
    _require_memory(source, device, dtype, keep_hf, Path(paths.cache))
    read = source.read(dtype, Path(paths.cache))
    weights: Any = read.model.requires_grad_(False)  # as Any: transformers' decorators hide the type of .to
    _require_finite(str(model["name"]), weights)
    try:
        lm = _engine(weights.config).from_hf(
            weights.to(device),
            linear=hardware.get("linear", "auto"),
            keep_hf=keep_hf,
            weights=quantised,  # type: ignore[arg-type]
        )
        compiled = compile_layers(lm) if hardware.get("compile", False) else None
        _hand_over(lm, hardware)
        if hardware.get("batch_invariant", False):
            _require_invariant(lm)
    except ValueError as error:  # UnsupportedModel among them, named and with the proven families
        raise UserError(str(error)) from error
    name = str(model["name"])
    return Loaded(_graphed(lm, hardware), read.tokenizer, name, read.revision, read.sha256, read.languages, compiled)


def _load_parallel(
    model: Mapping[str, Any], hardware: Mapping[str, Any], paths: PathsConfig, size: int, *, keep_hf: bool
) -> Loaded:
    """A target on several devices, whose other processes are started here."""
    from bench.models import parallel
    from methods.engine.tensor_parallel import DrivingLM

    device, dtype = resolve_hardware(hardware)
    if keep_hf or weights_of(model) != "full" or hardware.get("compile") or hardware.get("kernels") == "triton":
        raise UserError(
            f"model.parallel={size} needs the engine of this project with its plain operators and whole weights. Set "
            "model.parallel=1, or model.weights=full, hardware.compile=false, hardware.kernels=torch and another "
            "method than those of transformers."
        )
    parallel.require(size, device)
    _require_memory(source_of(model), device, dtype, False, Path(paths.cache), size)
    try:
        devices = parallel.start(size, model, hardware, paths, device)
        read = read_part(model, hardware, paths, devices)
        lm = DrivingLM.of(read.model, devices, hardware.get("linear", "auto"))
        _hand_over(lm, hardware)
    except BaseException as error:
        parallel.stop()
        if isinstance(error, ValueError):  # among them UnsupportedModel
            raise UserError(str(error)) from error
        raise
    parallel.drive(lm)
    return Loaded(lm, read.tokenizer, str(model["name"]), read.revision, read.sha256, read.languages)


def read_part(model: Mapping[str, Any], hardware: Mapping[str, Any], paths: PathsConfig, devices: Devices) -> Read:
    """What a source yields, cut to the part of this process and on its device.

    Raises:
        UserError: see ``load``.
        ValueError: a model that cannot be cut.
    """
    from bench.models.random_weights import RandomModel
    from methods.engine import causal_layers
    from methods.engine.tensor_parallel import cut, require_divisible

    def checked_cut(module: Any) -> None:
        causal_layers.check(module.config)
        require_divisible(module, devices.size)
        cut(module, devices.mesh)

    device, dtype = resolve_hardware(hardware)
    _settle_kernels(device)
    source = source_of(model)
    early = isinstance(source, RandomModel) and source.like is not None
    if early:
        source.cut = checked_cut  # type: ignore[attr-defined]
    read = source.read(dtype, Path(paths.cache))
    weights: Any = read.model.requires_grad_(False)
    if not early:
        checked_cut(weights)
    _require_finite(str(model["name"]), weights)
    return read._replace(model=weights.to(device))


def load_module(module: Any, tokenizer: Any, hardware: Mapping[str, Any]) -> Loaded:
    """A model that is in memory already, where it is and in its type; it is put into evaluation mode and stays usable.

    Args:
        module: a language model of transformers.
        tokenizer: its tokenizer.
        hardware: the ``hardware`` group, of which device and type are those of the model.

    Raises:
        UserError: no language model of a family that is proven, or one with changed layers.
    """
    from bench.models import in_memory

    in_memory.require(module, tokenizer)
    _require_finite(in_memory.NAME, module)
    _settle_kernels(module.device)
    try:
        lm = _engine(module.config).from_hf(module, linear=hardware.get("linear", "auto"), keep_hf=True)
        _hand_over(lm, hardware)
    except ValueError as error:
        raise UserError(str(error)) from error
    in_memory.require_equal(lm, module)
    sha256 = in_memory.digest(module, tokenizer)
    return Loaded(_graphed(lm, hardware), tokenizer, in_memory.NAME, sha256[:12], sha256)


def _graphed(lm: CausalLM, hardware: Mapping[str, Any]) -> CausalLM:
    """The model with CUDA graphs, where that is possible and wanted."""
    from methods.engine.cuda_graphs import GraphedLM

    return GraphedLM.of(lm) if _replays(lm, hardware) else lm


def _replays(lm: CausalLM, hardware: Mapping[str, Any]) -> bool:
    from methods.engine.causal_lm import CausalLM

    return lm.device.type == "cuda" and type(lm) is CausalLM and hardware.get("graphs", "auto") == "auto"


def _hand_over(lm: CausalLM, hardware: Mapping[str, Any]) -> None:
    """Hand over what the hardware group says of weights that draft for the model, and of its kernels."""
    from methods.engine.causal_lm import CausalLM

    lm.draft_weights = hardware.get("draft_weights", "auto")
    wanted = hardware.get("kernels", "auto")
    if wanted == "triton" and type(lm) is not CausalLM:
        raise ValueError(
            f"hardware.kernels=triton needs a decoder-only model that writes from left to right, got {lm.name}. Set "
            "hardware.kernels=torch."
        )
    if wanted == "triton":
        lm.use_triton()
    elif wanted == "auto" and _replays(lm, hardware) and lm.dtype.itemsize == 2 and not hardware.get("compile"):
        with suppress(ValueError):  # layers that Triton's kernels lack stay with torch
            lm.use_triton()


def _require_invariant(lm: CausalLM) -> None:
    if not lm.batch_invariant:
        raise ValueError(
            "hardware.batch_invariant=true needs a model of Llama's kind or an encoder-decoder other than T5, in "
            "bfloat16 or float32, a CPU, a C++ compiler, hardware.linear=panels and hardware.compile=false, got "
            f"{lm.name} in {str(lm.dtype).removeprefix('torch.')} on {lm.device.type} with linear={lm.linear_form}. "
            "Change these, or set hardware.batch_invariant=false."
        )


def compile_layers(lm: CausalLM) -> Compiled:
    """Compile what is between the products of a model's layers.

    Raises:
        ValueError: an encoder-decoder, or torch cannot compile here.
    """
    from methods.engine.compiled_layers import Compiled
    from methods.engine.seq2seq_lm import Seq2SeqLM

    if isinstance(lm, Seq2SeqLM):
        raise ValueError(
            f"hardware.compile=true needs a decoder-only model, got {lm.name}, an encoder-decoder. Set "
            "hardware.compile=false."
        )
    return Compiled(lm)


def shape_of(model: Mapping[str, Any], paths: PathsConfig) -> Architecture | None:
    """Sizes of a decoder-only model before it is loaded; None where this machine does not have them."""
    return _shape(source_of(model), Path(paths.cache))


def _shape(source: Source, cache: Path) -> Architecture | None:
    from bench.models.architectures import Architecture
    from bench.models.embedded import SMOLLM2, EmbeddedModel
    from bench.models.hub import HubModel, is_seq2seq

    if isinstance(shape := getattr(source, "shape", None), Architecture):
        return shape
    if isinstance(base := getattr(source, "source", None), Source):  # of a model that is made from another one
        return _shape(base, cache)
    if isinstance(source, EmbeddedModel):
        where: Any = SMOLLM2.folder(cache)
    elif type(source) is HubModel:
        where = source.folder or source.name
    else:
        return None
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
        return None if is_seq2seq(config) else Architecture.of(config)
    except Exception:  # not here, damaged, or of another family: loading it will say so
        return None


def _require_memory(
    source: Source,
    device: torch.device,
    dtype: torch.dtype,
    keep_hf: bool,
    cache: Path | None = None,
    size: int = 1,
) -> None:
    """Refuse a model that does not fit, as far as its sizes are known before it is loaded.

    While weights are converted, the largest matrix and one layer exist twice; with ``keep_hf`` all of them do. Of
    ``size`` devices each has its part of the layers, the embedding and the output matrix; a CPU holds them all.
    """
    import torch

    from bench.models.random_weights import RandomModel
    from bench.utils import memory

    shape = _shape(source, cache or Path())
    if shape is None:
        return
    everywhere = shape.head_weights * (1 if shape.tied else 2)
    stored = shape.stored_weights
    share = everywhere + -(-(stored - everywhere) // size)
    peak = 2 * stored if keep_hf else share + shape.head_weights + shape.layer_weights
    random = isinstance(source, RandomModel)
    cure = "Choose a smaller one" + (" (model.like=NAME), or fewer layers (model.layers=N)." if random else ".")
    what = f"A model of {stored:,} weights in {str(dtype).removeprefix('torch.')}"
    if device.type != "cpu":
        if random:  # it is made on the host; files are mapped
            memory.require(what, size * share * dtype.itemsize, torch.device("cpu"), cure)
        spread = "Set model.parallel to spread it over the GPUs of one machine."
        cure = f"It takes {memory.gpus(stored * dtype.itemsize)}. {spread} {cure}"
        if size > 1:
            what = f"{what}, on each of {size} GPUs,"
    memory.require(what, peak * dtype.itemsize * (size if device.type == "cpu" else 1), device, cure)


def _settle_kernels(device: torch.device) -> None:
    """Choose kernels of CUDA for short passes, for us and for peers.

    On Hopper and later torch prefers cuDNN's attention, which makes a plan for every length of the keys: tens of
    milliseconds of the host for each token. Split sums in 16 bit would round a pass over one token otherwise than a
    pass over many.
    """
    if device.type != "cuda":
        return
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _require_finite(name: str, model: Any) -> None:
    """Refuse weights that are no numbers: the likeliest of NaN logits is token 0, which every draft hits."""
    for weight, tensor in model.named_parameters():
        if tensor.is_floating_point() and tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):
            raise UserError(
                f"The weights of model '{name}' must be finite, got NaN or infinity in {weight}. Fetch it again, or "
                "choose another type (hardware.dtype) if they overflow in this one."
            )


def _engine(config: Any) -> type[CausalLM]:
    from bench.models.hub import is_seq2seq
    from methods.engine.causal_lm import CausalLM
    from methods.engine.masked_lm import MaskedLM, is_masked
    from methods.engine.seq2seq_lm import Seq2SeqLM

    if is_masked(config):
        return MaskedLM
    return Seq2SeqLM if is_seq2seq(config) else CausalLM


def load_draft(
    draft: str | Mapping[str, Any],
    target: tuple[str, PreTrainedTokenizerBase],
    hardware: Mapping[str, Any],
    paths: PathsConfig,
    *,
    keep_hf: bool = False,
    vocabulary: str = "same",
) -> Loaded:
    """Load a model that drafts for another one, onto the same hardware.

    Args:
        draft: a name (of a config, a hub id or a folder), or a ``model`` group.
        target: name and tokenizer of the model that verifies.
        vocabulary: ``same`` refuses a model that reads other tokens.

    Raises:
        UserError: as ``load``, or the two do not share one vocabulary.
    """
    group = named(draft) if isinstance(draft, str) else {**named(str(draft.get("name"))), **draft}
    if group.get("like"):
        raise UserError(
            f"The draft model must have weights, got like={group['like']}: nothing that random weights draft is "
            "accepted. Name another model."
        )
    loaded = load(group, hardware, paths, keep_hf=keep_hf)
    if vocabulary == "same" or loaded.kind != "causal":
        require_same_tokens((loaded.name, loaded.tokenizer), target)
    return loaded


def draft_loader(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, drafts: Mapping[str, Loaded] | None = None
) -> instantiate.ModelLoader:
    """A function from a hub id, a path or a model group to a draft model on the hardware of the target.

    A model that reads other tokens comes with both vocabularies, for methods that have the setting ``vocabulary``;
    others refuse it.

    Args:
        tokenizer: the target's.
        drafts: models that are loaded already, by name.
    """
    vocabulary, target = str(cfg.method.get("vocabulary", "same")), (str(cfg.model["name"]), tokenizer)

    def load(model: str | Mapping[str, Any]) -> CausalLM | ForeignModel:
        if isinstance(model, str) and drafts and (loaded := drafts.get(model)):
            if vocabulary == "same" or loaded.kind != "causal":
                require_same_tokens((model, loaded.tokenizer), target)
        else:
            keep_hf = instantiate.needs_hf(cfg.method)
            loaded = load_draft(model, target, asdict(cfg.hardware), cfg.paths, keep_hf=keep_hf, vocabulary=vocabulary)
        return _with_vocabularies(loaded, tokenizer, vocabulary)

    return load


def _with_vocabularies(loaded: Loaded, target: PreTrainedTokenizerBase, vocabulary: str) -> CausalLM | ForeignModel:
    from methods.engine.vocabulary import ForeignModel, Vocabulary

    equal = vocabulary == "auto" and _first_difference(loaded.tokenizer, target) is None
    if vocabulary == "same" or equal or loaded.kind != "causal":
        return loaded.lm
    try:
        return ForeignModel(loaded.lm, Vocabulary.of(loaded.tokenizer), Vocabulary.of(target))
    except ValueError as error:
        raise UserError(str(error)) from error


def named(name: str) -> Mapping[str, Any]:
    """The ``model`` group of a choice, or of any other name."""
    if name in _BY_NAME or name not in compose.groups()["model"]:
        return {"name": name}
    group: Mapping[str, Any] = yaml.safe_load(compose.config_file("model", name).read_text(encoding="utf-8"))
    return group


def require_languages(model: Loaded, what: str, wanted: tuple[str, str] | None) -> None:
    """Refuse to translate between other languages than the model's, as far as both are known.

    Args:
        what: what is translated, for the message.
        wanted: source and target language.

    Raises:
        UserError: they differ.
    """
    if wanted is None or model.languages is None or wanted == model.languages:
        return
    raise UserError(
        f"{what} goes from {' to '.join(wanted)}, and {model.name} was trained to go from "
        f"{' to '.join(model.languages)}; the two must be of one direction. Turn the data (dataset.source and "
        "dataset.target, or corpus), or choose another model."
    )


def require_same_tokens(
    draft: tuple[str, PreTrainedTokenizerBase], target: tuple[str, PreTrainedTokenizerBase]
) -> None:
    """Refuse a drafter whose ids mean other tokens than the target's.

    One vocabulary may be longer than the other: sizes of one family pad theirs differently, and an id that the drafter
    does not know is never drafted.

    Raises:
        UserError: names both models and the first id they read differently.
    """
    found = _first_difference(draft[1], target[1])
    if found is not None:
        id, theirs, ours = found
        raise UserError(
            f"Draft model '{draft[0]}' and target '{target[0]}' read different tokens: id {id} is {theirs!r} to the "
            f"draft and {ours!r} to the target. Both must share one vocabulary. Choose a draft model of the target's "
            "family, or method=speculative_sampling with method.vocabulary=auto, tli or slem."
        )


def _first_difference(
    draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase
) -> tuple[int, str | None, str | None] | None:
    """The first id that both know and read differently, and what it is to each."""
    theirs, ours = ({id: token for token, id in tokenizer.get_vocab().items()} for tokenizer in (draft, target))
    shared = range(min(max(theirs), max(ours)) + 1)
    return next(((id, theirs.get(id), ours.get(id)) for id in shared if theirs.get(id) != ours.get(id)), None)


def resolve_hardware(hardware: Mapping[str, Any]) -> tuple[torch.device, torch.dtype]:
    """Device and type; ``auto`` is 16 bit where the processor calculates in it, else 32 bit.

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
    return device, _best_dtype(device) if precision == "auto" else getattr(torch, precision)


def _best_dtype(device: torch.device) -> torch.dtype:
    import torch

    from bench.utils.machine import multiplies_bfloat16

    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def source_of(model: Mapping[str, Any]) -> Source:
    """What reads the model of a ``model`` group.

    Raises:
        UserError: its class reads no models.
    """
    target = _BY_NAME.get(str(model["name"]), _ELSE)
    source = instantiate.build_model({"_target_": target, **model})
    if not isinstance(source, Source):
        raise UserError(
            f"model._target_ must be a source of models, got {model['_target_']!r}. Choose a config by name instead "
            "(python -m bench list models)."
        )
    return source
