"""What plain.py and train.py share: a graph of groups, and a graph convolutional network."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def groups(nodes: int, classes: int = 4, features: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels, and normalized edges of nodes that mostly link to nodes of their class."""
    labels = torch.randint(classes, (nodes,))
    same = labels[:, None] == labels
    edges = (torch.rand(nodes, nodes) < torch.where(same, 0.1, 0.01)).triu(1)
    edges = (edges | edges.T).type(torch.get_default_dtype()) + torch.eye(nodes)
    scale = edges.sum(1).rsqrt()
    values = torch.randn(nodes, features) + 0.5 * F.one_hot(labels, features)
    return values, labels, (scale[:, None] * edges * scale).to_sparse()


class GraphConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(nn.init.xavier_normal_(torch.empty(inputs, outputs)))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, values, edges):
        return torch.sparse.mm(edges, values @ self.kernel) + self.bias


class GCN(nn.Module):
    def __init__(self, inputs: int = 16, hidden: int = 16, classes: int = 4, dropout=0.5) -> None:
        super().__init__()
        self.first, self.second = GraphConv(inputs, hidden), GraphConv(hidden, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values, edges):
        hidden = self.dropout(F.relu(self.first(values, edges)))
        return F.log_softmax(self.second(hidden, edges), dim=1)
