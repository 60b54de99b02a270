"""Language models of the Hugging Face hub, of its local cache, or of a folder: causal ones and encoder-decoders."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import UserError, explain
from bench.models import artifacts
from bench.models.source import Read
from bench.tasks import corpus
from bench.utils import files
from bench.utils.text import first_line

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers")
_HUB_PATIENCE_S = 10.0  # the hub is asked once; its own client would try for half a minute, for each file
_TOKENIZER = "tokenizer.json"
_READ_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.bin")  # what of a folder defines the model


class HubModel:
    """Any causal language model, or encoder-decoder, of the proven families.

    Args:
        name: hub id, or path of a folder.
        revision: branch, tag or commit of the hub; None is its main branch.
        chat_template: Jinja template, for a tokenizer that brings none.
    """

    def __init__(self, name: str, revision: str | None = None, chat_template: str | None = None) -> None:
        self.name, self.revision, self.chat_template = name, revision, chat_template
        path = Path(name).expanduser()
        self.folder = path if path.is_dir() else None

    def read(self, dtype: torch.dtype, cache: Path) -> Read:
        """See ``bench.models.source.Source``. The family is checked before the weights are fetched."""
        if self.folder is None and (self.name.startswith((".", "/", "~")) or self.name.count("/") > 1):
            raise UserError(f"There is no folder {self.name}; model.name is a folder or a hub id. Correct the path.")
        commit, refusal = (None, "") if self.folder else self._ask_hub()
        where = {"trust_remote_code": False} | self._place(commit, bool(refusal))
        with self._explained(refusal):
            config = self._check(where)
            model = self._weights(config, dtype, where)
            tokenizer = self._tokenizer(where)
            self._require_vocabulary(model, tokenizer)
        if self.folder:
            digest = _digest(self.folder)
            return Read(model, tokenizer, digest[:12], digest, self.languages(tokenizer))
        return Read(model, tokenizer, commit, None, self.languages(tokenizer))

    def languages(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
        """What it was trained to translate: by the corpus in our card, or by a Marian tokenizer, in codes of two."""
        card = artifacts.read_card(self.folder) if self.folder else None
        if card and (found := corpus.languages((card.get("corpus") or {}).get("names") or [])):
            return found
        source, target = (str(getattr(tokenizer, f"{side}_lang", None) or "") for side in ("source", "target"))
        return (source, target) if len(source) == len(target) == 2 else None

    def _ask_hub(self) -> tuple[str | None, str]:
        """The commit behind the revision, so that all files are of one; and, where the hub gave none, why."""
        from huggingface_hub import HfApi

        try:
            return HfApi().model_info(self.name, revision=self.revision, timeout=_HUB_PATIENCE_S).sha, ""
        except Exception as error:  # no network, no such model, no access: its local cache may still have it
            return self._cached_commit(), _sentence(error)

    def _cached_commit(self) -> str | None:
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError):  # a name that can be no hub id
            file = try_to_load_from_cache(self.name, "config.json", revision=self.revision)
            return Path(file).parent.name if isinstance(file, str) else None
        return None

    def _place(self, commit: str | None, cached_only: bool) -> dict[str, Any]:
        """Where transformers is to look."""
        if self.folder:
            if self.revision:
                raise UserError(
                    f"model.revision={self.revision} needs a model of the hub, got the folder {self.name}. Leave "
                    "model.revision out."
                )
            return {}
        return {"revision": commit or self.revision or "main", "local_files_only": cached_only}

    def _check(self, where: dict[str, Any]) -> PretrainedConfig:
        from transformers import AutoConfig

        config: PretrainedConfig = AutoConfig.from_pretrained(self.folder or self.name, **where)
        self._refuse(config)
        return config

    def _refuse(self, config: PretrainedConfig) -> None:
        """Refuse what the engine does not stand for."""
        from methods.engine import causal_layers, seq2seq_layers

        try:
            (seq2seq_layers if is_seq2seq(config) else causal_layers).check(config)
        except causal_layers.UnsupportedModel as error:
            raise UserError(f"Model '{self.name}' cannot be measured. {error}") from error
        for name in _LAYERS:
            if (layers := getattr(config, name, None)) is not None and layers < 1:
                raise UserError(f"Model '{self.name}' must have at least one layer, got {name}={layers}.")
        if getattr(config, "quantization_config", None) is not None:
            raise UserError(
                f"Model '{self.name}' has quantised weights, which the engine does not read; those of a plain 16 or 32 "
                "bit model are read. Choose the model it was made from."
            )

    def _weights(self, config: PretrainedConfig, dtype: torch.dtype, where: dict[str, Any]) -> PreTrainedModel:
        import transformers

        name = "AutoModelForSeq2SeqLM" if is_seq2seq(config) else "AutoModelForCausalLM"
        return self._load(getattr(transformers, name), dtype, **where)

    def _load(self, kind: Any, dtype: torch.dtype, **how: Any) -> PreTrainedModel:
        """Weights by a class of transformers; as Any: no type knows that output_loading_info makes it a pair."""
        from methods.engine.checkpoint_files import load_model

        try:
            model, found = load_model(kind, self.folder or self.name, dtype=dtype, output_loading_info=True, **how)
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise UserError(
                f"The weights of model '{self.name}' must have the shapes that its config.json describes. Fetch both "
                "again, or choose another model."
            ) from error
        if missing := sorted(found["missing_keys"]):  # transformers would go on with random ones
            raise UserError(
                f"Model '{self.name}' lacks {len(missing)} weights, {missing[0]} first; a complete checkpoint is "
                "needed. Fetch it again or choose another."
            )
        modules = _modules(model.config, found["unexpected_keys"])
        unexpected = sorted(key for key in found["unexpected_keys"] if not key.startswith(modules))
        if unexpected:  # transformers would leave them out
            raise UserError(
                f"The weights of model '{self.name}' must be those that its config.json describes, got "
                f"{len(unexpected)} more, {unexpected[0]} first. Correct config.json (its number of layers, say), or "
                "fetch both again."
            )
        loaded: PreTrainedModel = model
        return loaded

    def _tokenizer(self, where: dict[str, Any]) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        if self.folder and (shared := artifacts.shared(self.folder).get(_TOKENIZER)):
            where = where | {"tokenizer_file": str(shared)}
        return self._with_template(AutoTokenizer.from_pretrained(self.folder or self.name, **where))

    def _require_vocabulary(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        embeddings: Any = model.get_input_embeddings()
        rows = embeddings.weight.shape[0]
        if len(tokenizer) > rows:
            raise UserError(
                f"The tokenizer of model '{self.name}' must have at most as many tokens as the model has embeddings, "
                f"{rows}, got {len(tokenizer)}. Use the model's own tokenizer."
            )

    def _with_template(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        if self.chat_template and not tokenizer.chat_template:
            tokenizer.chat_template = self.chat_template
        return tokenizer

    @contextmanager
    def _explained(self, refusal: str) -> Iterator[None]:
        """Turn what transformers raises into a message that says what to do."""
        try:
            yield
        except Exception as error:  # of transformers, torch, safetensors or pydantic, and assertions
            if isinstance(error, UserError) or explain(error):  # a full disk, no permission
                raise
            raise UserError(self._not_here(_sentence(error), refusal)) from error

    def _not_here(self, reason: str, refusal: str) -> str:
        needed = "config.json, weights and a tokenizer are needed"
        if self.folder:
            return f"The folder {self.name} cannot be loaded: {reason} {needed}. Complete it or name another."
        if refusal:
            return (
                f"Model '{self.name}' is not in the local cache of the hub, and the hub could not be asked: {refusal} "
                "Check model.name (a hub id or a folder). Without a network, fetch it where there is one (hf download "
                f"{self.name} --local-dir FOLDER) and give the folder: model.name=FOLDER"
            )
        return (
            f"Model '{self.name}' cannot be loaded from the hub: {reason} {needed}. For a gated or private model get "
            "access on its page, then log in: hf auth login"
        )


def is_seq2seq(config: PretrainedConfig) -> bool:
    """Whether a model has an encoder for the prompt beside the decoder that writes."""
    return bool(getattr(config, "is_encoder_decoder", False))


def _modules(config: PretrainedConfig, keys: Collection[str]) -> tuple[str, ...]:
    """Where modules for multi-token prediction are, which transformers leaves out and ``method=mtp`` reads."""
    first, announced = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    places = (f"model.layers.{first + module}." for module in range(announced))
    return tuple(place for place in places if f"{place}eh_proj.weight" in keys)


def _sentence(error: Exception) -> str:
    line = first_line(error)
    if line.endswith(":"):  # a heading; what happened is below
        line = " ".join(str(error).split()[:40])
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _digest(folder: Path) -> str:
    """sha256 over names and contents of the files of a model: a folder has no commit to identify it."""
    print(f"hashing {folder} ...", file=sys.stderr, flush=True)
    return files.digest({path.name: path for pattern in _READ_FILES for path in folder.glob(pattern)})
