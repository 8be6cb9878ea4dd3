"""Chat templates in the ways of published families, in words of our own: each has a demand of its own."""

from __future__ import annotations

from tests.gateway.api.test_content_format import ALWAYS_PARTS, CHARACTERS, GEMMA_3, MACRO, PLAIN
from tests.gateway.api.test_tools import QWEN
from tests.gateway.conftest import TEMPLATE

_TOOLS = "{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
_END = "{%- if add_generation_prompt %}<assistant>{% endif %}"

CHATML = (  # Content must be a text: it is searched.  Thoughts of all turns are shown.
    _TOOLS
    + """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in m.content %}{% set thought = 'split' %}{% endif %}
        {{- '<assistant>' }}
        {%- if thought %}<think>{{ thought }}</think>{% endif %}
        {{- m.content.lstrip('\\n') }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{ call.function.arguments }}
            {%- else %}{{ call.function.arguments | tojson }}{% endif %}}</tool_call>
        {%- endfor %}
        {{- '<end>' }}
    {%- else %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endif %}
{%- endfor %}"""
    + _END
)
NONE_TELLS_CALLS = (  # Calls are shown only where content is none; arguments join texts.
    _TOOLS
    + """
{%- for m in messages %}
    {%- if m['role'] == 'assistant' and m['content'] is none %}
        {%- for call in m['tool_calls'] %}
            {{- '<call>' + call['type'] + '<sep>' + call['function']['name'] + '\\n' }}
            {{- call['function']['arguments'] + '</call>' }}
        {%- endfor %}
    {%- elif m['role'] == 'assistant' %}{{ '<assistant>' + m['content'] + '<eos>' }}
    {%- elif m['role'] == 'tool' %}{{ '<output>' + m['content'] + '</output>' }}
    {%- else %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}
{%- endfor %}"""
    + _END
)
ALTERNATES = (  # Roles must alternate; ids of calls have nine characters; no system message later.
    """
{%- if messages[0].role == 'system' %}{% set head = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set head = '' %}{% set rest = messages %}{% endif %}
{%- set ns = namespace(i=0) %}
{%- for m in rest %}
    {%- if m.role not in ('user', 'assistant', 'tool') %}{{ raise_exception('no role ' + m.role) }}{% endif %}
    {%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}
        {%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
        {%- set ns.i = ns.i + 1 %}
    {%- endif %}
{%- endfor %}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
        {{- '[INST]' + (head + '\\n\\n' if head and loop.first else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls %}
            {{- '[CALL]' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}{{ m.content + '</s>' }}
    {%- else %}{{ '[RESULT]' + m.content + '[/RESULT]' }}{% endif %}
{%- endfor %}"""
)
PARTS_AND_THOUGHTS = (  # What was thought is a part of the content; a turn must say or call something.
    _TOOLS
    + """
{%- for m in messages %}
    {%- if m.role == 'assistant' and not m.content and not m.tool_calls %}
        {{- raise_exception('empty') }}
    {%- endif %}
    {{- '[' + m.role + ']' }}
    {%- if m.content is string %}{{ m.content }}
    {%- else %}
        {%- for part in m.content or [] %}
            {%- if part.type == 'text' %}{{ part.text }}
            {%- elif part.type == 'thinking' and m.role == 'assistant' %}[THINK]{{ part.thinking }}[/THINK]
            {%- else %}{{ raise_exception('no such part') }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '[CALL]' + call.function.name + '[ARGS]' }}{{ call.function.arguments | tojson }}
    {%- endfor %}
{%- endfor %}"""
    + _END
)
HEADERS = (  # Any role is printed; a text beside calls is dropped; one call a turn.
    _TOOLS
    + """
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- for call in m.tool_calls %}
            {{- '<|assistant|>{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}{{ '}<|eot|>' }}
        {%- endfor %}
    {%- else %}{{ '<|' + m['role'] + '|>' + m['content'] | trim + '<|eot|>' }}{% endif %}
{%- endfor %}"""
    + _END
)
CHANNELS = (  # Thoughts have a third name, go before calls, and never beside a text; knows developers.
    """
{%- macro told(m) %}
    {%- if m.role in ('developer', 'system') %}<developer>{{ m.content }}<end>{% endif %}
{%- endmacro %}
{%- if tools %}<developer>{{ tools | tojson }}<end>{% endif %}
{%- set ns = namespace(name='') %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- if m.content and m.thinking %}{{ raise_exception('both content and thinking') }}{% endif %}
        {%- if m.content or m.thinking %}<assistant analysis>{{ m.content or m.thinking }}<end>{% endif %}
        {%- for call in m.tool_calls %}
            {%- set ns.name = call.function.name %}
            {{- '<assistant to=functions.' + call.function.name + '>' }}
            {{- call.function.arguments | tojson }}{{ '<call>' }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {%- if 'thinking' in m %}<assistant analysis>{{ m.thinking + '' }}<end>{% endif %}
        {{- '<assistant final>' + m.content + '<end>' }}
    {%- elif m.role == 'tool' %}{{ '<functions.' + ns.name + '>' + (m.content | tojson) + '<end>' }}
    {%- elif m.role == 'user' %}{{ '<user>' + m.content + '<end>' }}
    {%- else %}{{ told(m) }}{% endif %}
{%- endfor %}"""
    + _END
)
TAGS = (  # Arguments are gone through; parts or texts by a macro; the reasoning's other name.
    _TOOLS
    + """
{%- macro visible(content) %}
    {%- if content is string %}{{ content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}{% if item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}
    {%- elif content is none %}{% else %}{{ content }}{% endif %}
{%- endmacro %}
{%- for m in messages %}
    {{- '<|' + m.role + '|>' + (m.name + ':' if m.role == 'tool' else '') }}
    {%- if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}
    {{- visible(m.content) }}
    {%- for call in m.tool_calls or [] %}
        {%- set call = call.function if call.function else call %}
        {{- '<tool_call>' + call.name }}
        {%- for key, value in call.arguments.items() %}
            {{- '<arg_key>' + key + '</arg_key><arg_value>' }}
            {{- value if value is string else value | tojson }}{{ '</arg_value>' }}
        {%- endfor %}{{ '</tool_call>' }}
    {%- endfor %}
{%- endfor %}"""
    + _END
)
TURNS = (  # Knows users and models alone; a system message joins the first user's; no tools.
    """
{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
    {{- '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '</turn>' }}
{%- endfor %}"""
)
OWN = {
    "chatml": CHATML,
    "none_tells_calls": NONE_TELLS_CALLS,
    "alternates": ALTERNATES,
    "parts_and_thoughts": PARTS_AND_THOUGHTS,
    "headers": HEADERS,
    "channels": CHANNELS,
    "tags": TAGS,
    "turns": TURNS,
}
OTHERS = {
    "of_tests": TEMPLATE,
    "qwen_of_tests": QWEN,
    "gemma_of_tests": GEMMA_3,
    "always_parts": ALWAYS_PARTS,
    "macro": MACRO,
    "plain": PLAIN,
    "characters": CHARACTERS,
}
ALL = OWN | OTHERS
"""All that the tests have, by name."""
SHOW_CALLS = ("chatml", "none_tells_calls", "alternates", "parts_and_thoughts", "headers", "channels", "tags")
SHOW_THOUGHTS = ("chatml", "parts_and_thoughts", "tags")
"""Those that show what was thought in every turn."""
