"""Describes models by their files, loaded or not."""

from __future__ import annotations

import logging

from millstream.model_facts import ModelDescription
from millstream.models.description import BAD_FILES, describe_files
from millstream.models.source import ModelSource
from millstream.service.generation.model import capabilities
from millstream.text.chat_format import ChatFormat

log = logging.getLogger(__name__)


def describe(source: ModelSource, chat_format: ChatFormat) -> ModelDescription:
    """Reads the headers of the model's files. If they cannot be read, only the template is described."""
    try:
        files = describe_files(source)
    except BAD_FILES as error:
        log.info("%s cannot be described: %s", source.path, error)
        return ModelDescription(template=chat_format.template or None, capabilities=capabilities(chat_format, ()))
    return ModelDescription(
        format=files.format,
        family=files.family,
        parameters=files.parameters,
        quantization=files.quantization,
        context_length=files.context_length,
        template=chat_format.template or None,
        capabilities=capabilities(chat_format, ["image"] if files.sees_images else []),
        file_bytes=files.file_bytes,
    )
