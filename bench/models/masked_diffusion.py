"""Masked diffusion language models of the hub or of a folder, as the engine reads them: a known family of layers, and
how it is to be read (``methods.engine.masked_lm.Denoising``).

Their repositories bring code of their own, which is not run: each layout here says of which family of transformers the
layers are, and how names of settings and weights differ. A model is taken by the ``model_type`` of its config.

Command: ``python -m bench method=diffusion model=llada_8b model.name=HUB_ID_OR_FOLDER``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from bench.errors import UserError
from bench.models.hub import HubModel

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint differs from one of transformers' own families.

    Attributes:
        family: prefix of the classes of transformers, e.g. ``Llama``.
        shifted: see ``Denoising``.
        settings: names in the config, theirs to transformers'; empty: the same.
        weights: names of the weights, patterns of theirs to transformers'; empty: the same.
        required: settings that another value of would make it another network.
        tokenizer: class of transformers; which one it is would else be asked of a config it does not know.
    """

    family: str
    shifted: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str = "PreTrainedTokenizerFast"


_LLADA_LAYER = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}

LAYOUTS = {
    "llada": Layout(
        family="Llama",
        settings={
            "d_model": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "n_kv_heads": "num_key_value_heads",
            "mlp_hidden_size": "intermediate_size",
            "embedding_size": "vocab_size",
            "max_sequence_length": "max_position_embeddings",
            "rms_norm_eps": "rms_norm_eps",
            "rope_theta": "rope_theta",
            "weight_tying": "tie_word_embeddings",
            "activation_type": "hidden_act",
            "eos_token_id": "eos_token_id",
            "pad_token_id": "pad_token_id",
            "mask_token_id": "mask_token_id",
        },
        weights={
            r"^model\.transformer\.wte\.": "model.embed_tokens.",
            r"^model\.transformer\.ln_f\.": "model.norm.",
            r"^model\.transformer\.ff_out\.": "lm_head.",
            **{
                rf"^model\.transformer\.blocks\.(\d+)\.{theirs}\.": rf"model.layers.\1.{ours}."
                for theirs, ours in _LLADA_LAYER.items()
            },
        },
        required={
            "block_type": "llama",
            "layer_norm_type": "rms",
            "activation_type": "silu",
            "rope": True,
            "alibi": False,
            "attention_layer_norm": False,
            "input_emb_norm": False,
            "include_bias": False,
            "include_qkv_bias": False,
            "scale_logits": False,
            "weight_tying": False,
        },
    ),
    "Dream": Layout(family="Qwen2", shifted=True, tokenizer="Qwen2TokenizerFast"),
    "a2d-llama": Layout(family="Llama"),
    "a2d-qwen2": Layout(family="Qwen2", tokenizer="Qwen2TokenizerFast"),
    "a2d-qwen3": Layout(family="Qwen3", tokenizer="Qwen2TokenizerFast"),
}


class MaskedModel(HubModel):
    """A masked or block diffusion language model.

    Args:
        name, revision, chat_template: see ``HubModel``.
        mask_token_id: None: as the config says, else the tokenizer.
        shifted: whether a token is said by the position before it; None: as is known of the kind of model.
        block_size, block_causal, blocks_from: see ``methods.engine.masked_lm.Denoising``.
        eos_ids: ids that end a text; None: as the config says.
    """

    kind = "causal"  # it continues its prompt
    denoises = True

    def __init__(
        self,
        name: str,
        revision: str | None = None,
        chat_template: str | None = None,
        mask_token_id: int | None = None,
        shifted: bool | None = None,
        block_size: int | None = None,
        block_causal: bool = False,
        blocks_from: Literal["text", "answer"] = "answer",
        eos_ids: Sequence[int] | None = None,
    ) -> None:
        super().__init__(name, revision, chat_template)
        self.mask_token_id, self.shifted, self.eos_ids = mask_token_id, shifted, eos_ids
        self._blocks = {"block_size": block_size, "block_causal": block_causal, "blocks_from": blocks_from}

    def _check(self, where: dict[str, Any]) -> PretrainedConfig:
        """The config in the names of transformers, with a note on how the model is to be read."""
        import transformers

        from methods.engine.masked_lm import Denoising

        self._layout, given = self._read_config(where)
        config: Any = getattr(transformers, f"{self._layout.family}Config").from_dict(_translate(self._layout, given))
        mask_id = next((id for id in (self.mask_token_id, given.get("mask_token_id")) if id is not None), None)
        if mask_id is None:
            mask_id = self._tokenizer(where).mask_token_id
        if mask_id is None:
            raise UserError(
                f"Neither the config nor the tokenizer of '{self.name}' names a mask token; a diffusion model needs "
                "one. Set model.mask_token_id."
            )
        shifted = self._layout.shifted if self.shifted is None else self.shifted
        Denoising(int(mask_id), shifted, **self._blocks).put(config)  # type: ignore[arg-type]
        self._refuse(config)
        checked: PretrainedConfig = config
        return checked

    def _read_config(self, where: dict[str, Any]) -> tuple[Layout, dict[str, Any]]:
        from transformers import PretrainedConfig

        given: dict[str, Any] = PretrainedConfig.get_config_dict(self.folder or self.name, **where)[0]
        kind = given.get("model_type")
        if kind not in LAYOUTS:
            raise UserError(
                f"Model '{self.name}' is of type {kind!r}; as diffusion models those of {', '.join(LAYOUTS)} are read. "
                "Choose one of them, or a config without masks (model=hf)."
            )
        layout = LAYOUTS[kind]
        strange = {k: given[k] for k, value in layout.required.items() if k in given and (given[k] or False) != value}
        if strange:
            raise UserError(
                f"Model '{self.name}' has {strange}, which makes it another network than the one the engine reads "
                f"({kind} with {dict(layout.required)}). Choose another."
            )
        return layout, given

    def _weights(self, config: PretrainedConfig, dtype: torch.dtype, where: dict[str, Any]) -> PreTrainedModel:
        import transformers

        kind: Any = getattr(transformers, f"{self._layout.family}ForCausalLM")
        more = {"key_mapping": dict(self._layout.weights)} if self._layout.weights else {}
        model: Any = self._load(kind, dtype, config=config, **more, **where)
        if self.eos_ids is not None:
            model.generation_config.eos_token_id = list(self.eos_ids)
        loaded: PreTrainedModel = model
        return loaded

    def _tokenizer(self, where: dict[str, Any]) -> PreTrainedTokenizerBase:
        import transformers

        kind: Any = getattr(transformers, self._layout.tokenizer)
        return self._with_template(kind.from_pretrained(self.folder or self.name, **where))


def _translate(layout: Layout, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config in the names of transformers; what another layout has besides is left out."""
    if not layout.settings:
        return {k: v for k, v in given.items() if k not in ("auto_map", "architectures", "model_type")}
    named = {ours: given[theirs] for theirs, ours in layout.settings.items() if given.get(theirs) is not None}
    if "intermediate_size" not in named:
        named["intermediate_size"] = given["mlp_ratio"] * given["d_model"]
    named.setdefault("vocab_size", given["vocab_size"])
    return {"attention_bias": False, "mlp_bias": False, "bos_token_id": None, **named}
