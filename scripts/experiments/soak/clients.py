"""Clients that people have: each asks a server one question, by its own stream where it has one.

`ask` returns the text of the answer. What a client needs is imported when it asks: ImportError where it is missing.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

Ask = Callable[[str, str, list[dict[str, str]], int], str]  # (url, model, messages, max_tokens) -> text


def openai_client(url: str, model: str, messages: list[dict[str, str]], max_tokens: int) -> str:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked: Any = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    stream = client.chat.completions.create(**asked, stream=True)
    return "".join(one.choices[0].delta.content or "" for one in stream if one.choices)


def curl(url: str, model: str, messages: list[dict[str, str]], max_tokens: int) -> str:
    if shutil.which("curl") is None:
        raise ImportError("curl is missing")
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    line = ["curl", "-sSN", f"{url}/chat/completions", "-H", "Content-Type: application/json", "-d", "@-"]
    done = subprocess.run(line, input=json.dumps(body), capture_output=True, text=True, check=True)
    events = (json.loads(event) for event in re.findall(r"^data: (\{.*)$", done.stdout, re.M))
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one.get("choices"))


def langchain(url: str, model: str, messages: list[dict[str, str]], max_tokens: int) -> str:
    from langchain_openai import ChatOpenAI

    settings: Any = {"base_url": url, "api_key": "none", "model": model, "temperature": 0}
    chat = ChatOpenAI(**settings)
    return "".join(str(piece.content) for piece in chat.stream(messages, max_tokens=max_tokens))


class Client(NamedTuple):
    ask: Ask
    package: str | None  # None: a program

    def version(self) -> str:
        """Raises ImportError where it is not installed."""
        if self.package is not None:
            return version(self.package)
        line = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout
        return line.split()[1]


CLIENTS = {
    "openai": Client(openai_client, "openai"), "curl": Client(curl, None),
    "langchain-openai": Client(langchain, "langchain-openai"),
}  # fmt: skip
