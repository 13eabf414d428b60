import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup():
    dist.init_process_group("gloo")


def cleanup():
    dist.destroy_process_group()


def train(model, loader, optimizer, criterion, scheduler, device):
    model.train()
    for inputs, target in loader:
        inputs, target = inputs.to(device), target.to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()


def main():
    setup()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(48, 6, generator=generator), torch.randint(3, (48,), generator=generator)
    )
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=4, shuffle=False, sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    model = DDP(model, device_ids=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader))
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train(model, loader, optimizer, criterion, scheduler, "cpu")
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"worker {local_rank} of {dist.get_world_size()}: epoch {epoch} done")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), sys.argv[1])
    cleanup()


if __name__ == "__main__":
    main()
