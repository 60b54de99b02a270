"""Keeps secrets and the machine's own paths out of what is written into a run folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

HIDDEN = "***"

_NAME = r"[\w.\-]*(?:api[_-]?key|access[_-]?key|token|secret|passw(?:or)?d|passwd|credential|authorization)s?"
_VALUE = r"""\"[^\"]*\"|'[^']*'|(?:bearer\s+)?[^\s,;&'\"]+"""
_NAMED = re.compile(rf"(?i)(?P<name>{_NAME})(?P<sep>\s*[=:]\s*|\s+)(?P<value>{_VALUE})")
_SECRET_KEY = re.compile(rf"(?i)^-{{0,2}}{_NAME}$")
_COUNT = re.compile(r"(?i)(?:^|[._-])tokens?$")  # "max_new_tokens" is a number of tokens, unlike "hub_token"
_SHAPES = re.compile(  # what the tokens of common services look like, whatever they are called
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}|sk-[\w\-]{16,}"
    r"|xox[abprs]-[\w\-]{10,}|AKIA[A-Z0-9]{12,}|eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]+)"
)
_IN_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]*://)[^/\s:@]*:[^/\s@]+@")
_PART = r"[^\s/'\",:;=()\[\]{}]+"
_PATH = re.compile(rf"(?<![\w.:/\-])(?:~|\.\.?|/{_PART})(?:/{_PART})+")

# What a reader may want to know of the environment, because it changes speed or numbers.
_RELEVANT = re.compile(
    r"^(?:OMP_|MKL_|KMP_|GOMP_|OPENBLAS_|ONEDNN_|DNNL_|TORCH|PYTORCH_|CUDA_|CUBLAS_|NCCL_|NVIDIA_TF32|MALLOC_|LD_PRELOAD$)"
)
_FOLDER = re.compile(r"_(?:DIR|HOME|PATH|ROOT)$")  # as of caches, which may contain the name of a user


def text(value: str) -> str:
    """A text without secrets and without paths that begin at a root, a home or the current folder.

    Of a path its last part stays.
    """
    value = _IN_URL.sub(rf"\g<scheme>{HIDDEN}@", value)
    value = _NAMED.sub(_hide, value)
    value = _SHAPES.sub(HIDDEN, value)
    return _PATH.sub(_shorten, value)


def argv(words: Sequence[str]) -> list[str]:
    """A command line without secrets: ``key=value``, ``--key value`` and known token shapes."""
    shown, hide_next = [], False
    for word in words:
        shown.append(HIDDEN if hide_next else text(_last_part(word)))
        hide_next = word.startswith("-") and _is_secret(word)
    return shown


def _last_part(word: str) -> str:
    """``key=value`` with the last part of a value that is a file or folder here, as in ``model.name=alice/mymodel``."""
    key, equals, value = word.rpartition("=")
    try:
        here = "/" in value and os.path.exists(value)
    except ValueError:
        here = False
    return f"{key}{equals}.../{PurePath(value).name}" if here else word


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that change speed or numbers, scrubbed; all others are left out, as are names of folders."""
    variables = os.environ if variables is None else variables
    kept = {name: value for name, value in variables.items() if _RELEVANT.match(name) and not _FOLDER.search(name)}
    return {name: text(value) for name, value in sorted(kept.items())}


def tree(value: Any) -> Any:
    """Nested dictionaries and lists, every text scrubbed and every value under a secret's name hidden."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if _hides(key, item) else tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tree(item) for item in value]
    return text(value) if isinstance(value, str) else value


def _hides(key: Any, item: Any) -> bool:
    return isinstance(item, str) and _is_secret(str(key))


def _is_secret(name: str) -> bool:
    return bool(_SECRET_KEY.match(name))


def _hide(match: re.Match[str]) -> str:
    name, gap, value = match["name"], match["sep"], match["value"]
    if _COUNT.search(name) and re.fullmatch(r"\d{1,7}|null|None|true|false", value):
        return match[0]
    if not gap.strip() and not name.startswith("-"):
        return match[0]  # a sentence about tokens is no secret
    return f"{name}{gap}{HIDDEN}"


def _shorten(match: re.Match[str]) -> str:
    path = PurePath(match[0])
    return "..." if path.parent.name in ("home", "Users") else f".../{path.name}"
