"""Images of shapes on white: what the model in tests/assets/shapes-vlm was trained on and is asked about."""

from __future__ import annotations

import base64
import io
import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLOURS = {"red": (230, 30, 30), "green": (20, 150, 40), "blue": (30, 50, 220), "yellow": (245, 215, 30)}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("one", "two", "three", "four")

WHAT = "What is in the picture?"
HOW_MANY = "How many shapes are there?"


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape; its centre and radius are fractions of the image size."""

    colour: str
    form: str
    x: float
    y: float
    radius: float
    turn: float = 0.0
    paint: tuple[int, int, int] = (0, 0, 0)

    @property
    def name(self) -> str:
        return f"{self.colour} {self.form}"


def some_shapes(chance: random.Random, count: int) -> list[Shape]:
    """Shapes at random positions that do not touch. A single one may be large."""
    largest = 0.42 if count == 1 else 0.2
    shapes: list[Shape] = []
    while len(shapes) < count:
        radius = chance.uniform(0.1, largest)
        x, y = (chance.uniform(radius + 0.01, 0.99 - radius) for _ in "xy")
        if all(math.hypot(x - other.x, y - other.y) > radius + other.radius + 0.02 for other in shapes):
            shapes.append(_shape(chance, x, y, radius))
    return shapes


def _shape(chance: random.Random, x: float, y: float, radius: float) -> Shape:
    colour, form = chance.choice(list(COLOURS)), chance.choice(SHAPES)
    turn = {"circle": 0.0, "square": chance.uniform(-6, 6), "triangle": chance.uniform(-12, 12)}[form]
    red, green, blue = (min(255, max(0, part + chance.randint(-40, 40))) for part in COLOURS[colour])
    return Shape(colour, form, x, y, radius, turn, (red, green, blue))


def draw(
    shapes: list[Shape], width: int = 96, height: int | None = None, *, smooth: bool = True, ground: str = "white"
) -> Image.Image:
    """Render the shapes. `smooth`: antialiased, by drawing at twice the size."""
    height = width if height is None else height
    scale = 2 if smooth else 1
    image = Image.new("RGB", (scale * width, scale * height), ground)
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        x, y = shape.x * image.width, shape.y * image.height
        radius = shape.radius * min(image.size)
        if shape.form == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=shape.paint)
        else:
            corners, first = (4, 45) if shape.form == "square" else (3, 30)
            pen.polygon(_corners(x, y, radius, corners, first + shape.turn), fill=shape.paint)
    return image.resize((width, height), Image.Resampling.BOX) if smooth else image


def _corners(x: float, y: float, radius: float, count: int, first: float) -> list[tuple[float, float]]:
    angles = [math.radians(first + 360 * corner / count) for corner in range(count)]
    return [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]


def data_uri(image: Image.Image, kind: str = "png") -> str:
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return f"data:image/{kind};base64," + base64.b64encode(buffer.getvalue()).decode()
