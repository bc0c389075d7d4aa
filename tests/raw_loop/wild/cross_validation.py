"""Cross-validation: a model per fold, whose predictions of the test set are added up. The first batches are profiled."""

import contextlib

import torch
from accelerate import Accelerator, ProfileKwargs
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Subset, TensorDataset

NUM_FOLDS = 3


def get_fold_dataloaders(dataset, fold):
    valid = list(range(fold, len(dataset), NUM_FOLDS))
    train = [index for index in range(len(dataset)) if index % NUM_FOLDS != fold]
    return DataLoader(Subset(dataset, train), batch_size=8), DataLoader(Subset(dataset, valid), batch_size=16)


def main():
    profile_kwargs = ProfileKwargs(activities=["cpu"], record_shapes=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[profile_kwargs])
    set_seed(23)
    features = torch.randn(150, 4)
    labels = features.abs().argmax(dim=1)
    dataset = TensorDataset(features[:96], labels[:96])
    test_dataloader = accelerator.prepare(DataLoader(TensorDataset(features[96:], labels[96:]), batch_size=20))
    test_predictions, test_references = [], None
    for fold in range(NUM_FOLDS):
        set_seed(23 + fold)
        train_dataloader, valid_dataloader = get_fold_dataloaders(dataset, fold)
        model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        model, optimizer, train_dataloader, valid_dataloader = accelerator.prepare(
            model, optimizer, train_dataloader, valid_dataloader
        )
        for epoch in range(4):
            model.train()
            is_profiled = fold == 0 and epoch == 0
            with accelerator.profile() if is_profiled else contextlib.nullcontext() as profiler:
                for inputs, targets in train_dataloader:
                    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            if is_profiled:
                calls = {event.key: event.count for event in profiler.key_averages()}
                accelerator.print(f"profiled linear: {calls['aten::linear']}")
        model.eval()
        correct, seen = 0, 0
        for inputs, targets in valid_dataloader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, targets))
            correct += (predictions == references).sum().item()
            seen += references.numel()
        accelerator.print(f"fold {fold} accuracy: {correct / seen:.6f}")
        accelerator.print(f"fold {fold} seen: {seen}")
        fold_predictions, fold_references = [], []
        for inputs, targets in test_dataloader:
            with torch.no_grad():
                outputs = model(inputs)
            outputs, references = accelerator.gather_for_metrics((outputs, targets))
            fold_predictions.append(outputs)
            fold_references.append(references)
        test_predictions.append(torch.cat(fold_predictions))
        test_references = torch.cat(fold_references)
        model, optimizer = accelerator.free_memory(model, optimizer)
    mean = torch.stack(test_predictions).mean(dim=0)
    accelerator.print(f"test seen: {len(mean)}")
    accelerator.print(f"test loss: {torch.nn.functional.cross_entropy(mean, test_references).item():.6f}")
    accelerator.print(f"test accuracy: {(mean.argmax(dim=1) == test_references).double().mean().item():.6f}")


if __name__ == "__main__":
    main()
