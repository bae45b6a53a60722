"""Names of models: `name` and `name:latest` are the same model."""

from __future__ import annotations

from millstream.api.errors import PARAM_LENGTH, shortened
from millstream.errors import NotFound
from millstream.model_facts import ModelCard
from millstream.service.ports import ModelService

LATEST = ":latest"


def find_model(service: ModelService, name: str | None) -> ModelCard:
    """Returns the card of a model; that of the first one if there is no name. Raises `NotFound`."""
    if not name:
        return service.model("")
    known = {each: card for card in service.models() for each in (card.name, *card.aliases)}
    other = name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST
    if (card := known.get(name) or known.get(other)) is not None:
        return card
    served = ", ".join(known) or "none"
    raise NotFound(f"model '{shortened(name, PARAM_LENGTH)}' not found. Served here: {served}.", param="model")
