"""The chat template of a Hugging Face model directory: a message as the model was taught to read it.

Templates come with models, from anywhere: they run in Jinja's immutable sandbox, with what transformers gives them.
"""

import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from eps_core.errors import ConfigError, one_line, shown
from eps_core.io import inputs
from eps_core.models.fields import read_if_there
from eps_core.models.tokenizer_class import special_tokens


def render(path: Path, text: str) -> str:
    """The user's message `text` in the template of the model in `path`, up to where the answer begins. Special tokens
    are in it as text: encode it without adding any."""
    return render_messages(path, [{"role": "user", "content": text}])


def render_messages(path: Path, messages: list[dict[str, str]]) -> str:
    import jinja2  # late: nothing else of decode needs it
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    template = _template(path)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_blocks()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    special = special_tokens(path)
    given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return environment.from_string(template).render(**(special | given))
    except Exception as error:  # a template is a program, and may fail as any
        raise ConfigError(
            f"the chat template of {path} fails on this prompt ({one_line(error)}): leave out --chat, or fix it"
        ) from error


def in_chat(path: Path, encode: Callable[..., list[int]]) -> Callable[[str, str], list[int]]:
    """Return a function that encodes a prompt as a user's message in the chat template of the model in `path`, after
    which the assistant has begun to answer with the lead, the prompt's end."""
    return lambda prompt, lead: encode(
        render(path, prompt.removesuffix(lead).rstrip().removesuffix("\nAnswer:")) + lead, special=False
    )


def _template(path: Path) -> str:
    """The template's text: a file of its own comes before tokenizer_config.json, as in transformers."""
    file = path / "chat_template.jinja"
    if os.path.lexists(file):
        return inputs.read_text(file, "", "check its permissions, or download it again")
    found = read_if_there(path / "tokenizer_config.json").get("chat_template")
    if found is None:
        found = read_if_there(path / "chat_template.json").get("chat_template")
    if found is None:
        raise ConfigError(f"the model in {path} has no chat template: leave out --chat, it reads plain text")
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        by_name = {str(one.get("name")): one.get("template") for one in found}
        if "default" not in by_name:
            raise ConfigError(f"the chat templates {shown(list(by_name))} of {path} have no default: name one so")
        found = by_name["default"]
    if not isinstance(found, str):
        raise ConfigError(f"chat_template {shown(found)} of {path} is no text: download the model's tokenizer again")
    return found


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
):
    """Unlike Jinja's own filter: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_blocks() -> type:
    """{% generation %} .. {% endgeneration %} marks what the assistant said, for training; here it is only its body."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return Generation
