"""Client of an OpenAI-compatible server (vLLM, SGLang, llama.cpp, transformers serve, TGI): texts and their token ids.

Servers differ in what they take and return. ``connect`` tries with one prompt, from the best to the plainest:

- a prompt as token ids, else as text, else as a chat message to which the server applies its own template;
- fields beyond OpenAI's: one that is refused is left out afterwards, and ``refused`` names it.

Sampling fields that a server may preset (llama.cpp: top_k 40, min_p 0.05; vLLM: those of generation_config.json) are
always sent, with values that change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests

from bench.errors import RunFailed, UserError
from bench.utils import redact
from bench.utils.text import first_line
from methods.engine.sampling import Sampling

KEY = "DECODEBENCH_API_KEY"
"""Environment variable with the key of the server; it is never recorded."""
AT_ONCE = 20  # texts per request; all of them read the prompt at the same time, later requests find it cached
_TOKEN_ID = re.compile(r"token_id:(\d+)")
_NOT_ENDED = ("length", None)  # finish reasons of a text that is not complete
_DENIED = (401, 403)
_ROUTES = (("completions", "token ids"), ("completions", "text"), ("chat/completions", "a chat message"))
_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}  # vLLM
_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the forms a server may take.

    Attributes:
        message: of the user, without the chat template.
        text: with the template; None if the target's tokenizer reads other ids from it than ``ids``.
        ids: what the target reads.
    """

    message: str
    text: str | None
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One text of the server.

    Attributes:
        text: as returned.
        ids: its token ids, None if the server does not return them.
        pieces: its tokens as text, None if the server does not return them.
        ended: the text is complete, not cut at the limit.
    """

    text: str
    ids: list[int] | None
    pieces: list[str] | None
    ended: bool


class Refused(Exception):
    """The server answered with an HTTP error."""

    def __init__(self, status: int, path: str, reason: str) -> None:
        super().__init__(f"HTTP {status} to /{path}: {reason}")
        self.status = status


@dataclass
class Server:
    """An OpenAI-compatible server.

    Attributes:
        url: base URL, with /v1.
        timeout_s: longest wait for one answer.
        model: name of the model there.
        route: path of the endpoint, and how a prompt is sent to it.
        extras: fields beyond OpenAI's that it takes, with values that change nothing.
        refused: fields that it refuses.
        many: it returns several texts per request.
    """

    url: str
    timeout_s: float
    key: str | None = field(default=None, repr=False)
    model: str = ""
    route: tuple[str, str] = _ROUTES[0]
    extras: Mapping[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    many: bool = True

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self._session = requests.Session()
        if self.key:
            self._session.headers["Authorization"] = f"Bearer {self.key}"

    # ------------------------------------------------------------------------------------------------- what there is

    def models(self) -> dict[str, str]:
        """Names of the models the server lists, and who owns each (engines write their own name there).

        Empty if it has no such list.

        Raises:
            UserError: no server at the URL, or one that wants a key.
        """
        try:
            listed = self._get("models")
        except Refused:
            return {}
        found = listed.get("data")
        entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
        return {str(entry.get("id")): str(entry.get("owned_by", "")) for entry in entries}

    @property
    def shown(self) -> str:
        """The URL without credentials."""
        return redact.text(self.url)

    def connect(self, model: str, prompt: Prompt, listed: Sequence[str]) -> None:
        """Find out how the server takes a prompt and which fields it knows.

        Raises:
            UserError: it takes no prompt, or reads another one.
        """
        self.model = model
        refusals: list[Refused] = []
        for self.route in _ROUTES:
            if (self.route[1] == "text" and prompt.text is None) or (refusals and _unknown_model(refusals[-1])):
                continue
            names = {**_IDS, "logprobs": True if self._chats else 1, **_NEUTRAL}
            self.extras = names
            try:
                if self._refusal(prompt):
                    self.extras = {}
                    if refusal := self._refusal(prompt):
                        refusals.append(refusal)
                        continue
                    kept = {name: value for name, value in names.items() if self._takes(prompt, name, value)}
                    self.extras = kept
                self.refused = tuple(name for name in names if name not in self.extras)
                self.read_prompt(prompt)
                return
            except requests.RequestException as error:
                raise self._lost(error) from error
        hint = f"It lists {', '.join(listed)}. " if listed else ""
        raise UserError(
            f"The server at {self.shown} takes no prompt for model '{model}': {'; '.join(map(str, refusals))}. {hint}"
            "Set served_model=NAME, or correct url=."
        )

    def _takes(self, prompt: Prompt, name: str, value: Any) -> bool:
        self.extras = {name: value}
        return self._refusal(prompt) is None

    def _refusal(self, prompt: Prompt) -> Refused | None:
        try:
            self._post(self._body(prompt, Sampling(), 1, 1))
        except Refused as error:
            return error
        return None

    @property
    def _chats(self) -> bool:
        return self.route[1] == "a chat message"

    def read_prompt(self, prompt: Prompt) -> bool:
        """Whether the server reports the tokens it read.

        Raises:
            UserError: they are not those of the target.
        """
        answer = self._post(self._body(prompt, Sampling(), 1, 1))
        choice = _choices(answer)[0]
        read = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        count = (answer.get("usage") or {}).get("prompt_tokens")
        if isinstance(read, list) and read != prompt.ids:
            count = f"other {len(read)}" if len(read) == len(prompt.ids) else len(read)
        if count not in (None, len(prompt.ids)):
            raise UserError(
                f"The server read {count} tokens where the target reads {len(prompt.ids)}: '{prompt.message:.40}' was "
                f"sent as {self.route[1]}. Serve the same model with the same tokenizer and chat template."
            )
        return count is not None

    # ------------------------------------------------------------------------------------------------------- texts

    def takes(self, name: str) -> bool:
        """Whether the server takes a field beyond OpenAI's."""
        return name in self.extras

    def complete(self, prompt: Prompt, sampling: Sampling, limit: int, n: int = 1) -> list[Completion]:
        """``n`` texts of at most ``limit`` tokens each.

        Raises:
            RunFailed: the server failed, or does not answer any more.
        """
        found: list[Completion] = []
        while len(found) < n:
            asked = min(n - len(found), AT_ONCE) if self.many else 1
            try:
                choices = _choices(self._post(self._body(prompt, sampling, limit, asked)))
            except Refused as error:
                if asked == 1:
                    raise RunFailed(f"The server at {self.shown} failed: {error}.") from error
                self.many, choices = False, []
            except requests.RequestException as error:
                raise self._lost(error) from error
            self.many = self.many and len(choices) >= asked
            found += map(_completion, choices)
        return found[:n]

    def _body(self, prompt: Prompt, sampling: Sampling, limit: int, n: int) -> dict[str, Any]:
        sent: dict[str, Any] = {"model": self.model, "max_tokens": limit}
        if self._chats:
            sent["messages"] = [{"role": "user", "content": prompt.message}]
        else:
            sent["prompt"] = prompt.ids if self.route[1] == "token ids" else prompt.text
        sent |= {"temperature": sampling.temperature, "top_p": sampling.top_p, **self.extras}
        if sampling.top_k and self.takes("top_k"):
            sent["top_k"] = sampling.top_k
        return sent | ({"n": n} if n > 1 else {})

    # -------------------------------------------------------------------------------------------------------- HTTP

    def _get(self, path: str) -> dict[str, Any]:
        try:
            return self._read(path, self._session.get(f"{self.url}/{path}", timeout=self.timeout_s))
        except requests.RequestException as error:
            raise UserError(
                f"No server answers at {self.shown} ({_reason(error)}). Start it, or correct url=http://HOST:PORT/v1."
            ) from error

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        path = self.route[0]
        return self._read(path, self._session.post(f"{self.url}/{path}", json=body, timeout=self.timeout_s))

    def _read(self, path: str, answer: requests.Response) -> dict[str, Any]:
        if answer.status_code in _DENIED:
            raise UserError(
                f"The server at {self.shown} answers HTTP {answer.status_code} to /{path}: it wants a key. "
                f"Set the environment variable {KEY}."
            )
        if not answer.ok:
            raise Refused(answer.status_code, path, _said(answer))
        try:
            found = answer.json()
        except requests.JSONDecodeError as error:
            raise UserError(
                f"The answer of {self.shown}/{path} is not JSON; url must be that of an OpenAI-compatible server, "
                "http://HOST:PORT/v1."
            ) from error
        return found if isinstance(found, dict) else {}

    def _lost(self, error: requests.RequestException) -> RunFailed:
        if isinstance(error, requests.Timeout):
            return RunFailed(
                f"The server at {self.shown} did not answer within {self.timeout_s:g} s. Set timeout_s=SECONDS."
            )
        return RunFailed(f"The server at {self.shown} does not answer any more ({_reason(error)}). Run it again.")


def _unknown_model(refusal: Refused) -> bool:
    """Whether the endpoint exists and lacks the model, so that another endpoint lacks it too."""
    return refusal.status == 404 and "model" in str(refusal).lower()


def _said(answer: requests.Response) -> str:
    """The server's own words, from the places where servers put them."""
    try:
        found = answer.json()
    except requests.JSONDecodeError:
        found = answer.text
    for name in ("error", "message", "detail"):
        found = found.get(name, found) if isinstance(found, dict) else found
    return redact.text(" ".join(str(found).split())[:200]).rstrip(".") or "no reason given"


def _reason(error: requests.RequestException) -> str:
    """What the network says, without the layers of the client around it."""
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    found = re.search(r"\[Errno -?\d+\] ([\w \-]+)", str(error))
    return redact.text(found[1] if found else first_line(error))


def _choices(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = answer.get("choices")
    if not isinstance(found, list) or not found or not all(isinstance(choice, dict) for choice in found):
        raise UserError(
            "The server's answer has no choices; url must be that of an OpenAI-compatible server, http://HOST:PORT/v1."
        )
    return found


def _completion(choice: Mapping[str, Any]) -> Completion:
    message = choice.get("message")
    text = (message or {}).get("content") if isinstance(message, dict) else choice.get("text")
    logprobs = choice.get("logprobs") or {}
    content = logprobs.get("content") or []
    pieces = logprobs.get("tokens") or [part.get("token") for part in content]
    ended = choice.get("finish_reason") not in _NOT_ENDED
    return Completion(str(text or ""), _ids(choice, content, pieces), pieces or None, ended)


def _ids(choice: Mapping[str, Any], content: Sequence[Mapping[str, Any]], pieces: Sequence[Any]) -> list[int] | None:
    """Ids as vLLM (``token_ids``, or ``token_id:7`` for a token) and llama.cpp (``id``) return them."""
    if isinstance(found := choice.get("token_ids"), list):
        return [int(token) for token in found]
    if content and all(isinstance(part.get("id"), int) for part in content):
        return [int(part["id"]) for part in content]
    matches = [_TOKEN_ID.fullmatch(str(piece)) for piece in pieces]
    return [int(match[1]) for match in matches if match] if matches and all(matches) else None
