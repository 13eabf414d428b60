"""The windows of series that train.py reads, and the network that forecasts them."""

import torch
from torch import nn
from torch.distributions import StudentT
from torch.utils.data import Dataset


class Windows(Dataset):
    """Context and horizon, by where they start; each divided by the context's mean size."""

    def __init__(self, series, places, context, horizon):
        self.series, self.places = series, places
        self.context, self.horizon = context, horizon

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        number, start = self.places[index]
        values = self.series[number][start : start + self.context + self.horizon]
        return values / (values[: self.context].abs().mean() + 1e-6)


class Network(nn.Module):
    """The distribution of each value after the ones before it: of its change."""

    def __init__(self, width, layers):
        super().__init__()
        self.lstm = nn.LSTM(1, width, layers, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, values):
        parameters = self.head(self.lstm(values.unsqueeze(2))[0])
        change, scale, freedom = parameters.unbind(2)
        positive = nn.functional.softplus
        return torch.stack([values + change, positive(scale) + 1e-4, positive(freedom) + 2], 2)


def distribution(output):
    place, scale, freedom = output.unbind(-1)
    return StudentT(freedom, place, scale)
