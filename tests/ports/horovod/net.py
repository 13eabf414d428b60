"""What plain.py and train.py share: the digits, and Horovod's network for MNIST."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def digits(part: slice) -> TensorDataset:
    found = load_digits()
    images = torch.Tensor(found.images[part])[:, None] / 16
    return TensorDataset(images, torch.tensor(found.target[part]))


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 3, padding=1), nn.Conv2d(10, 20, 3, padding=1)
        self.conv2_drop = nn.Dropout2d(dropout)
        self.fc1, self.fc2 = nn.Linear(80, 50), nn.Linear(50, 10)
        self.dropout = dropout

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)
