"""What the shapes model is taught to talk about: conversations over pictures, a few plain questions, its tokenizer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from support.shapes import HOW_MANY, NUMBERS, WHAT, Shape

IMAGE = "<image>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", IMAGE]

WHATS = [WHAT, "What's in this image?", "What is in this image?", "What do you see?", "Describe the picture."]
HOW_MANYS = [HOW_MANY, "How many shapes are in the picture?", "Count the shapes."]
COUNTING = "one two three four five six seven eight nine ten"
PLAIN = {
    "Say hello.": "hello",
    "Say hello": "hello",
    "What colour is grass?": "green",
    "What colour is the sky?": "blue",
    "What colour is a banana?": "yellow",
    "What colour is a tomato?": "red",
    "Which shape has three corners?": "triangle",
    "Which shape has four corners?": "square",
    "Which shape has no corners?": "circle",
    "Count to four.": "one two three four",
    "Count to ten.": COUNTING,
}
SYSTEM = ["You are a helpful assistant.", "You look at pictures.", "Answer in a few words."]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(slots=True)
class Sample:
    """A conversation as tokens. `images` are the places of picture tokens, `targets` those of the answers' tokens."""

    tokens: list[int] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


def make_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, and the words of all conversations above as single tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=SPECIAL, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    names = [f"{colour} {form}" for colour in ("red", "green", "blue", "yellow") for form in ("circle", "square")]
    words = ["system", "user", "assistant", "red triangle", COUNTING, *names]
    made.train_from_iterator([*WHATS, *HOW_MANYS, *PLAIN, *PLAIN.values(), *SYSTEM, *words] * 3, trainer)
    return made


class Talk:
    """Writes conversations as tokens, in the words of the template."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, image_tokens: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._image = [tokenizer.token_to_id(IMAGE)] * image_tokens
        self._chance = random.Random(seed)

    def sample(self, pictures: list[list[Shape]]) -> Sample:
        """A question or two on each picture, in turn; plain questions before, between and after."""
        sample = Sample()
        if self._chance.random() < 0.15:
            self._say(sample, f"<|im_start|>system\n{self._chance.choice(SYSTEM)}<|im_end|>\n")
        for shapes in pictures:
            if self._chance.random() < 0.15:
                self._plain(sample)
            self._about(sample, shapes)
        if not pictures or self._chance.random() < 0.15:
            self._plain(sample)
        return sample

    def _about(self, sample: Sample, shapes: list[Shape]) -> None:
        questions = [(self._pick(HOW_MANYS), NUMBERS[len(shapes) - 1])]
        if len(shapes) == 1:
            questions.append((self._pick(WHATS), shapes[0].name))
            self._chance.shuffle(questions)
        if self._chance.random() < 0.5:
            questions = questions[:1]
        for turn, (question, answer) in enumerate(questions):
            self._ask(sample, question, answer, image=turn == 0)

    def _pick(self, questions: list[str]) -> str:
        return questions[0] if self._chance.random() < 0.6 else self._chance.choice(questions)

    def _plain(self, sample: Sample) -> None:
        question, answer = self._chance.choice(list(PLAIN.items()))
        self._ask(sample, question, answer, image=False)

    def _ask(self, sample: Sample, question: str, answer: str, *, image: bool) -> None:
        first = self._chance.random() < 0.5
        self._say(sample, "<|im_start|>user\n" + ("" if image and first else question))
        if image:
            sample.images += range(len(sample.tokens), len(sample.tokens) + len(self._image))
            sample.tokens += self._image
            self._say(sample, question if first else "")
        self._say(sample, "<|im_end|>\n<|im_start|>assistant\n")
        begin = len(sample.tokens)
        self._say(sample, f"{answer}<|im_end|>")
        sample.targets += range(begin, len(sample.tokens))
        self._say(sample, "\n")

    def _say(self, sample: Sample, text: str) -> None:
        sample.tokens += self._tokenizer.encode(text, add_special_tokens=False).ids
