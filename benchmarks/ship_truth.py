"""Are wrong exports refused, and sound ones not? Healthy models of many families are exported and
checked; then faults are planted in each file, and the file is checked again. Some faults are those
of issues of PyTorch, rebuilt.

A check of accuracy runs beside it: the share of samples whose largest output is the same as the
model's. Where all are, such a check would pass the fault.

    python benchmarks/ship_truth.py [--only bert] [--issues] [--out ship_truth.json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

os.environ["KERAS_BACKEND"] = "torch"

from ronde.measure.model_call import call_of
from ronde.ship import ShipError, check_export, export_onnx
from ronde.ship.runtime import open_session

SAMPLES = 24


def images(channels: int = 3, side: int = 32) -> torch.Tensor:
    return torch.randn(SAMPLES, channels, side, side)


def tokens(length: int = 12, words: int = 90) -> torch.Tensor:
    return torch.randint(5, words, (SAMPLES, length))


def plain() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Families written with torch's own layers."""

    class Recurrent(nn.Module):
        def __init__(self, kind: type[nn.Module]) -> None:
            super().__init__()
            self.cells = kind(6, 16, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cells(x)[0][:, -1])

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 3, padding=1)
            self.norm = nn.BatchNorm2d(16)
            self.body = nn.Conv2d(16, 16, 3, padding=1, groups=4)
            self.head = nn.Linear(16, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            x = x + torch.relu(self.norm(self.body(x)))
            return self.head(x.mean((2, 3)))

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(x)).mean(1))

    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.city, self.head = nn.Embedding(20, 4), nn.Linear(8, 3)

        def forward(self, numbers: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
            return self.head(torch.cat([numbers, self.city(codes)], 1))

    s = nn.Sequential
    return {
        "mlp": lambda: (
            s(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)),
            (torch.randn(SAMPLES, 8),),
        ),
        "mlp batch norm": lambda: (
            s(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4)),
            (torch.randn(SAMPLES, 8),),
        ),
        "mlp large values": lambda: (
            s(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 4)),
            (1e4 * torch.randn(SAMPLES, 8),),
        ),
        "softmax output": lambda: (
            s(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4), nn.Softmax(1)),
            (torch.randn(SAMPLES, 8),),
        ),
        "conv": lambda: (
            s(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1800, 5)),
            (images(),),
        ),
        "conv norms": lambda: (
            s(
                nn.Conv2d(3, 8, 3, stride=2),
                nn.GroupNorm(2, 8),
                nn.Hardswish(),
                nn.Conv2d(8, 8, 3),
                nn.InstanceNorm2d(8, affine=True),
                nn.ReLU(),  # else the mean below is the norm's bias, whatever the image
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(8, 5),
            ),
            (images(),),
        ),
        "residual": lambda: (Residual(), (images(),)),
        "autoencoder": lambda: (
            s(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)),
            (images(),),
        ),
        "lstm": lambda: (Recurrent(nn.LSTM), (torch.randn(SAMPLES, 9, 6),)),
        "gru": lambda: (Recurrent(nn.GRU), (torch.randn(SAMPLES, 9, 6),)),
        "transformer": lambda: (Tokens(), (tokens(),)),
        "numbers and codes": lambda: (
            TwoInputs(),
            (torch.randn(SAMPLES, 4), torch.randint(0, 20, (SAMPLES,))),
        ),
        "layer norm": lambda: (
            s(nn.Linear(8, 32), nn.LayerNorm(32), nn.ELU(), nn.Linear(32, 4)),
            (torch.randn(SAMPLES, 8),),
        ),
    }


def of_transformers() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Small models of the library transformers, with random weights."""
    import transformers as t

    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 100,
    }

    def text(config: str, model: str, **more: Any) -> Callable[[], tuple[nn.Module, Any]]:
        def make() -> tuple[nn.Module, Any]:
            asked = getattr(t, config)(**{**small, **more})
            return getattr(t, model)(asked), (tokens(),)

        return make

    def picture(config: str, model: str, **more: Any) -> Callable[[], tuple[nn.Module, Any]]:
        def make() -> tuple[nn.Module, Any]:
            return getattr(t, model)(getattr(t, config)(**more)), (images(),)

        return make

    vision = {k: v for k, v in small.items() if k != "vocab_size"}
    return {
        "bert": text("BertConfig", "BertForSequenceClassification"),
        "roberta": text("RobertaConfig", "RobertaForSequenceClassification", pad_token_id=1),
        "electra": text("ElectraConfig", "ElectraForSequenceClassification", embedding_size=32),
        "distilbert": text(
            "DistilBertConfig",
            "DistilBertForSequenceClassification",
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=64,
        ),
        "mpnet": text("MPNetConfig", "MPNetForSequenceClassification"),
        "gpt2": text(
            "GPT2Config", "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, use_cache=False
        ),
        "llama": text("LlamaConfig", "LlamaForCausalLM", use_cache=False),
        "vit": picture(
            "ViTConfig", "ViTForImageClassification", **vision, image_size=32, patch_size=8
        ),
        "deit": picture(
            "DeiTConfig", "DeiTForImageClassification", **vision, image_size=32, patch_size=8
        ),
        "resnet": picture(
            "ResNetConfig",
            "ResNetForImageClassification",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            layer_type="basic",
        ),
        "convnext": picture(
            "ConvNextConfig",
            "ConvNextForImageClassification",
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_stages=2,
            layer_scale_init_value=1.0,  # 1e-6 by default: nothing in a block would matter
        ),
        "mobilenet v2": picture(
            "MobileNetV2Config",
            "MobileNetV2ForImageClassification",
            depth_multiplier=0.35,
            image_size=32,
        ),
        "swin": picture(
            "SwinConfig",
            "SwinForImageClassification",
            image_size=32,
            patch_size=2,
            embed_dim=8,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=4,
        ),
    }


def of_keras() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Models of Keras on torch: one of ``keras.applications``, and three transformers."""
    from keras_grid import build

    def pixels(name: str) -> Callable[[], tuple[nn.Module, Any]]:
        return lambda: (build(name), (torch.rand(SAMPLES, 64, 64, 3),))

    return {
        "keras MobileNetV2": pixels("MobileNetV2"),
        "keras vit": pixels("vit"),
        "keras encoder": lambda: (build("encoder"), (tokens(12, 50),)),
        "keras translator": lambda: (build("translator"), (tokens(12, 50),)),
    }


def of_examples() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Networks of the repository's examples."""

    def example(file: str, name: str, *size: Any) -> nn.Module:
        path = Path(__file__).parents[1] / "examples" / file
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made: nn.Module = getattr(module, name)(*size)
        return made

    return {
        "example gpt": lambda: (example("gpt/gpt.py", "GPT", 12, 32, 2, 4), (tokens(),)),
        "example word_lm": lambda: (
            example("../tests/ports/word_lm/word_lm.py", "WordLM", 90, 16),
            (tokens(),),
        ),
        "example gan": lambda: (example("gan/gan.py", "generator"), (torch.randn(SAMPLES, 16),)),
        "example segment": lambda: (example("segment/unet.py", "UNet", 2, 8, 2), (images(),)),
        "example simclr": lambda: (
            example("simclr/simclr.py", "Encoder"),
            (torch.rand(SAMPLES, 1, 8, 8),),
        ),
        "example forecast": lambda: (
            example("forecast/network.py", "Network", 16, 2),
            (torch.rand(SAMPLES, 20),),
        ),
        "example batch_inference": lambda: (
            example("batch_inference/model.py", "network"),
            (torch.rand(SAMPLES, 64),),
        ),
    }


def _weights(graph: onnx.ModelProto, least: int) -> list[onnx.TensorProto]:
    found = [t for t in graph.graph.initializer if len(t.dims) >= least and t.data_type == 1]
    return sorted(found, key=lambda t: -int(np.prod(t.dims)))


def _edit(tensor: onnx.TensorProto, edit: Callable[[np.ndarray], np.ndarray]) -> bool:
    before = numpy_helper.to_array(tensor)
    after = edit(before.copy()).astype(before.dtype)
    if np.array_equal(before, after):
        return False
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(after), tensor.name))
    return True


def _swapped(a: np.ndarray) -> np.ndarray:
    axis = next(i for i, n in enumerate(a.shape) if n > 1)
    return np.take(a, [1, 0, *range(2, a.shape[axis])], axis=axis)


def _rolled(graph: onnx.ModelProto) -> bool:
    flat = [
        t
        for t in graph.graph.initializer
        if len(t.dims) == 1 and t.dims[0] > 1 and t.data_type == 1
    ]
    return any(_edit(t, lambda a: np.roll(a, 1)) for t in flat)


def _epsilon(graph: onnx.ModelProto) -> bool:
    for node in graph.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 0.1
                return True
    return False


def _activation(graph: onnx.ModelProto) -> bool:
    others = {"Relu": "Abs", "Tanh": "Erf", "Sigmoid": "HardSigmoid", "Gelu": "Relu", "Erf": "Tanh"}
    for node in graph.graph.node:
        if node.op_type in others:
            node.op_type = others[node.op_type]
            if node.op_type == "Relu":
                del node.attribute[:]
            return True
    return False


FAULTS: dict[str, Callable[[onnx.ModelProto], bool]] = {
    "weights + 1e-3": lambda g: _edit(
        _weights(g, 2)[0], lambda a: a + np.float32(1e-3) * np.sign(a)
    ),
    "two rows swapped": lambda g: _edit(_weights(g, 2)[0], _swapped),
    "a rolled bias": _rolled,
    "half precision": lambda g: _edit(_weights(g, 2)[0], lambda a: a.astype(np.float16)),
    "another epsilon": _epsilon,
    "another activation": _activation,
    "scaled by 1.001": lambda g: _edit(_weights(g, 2)[0], lambda a: a * np.float32(1.001)),
}


class Stage(nn.Module):
    """The first block of a stage of ResNet: two branches from one input, each a convolution with
    batch norm. A bottleneck's branches differ in width.
    """

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.one, self.one_norm = nn.Conv2d(3, first, 3, bias=False), nn.BatchNorm2d(first)
        self.two, self.two_norm = nn.Conv2d(first, last, 1, bias=False), nn.BatchNorm2d(last)
        self.skip, self.skip_norm = nn.Conv2d(3, last, 3, bias=False), nn.BatchNorm2d(last)
        self.head = nn.Linear(last, 5)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):  # as after training
                nn.init.normal_(module.running_mean)
                nn.init.normal_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        long = self.two_norm(self.two(torch.relu(self.one_norm(self.one(x)))))
        return self.head(torch.relu(long + self.skip_norm(self.skip(x))).mean((2, 3)))


class Branches(nn.Module):
    """Two linear layers with batch norm from one input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.one_norm = nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32)
        self.two, self.two_norm = nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32)
        nn.init.normal_(self.one_norm.bias, std=0.01)
        nn.init.normal_(self.two_norm.bias, std=0.01)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one_norm(self.one(x)), self.two_norm(self.two(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(15, 96)
        layer = nn.TransformerEncoderLayer(96, 12, 96, 0.2, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(x))


def _shared_bias(graph: onnx.ModelProto) -> bool:
    """A bias that was made by fusion is named after its input: two branches then share one."""
    first: dict[str, onnx.NodeProto] = {}
    for node in graph.graph.node:
        if node.op_type in ("Conv", "Gemm") and len(node.input) == 3:
            other = first.setdefault(node.input[0], node)
            if other is not node:
                node.input[2] = other.input[2]
                return True
    return False


def _dropout(graph: onnx.ModelProto) -> bool:
    """Dropout that goes on: after the first normalization."""
    node = next(n for n in graph.graph.node if n.op_type == "LayerNormalization")
    kept = node.output[0]
    node.output[0] = "before_dropout"
    scalars = {"ratio": np.float32(0.2), "training": np.bool_(True)}
    graph.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(v), n) for n, v in scalars.items()
    )
    at = list(graph.graph.node).index(node) + 1
    drop = onnx.helper.make_node("Dropout", ["before_dropout", *scalars], [kept], seed=1)
    graph.graph.node.insert(at, drop)
    return True


ISSUES: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], Callable[[onnx.ModelProto], bool]]] = {
    "169178 ResNet-18: a bias of another branch": (
        lambda: (Stage(8, 8), (images(),)),
        _shared_bias,
    ),
    "166797, 168224 ResNet-50: a bias of another width": (
        lambda: (Stage(4, 16), (images(),)),
        _shared_bias,
    ),
    "174042 linear layers: a bias of another branch": (
        lambda: (Branches(), (torch.randn(SAMPLES, 16),)),
        _shared_bias,
    ),
    "110557 TransformerEncoder: dropout in the export": (
        lambda: (Encoder(), (tokens(9, 15),)),
        _dropout,
    ),
}


def judge(
    name: str,
    make: Callable[[], tuple[nn.Module, Any]],
    faults: dict[str, Callable[[onnx.ModelProto], bool]],
    folder: Path,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model, arguments = make()
    model.eval()
    call = call_of(model, lambda m: m(*arguments))
    path = folder / "model.onnx"
    row: dict[str, Any] = {"model": name, "faults": {}}
    start = time.perf_counter()
    try:
        export_onnx(model, call, path)
        floors = check_export(model, path, call)
    except ShipError as error:
        return {**row, "refused": str(error)}
    row["seconds"] = time.perf_counter() - start
    row["export / rounding"] = max(f.export / max(f.model, 1e-30) for f in floors)
    feeds = dict(
        zip(
            [i.name for i in open_session(path).get_inputs()],
            (t.numpy() for t in call.tensors),
            strict=True,
        )
    )
    right = open_session(path, optimized=False).run(None, feeds)
    for fault, plant in faults.items():
        graph = onnx.load(path)
        if not plant(graph):
            continue
        data = graph.SerializeToString()
        try:
            wrong = open_session(data, optimized=False).run(None, feeds)
        except Exception:
            wrong = []  # it does not even run
        outputs = list(zip(wrong, right, strict=False))
        same = bool(outputs) and all(np.array_equal(*pair) for pair in outputs)
        refused = ""
        try:
            check_export(model, data, call)
        except ShipError as error:
            refused = str(error)
        chosen = [[o.reshape(SAMPLES, -1).argmax(1) for o in pair] for pair in outputs]
        agree = min((float((a == b).mean()) for a, b in chosen), default=0.0)
        row["faults"][fault] = {"refused": bool(refused), "no effect": same, "same answers": agree}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--issues", action="store_true", help="those of PyTorch alone")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        healthy_ones = {**plain(), **of_transformers(), **of_keras(), **of_examples()}
        cases = {} if args.issues else {n: (make, FAULTS) for n, make in healthy_ones.items()}
        cases |= {n: (make, {"as reported": plant}) for n, (make, plant) in ISSUES.items()}
        for name, (make, faults) in cases.items():
            if args.only and args.only not in name:
                continue
            rows.append(judge(name, make, faults, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))
    faults = [f for r in rows for f in r["faults"].values() if not f["no effect"]]
    caught = sum(f["refused"] for f in faults)
    passed = sum(f["same answers"] == 1.0 for f in faults)
    healthy = sum("refused" not in r for r in rows)
    print(f"healthy: {healthy} of {len(rows)} shipped")
    print(f"faults: {caught} of {len(faults)} refused; accuracy would pass {passed} of them")


if __name__ == "__main__":
    main()
