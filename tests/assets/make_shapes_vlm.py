"""Makes tests/assets/shapes-vlm: a vision-language model of half a million weights that answers from the picture.

    PYTHONPATH=src:tests:tests/assets python tests/assets/make_shapes_vlm.py

It is a LLaVA: a small vision tower, a projector and a small Llama, in mlx-vlm's own classes. First the tower learns to
find shapes, patch by patch, with a head that is thrown away; then the whole model learns to talk; and so again. Seeds
are fixed. At the end it is examined on pictures that it has not seen: 500 of 500 and 499 of
500 were right. It takes seven minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millstream.backend.environment import load_blas

load_blas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optimizers  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_vlm.models.llava import Model, ModelConfig  # noqa: E402
from mlx_vlm.models.llava.config import TextConfig, VisionConfig  # noqa: E402
from PIL import Image  # noqa: E402
from shapes_talk import IMAGE, SPECIAL, TEMPLATE, Sample, Talk, make_tokenizer  # noqa: E402

from support.shapes import COLOURS, HOW_MANY, NUMBERS, SHAPES, WHAT, Shape, draw, some_shapes  # noqa: E402

FOLDER = Path(__file__).parent / "shapes-vlm"
SIDE, PATCH = 60, 10
GRID = SIDE // PATCH
BATCH = 64
POOL = 30_000
ROUNDS = ((4000, 800), (4000, 1200), (1500, 600))
"""Steps of the two lessons, in turn."""
NAMES = [f"{colour} {form}" for colour in COLOURS for form in SHAPES]


def make_config(vocabulary: int, image_token: int, end: int) -> dict[str, Any]:
    text = {
        "model_type": "llama",
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 192,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "num_channels": 3,
        "layer_norm_eps": 1e-5,
    }
    return {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "image_token_index": image_token,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vocab_size": vocabulary,
        "eos_token_id": end,
        "torch_dtype": "float16",
    }


def make_model(config: dict[str, Any]) -> Model:
    text, vision = TextConfig.from_dict(config["text_config"]), VisionConfig.from_dict(config["vision_config"])
    return Model(ModelConfig.from_dict({**config, "text_config": text, "vision_config": vision}))


def pixels(image: Image.Image) -> np.ndarray:
    """What the image processor makes of a picture: one size, -1 to 1, channels first."""
    small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return (np.asarray(small, np.float32) / 127.5 - 1).transpose(2, 0, 1)


@dataclass(frozen=True)
class Picture:
    shapes: list[Shape]
    pixels: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, shapes: list[Shape], image: Image.Image) -> Picture:
        return cls(shapes, pixels(image), labels_of(shapes))

    def mirrored(self) -> Picture:
        shapes = [replace(shape, x=1 - shape.x, turn=-shape.turn) for shape in self.shapes]
        return Picture(shapes, self.pixels[:, :, ::-1], self.labels[:, ::-1])


class Pictures:
    """As many as a lesson has seen are drawn anew; then the same again, mirrored or not."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._drawn: list[Picture] = []

    def _draw(self) -> Picture:
        count = self._chance.choice((1, 1, 2, 3, 4))
        shapes = some_shapes(self._chance, count)
        width = self._chance.choice((60, 60, 90, 120))
        height = int(width * self._chance.uniform(0.8, 1.25)) if self._chance.random() < 0.15 else width
        return Picture.of(shapes, draw(shapes, width, height))

    def _one(self) -> Picture:
        if len(self._drawn) < POOL:
            self._drawn.append(self._draw())
            return self._drawn[-1]
        found = self._chance.choice(self._drawn)
        return found.mirrored() if self._chance.random() < 0.5 else found

    def batch(self, count: int) -> tuple[list[list[Shape]], mx.array, mx.array]:
        """Shapes, pixels and labels."""
        found = [self._one() for _ in range(count)]
        images = mx.array(np.stack([picture.pixels for picture in found]))
        labels = mx.array(np.stack([picture.labels for picture in found]).reshape(count, -1, 3))
        return [picture.shapes for picture in found], images, labels


def features(model: Model, images: mx.array) -> mx.array:
    *_, states = model.vision_tower(images.transpose(0, 2, 3, 1), output_hidden_states=True)
    return model.multi_modal_projector(states[-1])


class Finder(nn.Module):
    """The heads of the first lesson: which shape, if any, is in a patch, which has its middle there, and
    how many there are."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tower, self.projector = model.vision_tower, model.multi_modal_projector
        self.head = nn.Linear(model.config.text_config.hidden_size, 3 * (len(NAMES) + 1))

    def __call__(self, images: mx.array) -> mx.array:
        *_, states = self.tower(images.transpose(0, 2, 3, 1), output_hidden_states=True)
        found = self.head(self.projector(states[-1]))
        return found.reshape(*found.shape[:-1], 3, len(NAMES) + 1)


def labels_of(shapes: list[Shape]) -> np.ndarray:
    """For each patch, the shape that covers most of it and the shape with its middle in it, 0 for none; and how many
    shapes there are in all."""
    found = np.zeros((GRID, GRID, 3), np.int32)
    marks = [replace(shape, paint=(1 + NAMES.index(shape.name),) * 3) for shape in shapes]
    drawn = np.asarray(draw(marks, SIDE, smooth=False, ground="black"))[..., 0]
    patches = drawn.reshape(GRID, PATCH, GRID, PATCH).transpose(0, 2, 1, 3).reshape(GRID, GRID, -1)
    counts = (patches[..., None] == np.arange(1, len(NAMES) + 1)).sum(2)
    found[..., 2] = len(shapes)
    found[..., 0] = np.where(counts.max(-1) >= 5, 1 + counts.argmax(-1), 0)
    for shape in shapes:
        found[int(shape.y * GRID), int(shape.x * GRID), 1] = 1 + NAMES.index(shape.name)
    return found


def learn_to_see(model: Model, steps: int, seed: int = 1) -> None:
    finder, pictures = Finder(model), Pictures(seed)
    optimizer = optimizers.AdamW(learning_rate=schedule(2e-3, steps), weight_decay=0.01)

    def loss(finder: Finder, images: mx.array, wanted: mx.array) -> mx.array:
        weights = mx.where(wanted > 0, mx.array([2.0, 6.0, 1.0]), 1.0)
        return (nn.losses.cross_entropy(finder(images), wanted) * weights).sum() / weights.sum()

    step = nn.value_and_grad(finder, loss)
    began = time.monotonic()
    for number in range(steps):
        _, images, wanted = pictures.batch(BATCH)
        value, gradients = step(finder, images, wanted)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(finder, gradients)
        mx.eval(finder.parameters(), optimizer.state, value)
        report("see", number, steps, value, began)


def learn_to_talk(model: Model, talk: Talk, steps: int, seed: int = 2) -> None:
    pictures, chance = Pictures(seed), random.Random(seed + 1)
    optimizer = optimizers.AdamW(learning_rate=schedule(1e-3, steps), weight_decay=0.01)
    # What the tower has learnt stays: errors of a model that cannot talk yet would unlearn it.
    seeing = (model.vision_tower, model.multi_modal_projector)
    for part in seeing:
        part.freeze()
    step = nn.value_and_grad(model, talk_loss)
    began = time.monotonic()
    for number in range(steps):
        shapes, images, _ = pictures.batch(BATCH)
        # Every fifth step: a picture and then its neighbour's. The tower runs once for each, and lengths are alike.
        pair = number % 5 == 4
        samples = []
        for place in range(BATCH // 2 if pair else BATCH):
            count = 2 if pair else int(chance.random() < 0.9)
            samples.append(talk.sample([shapes[place + turn] for turn in range(count)]))
        value, gradients = step(model, images, *arrays(samples))
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, value)
        report("talk", number, steps, value, began)
    for part in seeing:
        part.unfreeze()


def arrays(samples: list[Sample]) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Tokens; for each place the feature that stands there (one past the last: none); places of the answers' tokens,
    and the weight of each."""
    # Few lengths: what MLX compiles and allocates is used again.
    length = -(-max(len(sample.tokens) for sample in samples) // 16) * 16
    each = GRID * GRID
    tokens = np.zeros((len(samples), length), np.int32)
    places = np.full((len(samples), length), BATCH * each, np.int32)
    most = -(-max(len(sample.targets) for sample in samples) // 8) * 8
    targets, weights = np.ones((len(samples), most), np.int32), np.zeros((len(samples), most), np.float32)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = sample.tokens
        for number, place in enumerate(sample.images):
            places[row, place] = (row + number // each) * each + number % each
        targets[row, : len(sample.targets)] = sample.targets
        weights[row, : len(sample.targets)] = 1.0
    return mx.array(tokens), mx.array(places), mx.array(targets), mx.array(weights)


def talk_loss(
    model: Model, images: mx.array, tokens: mx.array, places: mx.array, targets: mx.array, weights: mx.array
) -> mx.array:
    seen = features(model, images)
    table = seen.reshape(-1, seen.shape[-1])
    words = model.language_model.model.embed_tokens(tokens)
    seen_there = (places < table.shape[0])[..., None]
    merged = mx.where(seen_there, table[mx.minimum(places, table.shape[0] - 1)], words)
    states = model.language_model.model(tokens, inputs_embeds=merged)
    # Only what stands before an answer's token is worth a product with the vocabulary.
    before = mx.take_along_axis(states, targets[..., None] - 1, axis=1)
    logits = model.language_model.model.embed_tokens.as_linear(before)
    losses = nn.losses.cross_entropy(logits, mx.take_along_axis(tokens, targets, axis=1))
    return (losses * weights).sum() / weights.sum()


def examine(model: Model, tokenizer: Any, count: int = 500, seed: int = 2026) -> None:
    """Both questions on fresh pictures, greedily."""
    chance = random.Random(seed)
    for question, counts in ((WHAT, (1,)), (HOW_MANY, (1, 2, 3, 4))):
        shapes = [some_shapes(chance, chance.choice(counts)) for _ in range(count)]
        images = mx.array(np.stack([pixels(draw(each, 90, 90)) for each in shapes]))
        text = f"<|im_start|>user\n{IMAGE * GRID * GRID}{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        tokens = mx.array([prompt] * count)
        seen = features(model, images)
        inside = (tokens == tokenizer.token_to_id(IMAGE))[..., None]
        place = mx.maximum(mx.cumsum(inside[..., 0].astype(mx.int32), axis=1) - 1, 0)
        pictured = mx.take_along_axis(seen, place[..., None], axis=1)
        for _ in range(8):
            words = model.language_model.model.embed_tokens(tokens)
            merged = mx.concatenate(
                [mx.where(inside, pictured, words[:, : len(prompt)]), words[:, len(prompt) :]], axis=1
            )
            states = model.language_model.model(tokens, inputs_embeds=merged)
            logits = model.language_model.model.embed_tokens.as_linear(states[:, -1])
            tokens = mx.concatenate([tokens, logits.argmax(-1, keepdims=True).astype(tokens.dtype)], axis=1)
            mx.eval(tokens)
        answers = [tokenizer.decode(row[len(prompt) :], skip_special_tokens=False) for row in tokens.tolist()]
        wanted = [each[0].name if question == WHAT else NUMBERS[len(each) - 1] for each in shapes]
        right = sum(answer.split("<|im_end|>")[0] == want for answer, want in zip(answers, wanted, strict=True))
        print(f"{question} {right} of {count}", flush=True)


def schedule(top: float, steps: int) -> Any:
    warm = min(100, steps // 10 + 1)
    parts = [optimizers.linear_schedule(0.0, top, warm), optimizers.cosine_decay(top, steps - warm, top / 50)]
    return optimizers.join_schedules(parts, [warm])


def report(lesson: str, number: int, steps: int, loss: mx.array, began: float) -> None:
    if number % 50 == 0 or number == steps - 1:
        print(f"{lesson} {number}/{steps}: loss {loss.item():.4f}, {time.monotonic() - began:.0f} s", flush=True)


def save(model: Model, config: dict[str, Any], tokenizer: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.astype(mx.float16) for name, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save(str(folder / "tokenizer.json"))
    looks = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "resample": 3,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
    }
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": SPECIAL[0],
        "image_token": IMAGE,
        "chat_template": TEMPLATE,
        "model_max_length": 2048,
    }
    processor = {"processor_class": "LlavaProcessor", "patch_size": PATCH, "image_token": IMAGE}
    processor |= {"vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    files = {"config": config, "preprocessor_config": looks, "tokenizer_config": words, "processor_config": processor}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    mx.random.seed(0)
    tokenizer = make_tokenizer()
    ids = {name: tokenizer.token_to_id(name) for name in (IMAGE, "<|im_end|>")}
    config = make_config(tokenizer.get_vocab_size(), ids[IMAGE], ids["<|im_end|>"])
    model = make_model(config)
    for number, (see, talk) in enumerate(ROUNDS):
        learn_to_see(model, see, seed=100 * number + 1)
        learn_to_talk(model, Talk(tokenizer, GRID * GRID, seed=100 * number + 4), talk, seed=100 * number + 2)
    save(model, config, tokenizer, options.folder)
    examine(model, tokenizer)


if __name__ == "__main__":
    main()
