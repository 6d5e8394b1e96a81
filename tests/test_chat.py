"""Chat templates: what transformers renders and encodes from the same folder, token by token, and one line where there
is none or it fails."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tokenizers
from command import call
from test_model import assert_refused
from transformers import AutoTokenizer

from eps_core.decode.session import Session
from eps_core.models.chat import render, render_messages

# in the style of the templates that the named models come with
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if loop.index0 > ns.last_query_index %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ message['content'] + eos_token }}
{% endif %}
{% endfor %}"""
CHATML = """{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""
# what else templates use: loop controls, marked answers, JSON as it is, tokens that are not there
OTHERS = """{%- for message in messages %}
{%- if loop.index > 3 %}{% break %}{% endif %}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% continue %}{% endif %}
{{- message | tojson }}{{ message | tojson(indent=2) }}{{ pad_token }}{{ unk_token is defined }}
{%- endfor %}"""
TEMPLATES = {"llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "chatml": CHATML, "others": OTHERS}
MESSAGE = "  Wer <b>&\"'ist</b> da?\n\nnaïve <|im_end|> text </s> "
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def write(path: Path, **config: Any) -> Path:
    """A model with a byte tokenizer that begins every text with <s>, and a tokenizer_config.json."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_models.saved("llama2") / "tokenizer.json"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    common = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    return tiny_models.changed(path, "llama2", files={"tokenizer_config.json": common | config}, tokenizer=tokenizer)


@pytest.mark.parametrize("form", ["text", "list", "file", "object of a token"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str, form: str, tmp_path: Path) -> None:
    template = TEMPLATES[name]
    config: dict[str, Any] = {"chat_template": template}
    if form == "list":
        config = {"chat_template": [{"name": "tool_use", "template": "?"}, {"name": "default", "template": template}]}
    elif form == "file":
        config = {"chat_template": "not this one"}
        (tmp_path / "chat_template.jinja").write_text(template)
    elif form == "object of a token":
        config["bos_token"] = {"__type": "AddedToken", "content": "<s>", "special": True, "lstrip": False}
    model = write(tmp_path, **config)
    theirs = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": MESSAGE}]
    assert render(model, MESSAGE) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokens = Session.open(model, "numpy").encode_chat(MESSAGE)
    assert tokens == expected
    # the template's own first token alone, where the tokenizer would put one before every text
    assert tokens.count(256) == template.count("bos_token")


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, chat_template=TEMPLATES[name])
    roles = ["user", "assistant", "user", "assistant", "user"]
    if name not in ("mistral", "others"):
        roles = ["system", *roles]
    messages = [{"role": role, "content": f"{index} {MESSAGE}"} for index, role in enumerate(roles)]
    theirs = AutoTokenizer.from_pretrained(path)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert render_messages(path, messages) == expected


def test_a_template_of_a_processor_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "<{{ messages[0].content }}>"}))
    assert render(tmp_path, "x") == "<x>"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, ("no chat template", "leave out --chat")),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, ("['rag']", "have no default")),
        ({"chat_template": 5}, ("chat_template 5", "no text")),
        ({"chat_template": "{% if %}"}, ("fails on this prompt", "Expected an expression")),
        ({"chat_template": "{{ raise_exception('no users here') }}"}, ("fails on this prompt (no users here)",)),
        ({"chat_template": "{{ 1 / 0 }}"}, ("fails on this prompt (division by zero)",)),
        # a template is a stranger's program
        ({"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}, ("fails on this prompt", "unsafe")),
        ({"chat_template": "{{ messages.append(1) }}"}, ("fails on this prompt", "unsafe")),
        ({"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}, ("fails on this prompt", "Range too big")),
        ({"chat_template": "{% include '/etc/passwd' %}"}, ("fails on this prompt", "no loader")),
    ],
)
def test_a_template_that_is_none_is_one_line(config: dict, says: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path, **config)
    assert_refused(lambda: render(tmp_path, "hello"), str(tmp_path), *says)


def test_run_puts_the_prompt_into_the_template(tmp_path: Path) -> None:
    model = write(tmp_path, chat_template=MISTRAL)
    common = ("--model", model, "--backend", "numpy", "--max-new-tokens", 3)
    chat = call("run", *common, "--prompt", "hello", "--chat")
    assert chat.returncode == 0, chat.stderr
    result = json.loads(chat.stdout.splitlines()[-1])
    # one <s>
    assert result["prompt_tokens"] == 1 + len("[INST] hello [/INST]\n")
    plain = json.loads(call("run", *common, "--prompt", "hello").stdout.splitlines()[-1])
    assert plain["prompt_tokens"] == 1 + len("hello") and plain["tokens"] != result["tokens"]
    (model / "tokenizer_config.json").unlink()
    none = call("run", *common, "--prompt", "hello", "--chat")
    assert none.returncode == 2 and none.stderr.count("\n") == 1 and "has no chat template" in none.stderr
