"""An OpenAI-compatible server in a thread, with the suite's own engine behind it, right or wrong as a test wants."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import torch

from bench.models.source import Loaded
from bench.tasks.prompts import encode
from methods.autoregressive import Autoregressive
from methods.decoder import generate
from methods.engine.sampling import Sampling

NAME = "tiny"
OWN_FIELDS = {"model", "prompt", "messages", "max_tokens", "temperature", "top_p", "n"}  # OpenAI's


@dataclass
class Behaviour:
    """What is special about a server.

    Attributes:
        tokens: how it returns token ids.
        strict: it refuses prompts as ids and fields beyond OpenAI's, and returns one text per request.
        chat_only: it has no /v1/completions.
        extra_prompt_tokens: it reads more than it should.
        wrong_token: place in a greedy text where it writes the second most likely token.
        cut: it stops greedy texts after so many tokens and calls that the limit.
        temperature: factor on the temperature; 0 decodes greedily.
        later_temperature: factor on that of all tokens but the first, as a wrong verification rule changes them.
        ignores: fields that it takes and does not use.
        key: that it wants.
        status: HTTP error of every completion; ``models_status``: of the list of models.
        after: completions before the error begins.
        body: what it answers instead of JSON.
        wait_s: before every completion.
    """

    tokens: Literal["token_ids", "token_id", "llama.cpp", "pieces", "text"] = "token_ids"
    strict: bool = False
    chat_only: bool = False
    extra_prompt_tokens: int = 0
    wrong_token: int | None = None
    cut: int | None = None
    temperature: float = 1.0
    later_temperature: float = 1.0
    ignores: tuple[str, ...] = ()
    key: str | None = None
    status: int = 0
    models_status: int = 0
    after: int = 0
    body: str | None = None
    wait_s: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)


class _Engine:
    def __init__(self, loaded: Loaded, how: Behaviour) -> None:
        self.loaded, self.how = loaded, how
        self.rng = torch.Generator().manual_seed(0)
        self.logits: dict[tuple[int, ...], torch.Tensor] = {}

    def refusal(self, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        if self.how.status and len(self.how.asked) > self.how.after:
            return self.how.status, {"error": {"message": "the engine is broken"}}
        if path.endswith("chat/completions") != self.how.chat_only:
            return 404, {"detail": "Not Found"}
        if body["model"] != NAME:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if self.how.strict and not isinstance(body.get("prompt", ""), str):
            return 400, {"detail": "prompt must be a string."}
        if self.how.strict and (unknown := set(body) - OWN_FIELDS):
            return 422, {"detail": f"Unexpected fields in the request: {unknown}"}
        return None

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        tokenizer, prompt = self.loaded.tokenizer, body.get("prompt")
        if "messages" in body:
            ids = encode(tokenizer, body["messages"])
        else:
            ids = prompt if isinstance(prompt, list) else list(tokenizer(prompt)["input_ids"])
        texts = self.texts(ids, body, 1 if self.how.strict else body.get("n", 1))
        choices = [self.choice(text, body) for text in texts]
        return {"choices": choices, "usage": {"prompt_tokens": len(ids) + self.how.extra_prompt_tokens}}

    @torch.inference_mode()
    def texts(self, ids: list[int], body: dict[str, Any], n: int) -> list[list[int]]:
        used = {name: value for name, value in body.items() if name not in self.how.ignores}
        temperature = used["temperature"] * self.how.temperature
        limit = min(body["max_tokens"], self.how.cut or body["max_tokens"])
        if limit > 1 and temperature == 0:
            return [self.greedy(ids, limit)] * n
        sampling = Sampling(temperature, max(0, used.get("top_k", 0)), used.get("top_p", 1.0))
        if limit > 1:
            return self.drawn(ids, limit, n, sampling)
        return [[token] for token in sampling.pick(self.after(ids).expand(n, -1), self.rng).tolist()]

    def drawn(self, ids: list[int], limit: int, n: int, sampling: Sampling) -> list[list[int]]:
        """The first tokens at the right temperature, the others as the behaviour says."""
        lm = self.loaded.lm
        later = Sampling(sampling.temperature * self.how.later_temperature)
        firsts = sampling.pick(self.after(ids).expand(n, -1), self.rng).tolist()
        rows = [torch.tensor([*ids, first]) for first in firsts]
        rest = generate(Autoregressive(lm, later), rows, limit - 1, lm.eos_ids, self.rng)
        ends = lm.eos_ids
        return [[first, *(() if first in ends else more)] for first, more in zip(firsts, rest, strict=True)]

    def greedy(self, ids: list[int], limit: int) -> list[int]:
        wrong = self.how.wrong_token
        if wrong is None or limit <= wrong:
            return self.alone(ids, limit)
        begin = self.alone(ids, wrong) if wrong else []
        prefix = [*ids, *begin]
        second = int(self.after(prefix).topk(2).indices[1])
        rest = limit - wrong - 1
        return [*begin, second, *(self.alone([*prefix, second], rest) if rest else [])]

    def after(self, ids: list[int]) -> torch.Tensor:
        """Logits of the next token."""
        if (key := tuple(ids)) not in self.logits:
            self.logits[key] = self.loaded.lm.score(torch.tensor(ids), start=len(ids) - 1)[0]
        return self.logits[key]

    def alone(self, ids: list[int], limit: int) -> list[int]:
        lm = self.loaded.lm
        return generate(Autoregressive(lm, Sampling()), [torch.tensor(ids)], limit, lm.eos_ids)[0]

    def choice(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        tokenizer, how = self.loaded.tokenizer, self.how.tokens
        ended = bool(ids) and ids[-1] in self.loaded.lm.eos_ids
        text = tokenizer.decode(ids, skip_special_tokens=True)
        found: dict[str, Any] = {"finish_reason": "stop" if ended else "length"}
        found |= {"message": {"content": text}} if self.how.chat_only else {"text": text}
        pieces = [tokenizer.decode([token]) for token in ids]
        if how == "token_ids" and body.get("return_token_ids"):
            found["token_ids"] = ids
        elif how == "token_id":
            found["logprobs"] = {"tokens": [f"token_id:{token}" for token in ids]}
        elif how == "llama.cpp":
            content = [{"id": token, "token": piece} for token, piece in zip(ids, pieces, strict=True)]
            found["logprobs"] = {"content": content}
        elif how == "pieces":
            found["logprobs"] = {"tokens": pieces}
        return found


@contextmanager
def serve(loaded: Loaded, how: Behaviour) -> Iterator[str]:
    """The base URL of a running server."""
    engine = _Engine(loaded, how)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if how.models_status:
                self.reply(how.models_status, {"detail": "no list"})
            elif self.permitted():
                self.reply(200, {"data": [{"id": NAME, "owned_by": "fake"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            how.asked.append(body)
            time.sleep(how.wait_s)
            if not self.permitted():
                return
            if refusal := engine.refusal(self.path, body):
                self.reply(*refusal)
            else:
                self.reply(200, engine.answer(body))

        def permitted(self) -> bool:
            right = how.key is None or self.headers.get("Authorization") == f"Bearer {how.key}"
            if not right:
                self.reply(401, {"error": "Unauthorized"})
            return right

        def reply(self, status: int, content: Any) -> None:
            raw = (how.body if how.body is not None and status == 200 else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            with suppress(OSError):  # the client no longer waits
                self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
