"""Prompt files, models and checkpoints that are wrong in one way each."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = "executed"  # a file that exists only if code from an input ran

_GOOD = b'{"prompt": "What is a prime number? Name three prime numbers, three."}\n'
_DEEP = b'{"prompt": "x", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
PROMPTS: dict[str, bytes] = {
    "good.jsonl": _GOOD * 6,
    "empty.jsonl": b"",
    "blank.jsonl": b"\n\n  \n",
    "surrogate.jsonl": b'{"prompt": "half \\ud800 of a character"}\n',
    "surrogate_id.jsonl": b'{"question_id": "id-\\udc80", "prompt": "x y z"}\n',
    "nested.jsonl": _DEEP,
    "cut.jsonl": _GOOD + b'{"prompt": "ab',
    "list.jsonl": b"[1, 2, 3]\n",
    "number.jsonl": b"17\n",
    "null.jsonl": b"null\n",
    "nan.jsonl": b'{"prompt": NaN}\n',
    "no_key.jsonl": b'{"question": "x"}\n',
    "two_keys.jsonl": b'{"prompt": "x", "turns": ["y"]}\n',
    "prompt_int.jsonl": b'{"prompt": 17}\n',
    "prompt_empty.jsonl": b'{"prompt": ""}\n',
    "turns_text.jsonl": b'{"turns": "x"}\n',
    "turns_empty.jsonl": b'{"turns": []}\n',
    "turns_int.jsonl": b'{"turns": [1]}\n',
    "messages_role.jsonl": b'{"messages": [{"role": "robot", "content": "x"}]}\n',
    "messages_none.jsonl": b'{"messages": [null]}\n',
    "messages_empty.jsonl": b'{"messages": []}\n',
    "twice.jsonl": b'{"question_id": 1, "prompt": "x"}\n{"question_id": 1, "prompt": "y"}\n',
    "id_list.jsonl": b'{"question_id": [1], "prompt": "x"}\n',
    "category_int.jsonl": b'{"category": 3, "prompt": "x"}\n',
    "reference_int.jsonl": b'{"prompt": "x", "references": [5]}\n',
    "reference_nan.jsonl": b'{"prompt": "x", "references": [NaN]}\n',
    "reference_object.jsonl": b'{"prompt": "x", "reference": {"a": 1}}\n',
    "references_many.jsonl": b'{"prompt": "x", "references": ["a", "b", "c"]}\n',
    "latin1.jsonl": '{"prompt": "Grüße"}\n'.encode("latin-1"),
    "utf16.jsonl": '{"prompt": "x"}\n'.encode("utf-16"),
    "zeros.jsonl": b"\0" * 4096,
    "random.jsonl": bytes(range(256)) * 16,
    "torn.jsonl.gz": gzip.compress(_GOOD * 50)[:-20],
    "not.jsonl.gz": _GOOD,
    "long.jsonl": json.dumps({"prompt": "word " * 20_000}).encode() + b"\n",
    "crlf.jsonl": _GOOD.replace(b"\n", b"\r\n") * 3,
    "bom.jsonl": b"\xef\xbb\xbf" + _GOOD,
    "controls.jsonl": b'{"question_id": "\\u001b[31mred", "prompt": "\\u0000\\u0007 beep beep beep"}\n',
    "markup.jsonl": b'{"question_id": "<script>alert(1)</script>", "prompt": "=1+1 | `x` <b>bold</b> bold"}\n',
    "unicode.jsonl": json.dumps({"prompt": "\u202e\u200b \U0001f9ea \u0301 zero width"}).encode() + b"\n",
    "big_int.jsonl": b'{"question_id": ' + b"9" * 4000 + b', "prompt": "x"}\n',
}


def make(folder: Path) -> Path:
    """All inputs below one folder."""
    for name, content in PROMPTS.items():
        (folder / name).write_bytes(content)
    (folder / "folder.jsonl").mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "a_file").write_text("text\n")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder / "loop")
    for name in ("csv", "html", "md", "json", "parquet"):
        (folder / f"folder.{name}").mkdir()
    good = model(folder / "models" / "good")
    for name, damage in MODELS.items():
        copy = shutil.copytree(good, folder / "models" / name)
        damage(copy)
    for name, content in CHECKPOINTS.items():
        checkpoint = folder / "checkpoints" / name
        checkpoint.mkdir(parents=True)
        for file, data in content.items():
            (checkpoint / file).write_bytes(data)
    return folder


def model(folder: Path) -> Path:
    """A small Llama with a byte tokenizer, as transformers stores one."""
    import torch

    from bench.models.random_weights import RandomModel

    read = RandomModel(layers=2).read(torch.float32, folder)
    read.model.save_pretrained(folder)
    read.tokenizer.save_pretrained(folder)
    return folder


class _Touches:
    """Its unpickling makes a file."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {MARKER}",)


def _config(**changes: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return act


def _text(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def _weights(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return act


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touches()))


def _template(text: str) -> Callable[[Path], None]:
    return _text("chat_template.jinja", text)


_NORM = "model.norm.weight"
MODELS: dict[str, Callable[[Path], Any]] = {
    "nan": _weights(lambda t: t.update({_NORM: t[_NORM] * float("nan")})),
    "inf": _weights(lambda t: t.update({_NORM: t[_NORM] * float("inf")})),
    "wrong_shape": _weights(lambda t: t.update({_NORM: t[_NORM][:-1].clone()})),
    "more_weights": _weights(lambda t: t.update({"model.layers.9.x.weight": t[_NORM].clone()})),
    "fewer_weights": _weights(lambda t: t.pop(_NORM)),
    "vocab_small": _config(vocab_size=100),
    "vocab_huge": _config(vocab_size=10_000_000),
    "heads": _config(num_attention_heads=7),
    "kv_heads": _config(num_key_value_heads=3),
    "hidden_text": _config(hidden_size="abc"),
    "hidden_zero": _config(hidden_size=0),
    "layers_zero": _config(num_hidden_layers=0),
    "layers_negative": _config(num_hidden_layers=-3),
    "layers_fewer": _config(num_hidden_layers=1),
    "layers_more": _config(num_hidden_layers=40),
    "type_unknown": _config(model_type="nonesuch"),
    "type_list": _config(model_type=["llama"]),
    "own_code": _config(auto_map={"AutoConfig": "code.Config"}, model_type="own"),
    "config_empty": _text("config.json", ""),
    "config_list": _text("config.json", "[]"),
    "config_nested": _text("config.json", "[" * 50_000),
    "tokenizer_broken": _text("tokenizer.json", "{"),
    "tokenizer_gone": lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
    "weights_gone": lambda folder: (folder / "model.safetensors").unlink(),
    "weights_empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "weights_cut": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "weights_folder": lambda folder: [(f := folder / "model.safetensors").unlink(), f.mkdir()],
    "pickled": _pickled,
    "template_raises": _template("{{ raise_exception('no system role') }}"),
    "template_syntax": _template("{% if %}"),
    "template_unsafe": _template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template_unknown": _template("{{ nothing.there.at_all }}"),
}

CHECKPOINTS: dict[str, dict[str, bytes]] = {
    "empty": {},
    "no_config": {"model.safetensors": b"x" * 64},
    "broken_config": {"config.json": b"{", "model.safetensors": b"x" * 64},
    "list_config": {"config.json": b"[]"},
    "taps": {"config.json": json.dumps({"taps": [1, 14, 999], "eagle_config": {}}).encode()},
    "pickled": {"config.json": b"{}", "pytorch_model.bin": pickle.dumps(_Touches())},
    "card_broken": {"card.json": b"{", "model.safetensors": b"x" * 64},
    "card_list": {"card.json": b"[]", "model.safetensors": b"x" * 64},
    "card_nested": {"card.json": b"[" * 50_000},
}
