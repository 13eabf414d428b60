"""Measure the trained network on digits that nothing has seen."""

import json
import sys
from pathlib import Path

import torch
from model import accuracy, digits, network
from safetensors.torch import load_file

model = network().eval()
model.load_state_dict(load_file(sys.argv[1]))
images, labels = digits("test").tensors
with torch.no_grad():
    found = float(accuracy(model(images), labels))
Path("metrics.json").write_text(json.dumps({"accuracy": round(found, 4), "digits": len(labels)}))
