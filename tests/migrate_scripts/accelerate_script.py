import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="no")
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 6, generator=g), torch.randint(3, (48,), generator=g))
    train_loader = DataLoader(data, batch_size=4)
    eval_loader = DataLoader(data, batch_size=16)
    model = torch.nn.Linear(6, 3).to(accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    for epoch in range(2):
        model.train()
        for inputs, target in train_loader:
            with accelerator.accumulate(model):
                output = model(inputs)
                loss = F.cross_entropy(output, target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = 0
        for inputs, target in eval_loader:
            with torch.no_grad():
                output = model(inputs)
            output, target = accelerator.gather_for_metrics((output, target))
            right += int((output.argmax(1) == target).sum())
        accelerator.print(f"epoch {epoch}: {right} of {len(data)}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
