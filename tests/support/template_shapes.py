"""Small chat templates with the habits of real ones: what they refuse, drop, move and demand."""

from __future__ import annotations

_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}"
)
_OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"

ANYWHERE = (
    _TOOLS + "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + _CALLS + "</{{ m.role }}>{% endfor %}" + _OPEN
)
"""Renders every message where it stands."""

DROPS = (
    _TOOLS + "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</system>{% endif %}"
    "{% for m in messages if m.role in ['user', 'assistant', 'tool'] %}<{{ m.role }}>{{ m.content }}"
    + _CALLS
    + "</{{ m.role }}>{% endfor %}"
    + _OPEN
)
"""Looks for a system message in the first place only, and drops the others."""

REFUSES = (
    _TOOLS + "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments | items %}"
    " {{ k }}={{ v }}{% endfor %}</tool_call>{% endfor %}</{{ m.role }}>{% endfor %}" + _OPEN
)
"""Refuses later system messages, conversations without a user, and arguments that are no object."""

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}" + _OPEN
)
"""Knows user and assistant only, in turn."""

ALTERNATES = (
    _TOOLS + "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</system>"
    "{% set messages = messages[1:] %}{% endif %}{% set ns = namespace(index=0) %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% if m.role not in ['user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}"
    "{% if m.role == 'assistant' and not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}" + _CALLS + "</{{ m.role }}>{% endfor %}" + _OPEN
)
"""Counts the turns without those of tools, and refuses empty answers."""

SINGLE_CALLS = (
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}<assistant>"
    + _CALLS
    + "</assistant>{% else %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endif %}{% endfor %}"
    + _OPEN
)
"""Renders one call per message, and drops the text beside it."""

GATHERS = (
    "{% set ns = namespace(system='', called=false) %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.system = ns.system + m.content %}{% endfor %}{{ ns.system }}{% for m in messages %}"
    "{% if m.role == 'user' %}<user>{{ m.content }}</user>{% endif %}"
    "{% if m.role == 'assistant' and m.content is none %}<assistant>{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function.name + ' ' + c.function.arguments }}</tool_call>{% endfor %}</assistant>"
    "{% set ns.called = true %}{% endif %}"
    "{% if m.role == 'assistant' and m.content is not none %}<assistant>{{ m.content }}</assistant>{% endif %}"
    "{% if m.role == 'tool' %}{% if not ns.called %}{{ raise_exception('no previous call') }}{% endif %}"
    "<tool>{{ m.content }}</tool>{% endif %}{% endfor %}" + _OPEN
)
"""Moves system messages to the start, lists no tools, and renders calls with null content and text arguments only."""

PARTS = (
    _TOOLS + "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% elif p.type == 'image' %}<img>{% endif %}{% endfor %}" + _CALLS + "</{{ m.role }}>{% endfor %}" + _OPEN
)
"""Expects every content as a list of parts."""

NEEDS_TOOLS = (
    "{% for t in tools %}<tool_call>{{ t.function.name }}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}" + _CALLS + "</{{ m.role }}>{% endfor %}" + _OPEN
)
"""Loops over the tools without asking whether there are any."""

SHAPES = {
    "anywhere": ANYWHERE,
    "drops": DROPS,
    "refuses": REFUSES,
    "no-system": NO_SYSTEM,
    "alternates": ALTERNATES,
    "single-calls": SINGLE_CALLS,
    "gathers": GATHERS,
    "parts": PARTS,
    "needs-tools": NEEDS_TOOLS,
}
