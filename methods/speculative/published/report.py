"""All problems of a published head in one message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.speculative.published.files import Checkpoint

_SHOWN = 5
_HARMLESS = ("rotary_emb.inv_freq",)  # old transformers kept these computed tables in the file

Shapes = Mapping[str, tuple[int, ...]]


class Report:
    """Collects what keeps a head from being used with a target.

    Args:
        found: the head's files.
        target: the model that is to verify.
        kind: the format of the head, for the message.
    """

    def __init__(self, found: Checkpoint, target: CausalLM, kind: str) -> None:
        self.found, self.target, self.kind = found, target, kind
        self.problems: list[str] = []

    def add(self, problem: str) -> None:
        """Add a problem."""
        self.problems.append(problem)

    def require_target(self, hidden: int, vocab: int) -> None:
        """Check sizes that the head was made for; 0 where unknown."""
        if hidden not in (0, self.target.hidden_size):
            self.add(f"it is for hidden size {hidden}, the target has {self.target.hidden_size}")
        if vocab not in (0, self.target.vocab_size):
            self.add(f"it is for a vocabulary of {vocab}, the target has {self.target.vocab_size}")

    def require_tensors(self, found: Mapping[str, Tensor], wanted: Shapes, optional: Shapes | None = None) -> None:
        """Names and shapes; sizes of 0 are not known and not compared."""
        allowed = {**(optional or {}), **wanted}
        self._list("missing", (key for key in wanted if key not in found))
        self._list("not known", (key for key in found if key not in allowed and not key.endswith(_HARMLESS)))
        for key, shape in allowed.items():
            if key in found and 0 not in shape and tuple(found[key].shape) != shape:
                self.add(f"{key} has the shape {tuple(found[key].shape)}, {shape} is needed")

    def require_same_model(self) -> None:
        """The head was trained along with the model in its folder: only that one's states fit it."""
        name = self.found.name
        if _plain(self.target.name) != _plain(name):
            self.add(
                f"its model was trained along with it (Medusa-2), so that one has to be the target, and the target is "
                f"{self.target.name}: model=hf model.name={name}"
            )

    def raise_problems(self) -> None:
        """Raise them all, if there are any.

        Raises:
            ValueError: there are.
        """
        if self.problems:
            raise ValueError(
                f"{self.found.name}, read as {self.kind}, does not fit {self.target.name}: {'; '.join(self.problems)}. "
                "Complete heads of this very model are needed. Name others, choose the model they were trained for, or "
                "train heads here: python -m bench train method=NAME model=MODEL."
            )

    def _list(self, what: str, keys: Iterable[str]) -> None:
        if names := list(keys):
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            self.add(f"{what}: {', '.join(names[:_SHOWN])}{more}")


def other_name(base: object, target: CausalLM) -> str:
    """What to say of a head that names another model."""
    return f"it was trained for {base}, the target is {target.name}; if that is another model, little is accepted"


def _plain(name: str) -> str:
    for part in Path(name).parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name
