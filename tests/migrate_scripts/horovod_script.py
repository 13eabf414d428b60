import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("out")
args = parser.parse_args()

# Horovod: initialize library.
hvd.init()
torch.manual_seed(7)
if torch.cuda.is_available():
    # Horovod: pin GPU to local rank.
    torch.cuda.set_device(hvd.local_rank())

g = torch.Generator().manual_seed(0)
train_set = TensorDataset(torch.randn(48, 6, generator=g), torch.randint(3, (48,), generator=g))
# Horovod: use DistributedSampler to partition the training data.
train_sampler = DistributedSampler(
    train_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
)
train_loader = DataLoader(train_set, batch_size=4, sampler=train_sampler)
test_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
test_loader = DataLoader(train_set, batch_size=8, sampler=test_sampler)

model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

# Horovod: broadcast parameters & optimizer state.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % 4 == 0 and hvd.rank() == 0:
            print(f"epoch {epoch} [{batch_idx * len(data)}/{len(train_sampler)}] {loss.item():.4f}")


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test():
    model.eval()
    total = 0.0
    for data, target in test_loader:
        total += F.cross_entropy(model(data), target, reduction="sum").item()
    total = metric_average(total / len(test_sampler), "loss")
    if hvd.rank() == 0:
        print(f"test {total:.4f}")


for epoch in range(1, args.epochs + 1):
    train(epoch)
    test()
if hvd.rank() == 0:
    torch.save(model.state_dict(), args.out)
