"""Random weights with a byte tokenizer: a small Llama to try the suite out, or a large model's shape for its speed.

The small one works with everything, so that the suite can be tried where nothing can be fetched; nothing it says is a
result. A model shaped like a public architecture (``like``) costs per pass what the original costs, and
says nothing of acceptance or quality: ``bench.config.compose`` refuses whatever would report them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.models.architectures import Architecture, architecture
from bench.models.source import Read

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

_TOKENS = 260  # of the byte tokenizer: 256 bytes and four special ones
_CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_SPREAD = 0.3  # of the weights: at the usual 0.02 all tokens would be about equally likely
_USUAL_SPREAD = 0.02  # of a large model: at 0.3 a hundred layers would overflow 16 bit
_BLOCK = 1 << 24
_SMALL = Architecture("llama", _TOKENS, 64, 256, 4, 4, 2, 16, 2048, source="")


class RandomModel:
    """A model of any shape with weights drawn from a seed.

    Args:
        seed: of the weights.
        like: a public architecture (``bench.models.architectures``) whose sizes are taken; None: a small Llama. Its
            tokenizer is the byte tokenizer all the same.
        vocab_size: at least 260: the bytes and four special tokens. None, here and below: 260, or as in ``like``.
        hidden_size: width; None: 64.
        layers: None: 4.
        heads: of attention; None: 4.
        kv_heads: of keys and values; None: 2.
        max_positions: longest context, in tokens; None: 2048.

    Attributes:
        shape: the sizes.
        cut: applied to a large model before its weights are drawn, so that only a part of them is
            (``methods.engine.tensor_parallel.cut``); None: all of them.

    Raises:
        ValueError: a shape that is none.
        UserError: an architecture that is not known.
    """

    def __init__(
        self,
        seed: int = 0,
        like: str | None = None,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
        layers: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        max_positions: int | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "layers": layers,
            "heads": heads,
            "kv_heads": kv_heads,
            "max_positions": max_positions,
        }
        shape = architecture(like) if like else _SMALL
        if layers is not None and layers > 0:
            shape = shape.with_layers(layers)
        shape = replace(shape, **{k: v for k, v in given.items() if v is not None})
        _check(shape)
        if not 0 <= seed < 2**63:
            raise ValueError(f"model.seed must be at least 0 and below 2^63, got {seed}.")
        if like is None:
            shape = replace(shape, intermediate_size=4 * shape.hidden_size, head_dim=shape.hidden_size // shape.heads)
        self.seed, self.like, self.shape = seed, like, shape
        self.cut: Callable[[Any], None] | None = None

    @property
    def revision(self) -> str:
        """Identifies the weights."""
        return f"seed {self.seed}" if self.like is None else f"seed {self.seed}, shape of {self.like}"

    def read(self, dtype: torch.dtype, cache: Path) -> Read:
        """See ``bench.models.source.Source``; ``bench.models.loading.load`` checks the memory."""
        tokenizer = byte_tokenizer()
        model = self._draw_small(tokenizer, dtype) if self.like is None else self._draw_large(dtype)
        return Read(model, tokenizer, self.revision, None)

    def _draw_small(self, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> Any:
        """Weights are drawn in 32 bit, so that other types hold them rounded."""
        import torch
        from transformers import LlamaForCausalLM

        config = self.shape.transformers_config(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=_SPREAD,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model: Any = LlamaForCausalLM(config)
        return model.to(dtype)

    def _draw_large(self, dtype: torch.dtype) -> Any:
        """No end-of-sequence token: a text continues up to its limit, so that equal work is timed."""
        import torch
        from transformers import AutoModelForCausalLM

        config = self.shape.transformers_config(bos_token_id=None, eos_token_id=None, pad_token_id=None)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        if self.cut is not None:
            self.cut(model)
        _fill(model, self.seed, dtype)
        base = model.model
        base.rotary_emb = type(base.rotary_emb)(config=config)  # its tables are no parameters, and were not computed
        return model


def _check(shape: Architecture) -> None:
    sizes = (shape.hidden_size, shape.layers, shape.heads, shape.kv_heads, shape.max_positions)
    least = _TOKENS
    misfit = shape.hidden_size % (2 * max(1, shape.heads)) or shape.heads % max(1, shape.kv_heads)
    if shape.vocab_size < least or min(sizes) < 1 or misfit:
        raise ValueError(
            f"vocab_size must be at least {least}, all other sizes at least 1, hidden_size a multiple of 2 * heads and "
            f"heads a multiple of kv_heads, got vocab_size={shape.vocab_size}, hidden_size={shape.hidden_size}, layers="
            f"{shape.layers}, heads={shape.heads}, kv_heads={shape.kv_heads}, max_positions={shape.max_positions}."
        )


def _fill(model: nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Give every parameter of a model on the meta device memory of its own.

    Matrices are cut, each from another place, out of one block of random numbers: to draw billions of them takes
    minutes, and no pass is faster for it. Norms are 1, biases 0; a matrix that is tied to another stays so.
    """
    import torch
    from torch import nn

    from methods.engine.tensor_parallel import part_of

    block = (torch.randn(_BLOCK, generator=torch.Generator().manual_seed(seed)) * _USUAL_SPREAD).to(dtype)
    made: dict[int, nn.Parameter] = {}
    start = 0
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                value = torch.empty(parameter.shape, dtype=dtype)
                if parameter.dim() < 2:
                    value.fill_(0.0 if name == "bias" else 1.0)
                else:
                    start = _tile(value, block, start)
                made[id(parameter)] = nn.Parameter(part_of(parameter, value), requires_grad=False)
            setattr(module, name, made[id(parameter)])


def _tile(value: Tensor, block: Tensor, start: int) -> int:
    """Fill a tensor with the numbers of a block, over and over from ``start`` on; returns where it stopped."""
    flat, place = value.view(-1), 0
    while place < len(flat):
        piece = block[start : start + len(flat) - place]
        flat[place : place + len(piece)] = piece
        place, start = place + len(piece), (start + len(piece)) % len(block)
    return start


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte, four special ones after them, and a chat template of one line per message."""
    from methods.engine import byte_tokenizer as plain

    return plain.byte_tokenizer(_CHAT)
