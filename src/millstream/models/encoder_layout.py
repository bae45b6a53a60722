"""What a folder says about an embedding model or a reranker, in the layout of sentence-transformers. Read, not guessed.

`modules.json` lists the parts that a text passes: the transformer, pooling, dense layers, normalisation. Each has a
folder with its own config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from millstream.errors import ModelError
from millstream.models.encoder_config import BIDIRECTIONAL_FAMILIES, CAUSAL_FAMILIES, FAMILIES, family_of, most_tokens
from millstream.models.files import read_bytes, read_object, read_optional_object

Kind = Literal["generation", "embedding", "rerank", "transcription", "speech"]

POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_MODE_NAMES = {"lasttoken": "last", "weightedmean": "weighted_mean", "mean_sqrt_len_tokens": "mean_sqrt_len"}
_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
YES_NO_FAMILIES = ("qwen3",)
"""Language models that are published as rerankers."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    folder: str
    """Where its weights are, within the model's folder."""
    activation: str
    """Empty for none."""


@dataclass(frozen=True, slots=True)
class EncoderLayout:
    """How a text becomes a vector, or a pair of texts a score."""

    kind: Kind
    family: str
    pooling: tuple[str, ...] = ()
    """Values of `POOLING_MODES`: several are put side by side."""
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = False
    max_tokens: int | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    """Name and text of what the model wants before an input, such as `query`."""
    default_prompt: str | None = None
    yes_no: bool = False
    """A language model whose next token, yes or no, is the score."""
    bidirectional: bool = False
    """A language model that was trained with attention in both directions."""
    dimensions: tuple[int, ...] | None = None
    """Vector sizes that it was trained to be cut to. Empty: none is named, any smaller one is allowed. None: none is
    allowed."""
    notes: tuple[str, ...] = ()


def kind_of(folder: Path, config: Mapping[str, Any]) -> Kind:
    """What the model in a folder is for, by what its files say."""
    architectures = config.get("architectures")
    if isinstance(architectures, list) and any(
        str(name).endswith("ForSequenceClassification") for name in architectures
    ):
        return "rerank"
    if any(_part(module) == "LogitScore" for module in _modules(folder)) or _is_yes_no(folder, config):
        return "rerank"
    if (folder / "modules.json").is_file() or family_of(config) in FAMILIES:
        return "embedding"
    return "generation"


def choose_kind(path: Path, config: Mapping[str, Any], found: Kind, wanted: str | None) -> Kind:
    """The kind that was set for a model, or `found` if none was. Raises `ModelError` if it cannot be that."""
    if wanted is None or wanted == found:
        return found
    family = family_of(config)
    speech = found in ("transcription", "speech")
    possible: dict[str, Kind] = {"embedding": "embedding"} if family and not speech else {}
    if family not in FAMILIES and not speech:
        possible["generation"] = "generation"
    if family in (*FAMILIES, *YES_NO_FAMILIES):
        possible["rerank"] = "rerank"
    possible[found] = found
    if wanted not in possible:
        raise ModelError(
            f"{path}: it cannot be used with kind = {wanted!r}: it is a {family!r} model, which can be of kind "
            f"{', '.join(possible)}"
        )
    return possible[wanted]


def read_layout(path: Path, kind: Kind | None = None) -> EncoderLayout:
    """Reads the layout; `kind` if it is known. Raises `ModelError` for what is not supported. A language model that is
    used for embeddings, but was not made for it, is pooled by the last token."""
    if path.is_file():
        return _gguf_embedder(path)
    folder = path
    config = read_object(folder / "config.json")
    found = kind_of(folder, config)
    kind = kind or found
    family = family_of(config)
    if kind != "embedding" or found != "generation":
        _check_family(folder, family, kind)
    if kind == "rerank":
        return _reranker(folder, config, family)
    return _embedder(folder, config, family)


def _check_family(folder: Path, family: str, kind: Kind) -> None:
    language_models = (*CAUSAL_FAMILIES, *BIDIRECTIONAL_FAMILIES) if kind == "embedding" else YES_NO_FAMILIES
    known = (*FAMILIES, *language_models)
    if family not in known:
        raise ModelError(f"{folder}: the family {family!r} is not supported for {kind}. Supported: {', '.join(known)}.")


def _reranker(folder: Path, config: Mapping[str, Any], family: str) -> EncoderLayout:
    sizes = _limit(folder, config)
    if family in YES_NO_FAMILIES:
        return EncoderLayout("rerank", family, max_tokens=sizes, yes_no=True)
    labels = config.get("num_labels")
    if labels is None and isinstance(config.get("id2label"), dict):
        labels = len(config["id2label"])
    if labels not in (None, 1):
        raise ModelError(f"{folder}: a reranker has one label, but this classifier has {labels}")
    return EncoderLayout("rerank", family, max_tokens=sizes)


def _embedder(folder: Path, config: Mapping[str, Any], family: str) -> EncoderLayout:
    modules = _modules(folder)
    if not modules:
        return _plain_embedder(family, _limit(folder, config))
    pooling: tuple[str, ...] = ()
    dense: list[DenseLayer] = []
    normalize = False
    for module in modules:
        path = _inside(folder, module)
        match _part(module):
            case "Transformer":
                continue
            case "Pooling":
                pooling = _pooling(path)
            case "Dense":
                dense.append(_dense(folder, path))
            case "Normalize":
                normalize = True
            case other:
                raise ModelError(f"{folder / 'modules.json'}: the module {other!r} is not supported")
    if not pooling:
        raise ModelError(f"{folder / 'modules.json'}: it has no Pooling module, which makes one vector of a text")
    settings = read_optional_object(folder / "config_sentence_transformers.json")
    prompts = settings.get("prompts")
    named = {str(name): str(text) for name, text in prompts.items()} if isinstance(prompts, dict) else {}
    default = settings.get("default_prompt_name")
    return EncoderLayout(
        "embedding",
        family,
        pooling,
        tuple(dense),
        normalize,
        _limit(folder, config),
        tuple(named.items()),
        default if isinstance(default, str) and default in named else None,
        bidirectional=family in BIDIRECTIONAL_FAMILIES,
        dimensions=_matryoshka(config, settings),
    )


def _plain_embedder(family: str, max_tokens: int | None) -> EncoderLayout:
    mode = "mean" if family in FAMILIES else "last"
    note = f"no modules.json: {'mean' if mode == 'mean' else 'last-token'} pooling, normalised"
    return EncoderLayout(
        "embedding", family, (mode,), normalize=True, max_tokens=max_tokens, dimensions=(), notes=(note,)
    )


def _gguf_embedder(path: Path) -> EncoderLayout:
    from millstream.models.gguf_config import gguf_config  # NumPy and the gguf package are slow to import
    from millstream.models.gguf_file import open_gguf

    config = gguf_config(open_gguf(path))
    return _plain_embedder(family_of(config), most_tokens(config))


def _matryoshka(config: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[int, ...]:
    """The sizes that the model was trained for, if its files name them. If not, any is allowed, as elsewhere: few
    models say it."""
    for source in (config, settings):
        sizes = source.get("matryoshka_dimensions") or source.get("matryoshka_dims")
        if isinstance(sizes, list) and all(type(size) is int for size in sizes):
            return tuple(sizes)
    return ()


def _modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelError(f"{path}: must be a list of modules")
    return modules


def _part(module: Mapping[str, Any]) -> str:
    """The class's name without its package, which differs between versions of sentence-transformers."""
    return str(module.get("type", "")).rpartition(".")[2]


def _inside(folder: Path, module: Mapping[str, Any]) -> Path:
    path = folder / str(module.get("path", ""))
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ModelError(f"{folder / 'modules.json'}: the path {module.get('path')!r} is outside the model's folder")
    return path


def _pooling(path: Path) -> tuple[str, ...]:
    settings = read_object(path / "config.json")
    if settings.get("include_prompt") is False:
        raise ModelError(f"{path}: pooling without the prompt's tokens (include_prompt) is not supported")
    named = settings.get("pooling_mode")
    if named is not None:
        modes = [_MODE_NAMES.get(str(mode), str(mode)) for mode in (named if isinstance(named, list) else [named])]
    else:
        modes = [mode for key, mode in POOLING_MODES.items() if settings.get(key)]
    if not modes or not set(modes) <= set(POOLING_MODES.values()):
        raise ModelError(f"{path}: no known pooling mode; known: {', '.join(POOLING_MODES.values())}")
    return tuple(modes)


def _dense(folder: Path, path: Path) -> DenseLayer:
    settings = read_object(path / "config.json")
    name = str(settings.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelError(f"{path}: the activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return DenseLayer(path.relative_to(folder).as_posix(), _ACTIVATIONS[name])


def _limit(folder: Path, config: Mapping[str, Any]) -> int | None:
    """The most tokens of an input: what the model's author set, within what its positions allow."""
    found = [most_tokens(config)]
    for name in ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_mpnet_config.json"):
        value = read_optional_object(folder / name).get("max_seq_length")
        found.append(value if type(value) is int and value > 0 else None)
    return min((value for value in found if value is not None), default=None)


def _is_yes_no(folder: Path, config: Mapping[str, Any]) -> bool:
    """Language models that are published as rerankers say it in their name alone."""
    return family_of(config) in YES_NO_FAMILIES and "reranker" in folder.resolve().name.lower()
