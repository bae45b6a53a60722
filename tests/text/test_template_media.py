"""Templates of vision models: those that expect parts, those that expect strings, and those that accept both."""

from __future__ import annotations

import pytest

from millstream.errors import BadRequest
from millstream.text.templates.template import ChatTemplate

BOTH = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<img>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
    "{% if p.type == 'image' %}<img>{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
)
STRINGS = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
ADDING = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"

MARKERS = {"image": "<img>", "audio": "<snd>"}
IMAGE = {"type": "image", "media": object()}
TEXT = {"type": "text", "text": "what?"}
MESSAGES = [
    {"role": "user", "content": [TEXT, IMAGE]},
    {"role": "assistant", "content": "that"},
    {"role": "user", "content": [IMAGE, TEXT, IMAGE]},
]


@pytest.mark.parametrize("source", [BOTH, PARTS])
def test_templates_that_expect_parts(source: str) -> None:
    template = ChatTemplate(source, {})
    assert template.render_media(MESSAGES, MARKERS) == "user:what?<img>;assistant:that;user:<img>what?<img>;"


@pytest.mark.parametrize("source", [STRINGS, ADDING])
def test_templates_that_expect_strings_get_the_marker_as_text(source: str) -> None:
    template = ChatTemplate(source, {})
    assert template.render_media(MESSAGES, MARKERS) == "user:what?<img>\n;assistant:that;user:<img>\nwhat?<img>\n;"


@pytest.mark.parametrize("source", [BOTH, PARTS, STRINGS, ADDING])
def test_text_without_media_renders_with_all(source: str) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None}]
    assert ChatTemplate(source, {}).render(messages) == "user:hello;assistant:;"


def test_client_kwargs_do_not_clash_with_ours() -> None:
    template = ChatTemplate("{{ marker }}" + BOTH, {})
    assert template.render_media(MESSAGES[1:2], MARKERS, marker="x", messages=[]) == "xassistant:that;"


def test_a_kind_without_a_marker_is_refused() -> None:
    with pytest.raises(BadRequest, match="type 'video'"):
        ChatTemplate(STRINGS, {}).render_media([{"role": "user", "content": [{"type": "video"}]}], MARKERS)


WITH_AUDIO = BOTH.replace("{% else %}{{ p.text }}", "{% elif p.type == 'audio' %}<snd>{% else %}{{ p.text }}")
AUDIO = {"type": "audio", "media": object()}


def test_audio_and_images_together() -> None:
    messages = [{"role": "user", "content": [AUDIO, TEXT, IMAGE]}]
    assert ChatTemplate(WITH_AUDIO, {}).render_media(messages, MARKERS) == "user:<snd>what?<img>;"
    assert ChatTemplate(STRINGS, {}).render_media(messages, MARKERS) == "user:<snd>\nwhat?<img>\n;"


def test_audio_becomes_its_marker_if_the_template_renders_only_images() -> None:
    messages = [{"role": "user", "content": [AUDIO, TEXT]}]
    assert ChatTemplate(BOTH, {}).render_media(messages, MARKERS) == "user:<snd>\nwhat?;"
