"""Data: loaders, DataModules, combinations and seeds."""

from __future__ import annotations

import random
from typing import Any

import torch
from projects import data, loader, part, refusal, regression, trainer
from torch.utils.data import DataLoader, TensorDataset


def _seen(L: Any, folder: Any, loaders: Any, show: Any, **options: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(show(batch))
            return self.layer.weight.sum()

    run = trainer(L, folder, **options)
    run.fit(Module(), loaders)
    return [seen, run.num_training_batches]


def _sizes(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _sizes(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not isinstance(batch[0], torch.Tensor):
        return [_sizes(each) for each in batch]
    return None if batch is None else len(batch[0])


def case_loaders_in_a_dict_for_training(L: Any, folder: Any) -> Any:
    return _seen(L, folder, {"a": loader(8), "b": loader(12)}, _sizes)


def case_loaders_in_a_list_for_training(L: Any, folder: Any) -> Any:
    return _seen(L, folder, [loader(8), loader(12, 2)], _sizes)


def case_combined_loader_modes(L: Any, folder: Any) -> Any:
    kind = part(L, "utilities.combined_loader").CombinedLoader
    return {
        mode: _seen(L, folder, kind({"a": loader(8), "b": loader(12)}, mode), _sizes)
        for mode in ("min_size", "max_size_cycle", "max_size")
    }


def case_combined_loader_alone(L: Any, folder: Any) -> Any:
    kind = part(L, "utilities.combined_loader").CombinedLoader
    found = {}
    for mode in ("min_size", "max_size_cycle", "max_size", "sequential"):
        combined = kind({"a": range(3), "b": range(10, 15)}, mode)
        items = list(combined)
        found[mode] = [[list(map(str, each)) for each in items], len(combined)]
    return [found, refusal(lambda: kind([], "other"))]


def case_plain_lists_as_data(L: Any, folder: Any) -> Any:
    batches = [[torch.ones(2, 2), torch.ones(2, 1)], [torch.zeros(3, 2), torch.zeros(3, 1)]]

    class Batches:
        def __iter__(self) -> Any:
            return iter(batches)

        def __len__(self) -> int:
            return len(batches)

    return _seen(L, folder, Batches(), _sizes, max_epochs=2)


def case_batches_as_dicts(L: Any, folder: Any) -> Any:
    samples = [{"x": torch.ones(2) * i, "name": f"n{i}", "y": i} for i in range(4)]
    return _seen(L, folder, DataLoader(samples, batch_size=2), lambda batch: [sorted(batch), batch["name"], batch["y"]])


def case_order_without_shuffling(L: Any, folder: Any) -> Any:
    return _seen(L, folder, loader(12), lambda batch: batch[0][0, 0], max_epochs=2)


def case_shuffling_covers_every_sample(L: Any, folder: Any) -> Any:
    indices = TensorDataset(torch.arange(10))
    seen, _ = _seen(L, folder, DataLoader(indices, 5, shuffle=True), lambda batch: batch[0].tolist(), max_epochs=2)
    return [sorted(seen[0] + seen[1]), sorted(seen[2] + seen[3]), seen[:2] != seen[2:]]


def case_order_of_a_shuffle(L: Any, folder: Any) -> Any:
    L.seed_everything(3)
    indices = TensorDataset(torch.arange(8))
    return _seen(L, folder, DataLoader(indices, 4, shuffle=True), lambda batch: batch[0].tolist())[0]


def case_own_sampler(L: Any, folder: Any) -> Any:
    class Reversed(torch.utils.data.Sampler):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(range(7, -1, -1))

        def __len__(self) -> int:
            return 8

    indices = TensorDataset(torch.arange(8))
    return _seen(L, folder, DataLoader(indices, 4, sampler=Reversed()), lambda batch: batch[0].tolist())


def case_own_batch_sampler(L: Any, folder: Any) -> Any:
    indices = TensorDataset(torch.arange(8))
    return _seen(
        L, folder, DataLoader(indices, batch_sampler=[[0, 1], [2], [3, 4, 5]]), lambda batch: batch[0].tolist()
    )


def case_set_epoch_of_a_sampler(L: Any, folder: Any) -> Any:
    seen: list[int] = []

    class Mine(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            seen.append(epoch)

    dataset = data(8)
    trainer(L, folder, max_epochs=3).fit(regression(L)(), DataLoader(dataset, 4, sampler=Mine(dataset)))
    return seen


def case_drop_last_and_collate(L: Any, folder: Any) -> Any:
    numbers = list(range(10))
    batches = DataLoader(numbers, 4, drop_last=True, collate_fn=lambda items: {"sum": torch.tensor(sum(items))})
    return _seen(L, folder, batches, lambda batch: batch["sum"])


def case_own_batch_class(L: Any, folder: Any) -> Any:
    class Batch:
        def __init__(self, x: Any) -> None:
            self.x, self.moved = x, ""

        def to(self, device: Any, *args: Any, **kwargs: Any) -> Any:
            self.moved = str(device)
            return self

    batches = DataLoader(list(range(4)), 2, collate_fn=lambda items: Batch(items))
    return _seen(L, folder, batches, lambda batch: [type(batch).__name__, batch.x])


def case_datamodule_hyperparameters(L: Any, folder: Any) -> Any:
    class Data(L.LightningDataModule):
        def __init__(self, size: int = 8, batch: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(self.hparams.size, self.hparams.batch)

    datamodule = Data(batch=2)
    run = trainer(L, folder)
    run.fit(regression(L)(), datamodule)
    return [dict(datamodule.hparams), run.num_training_batches, datamodule.trainer is run]


def case_datamodule_from_datasets(L: Any, folder: Any) -> Any:
    datamodule = L.LightningDataModule.from_datasets(data(8), [data(4), data(6)], test_dataset=data(4), batch_size=2)
    run, module = trainer(L, folder), regression(L)()

    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    module = Module()
    run.fit(module, datamodule=datamodule)
    run.test(module, datamodule=datamodule, verbose=False)
    return [run.num_training_batches, run.num_val_batches, run.num_test_batches]


def case_datamodule_reaches_the_trainer(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Data(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            seen.append([self.trainer.world_size, self.trainer.max_epochs, stage == "fit"])

        def train_dataloader(self) -> Any:
            return loader(8 * (self.trainer.current_epoch + 1))

    run = trainer(L, folder, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    run.fit(regression(L)(), datamodule=Data())
    return [seen, run.global_step]


def case_seed_everything(L: Any, folder: Any) -> Any:
    import numpy as np

    found = [L.seed_everything(11)]
    found += [random.random(), float(np.random.rand()), torch.rand(1)]
    return [*found, L.seed_everything(5, workers=True), refusal(lambda: L.seed_everything(-1))]


def case_isolate_rng(L: Any, folder: Any) -> Any:
    isolate = part(L, "utilities.seed").isolate_rng
    L.seed_everything(1)
    with isolate():
        first = [torch.rand(1).item(), random.random()]
    return first == [torch.rand(1).item(), random.random()]


def case_seeded_runs_are_equal(L: Any, folder: Any) -> Any:
    found = []
    for _ in range(2):
        L.seed_everything(4, workers=True)
        module = regression(L)()
        trainer(L, folder, max_epochs=2).fit(module, loader(12, shuffle=True))
        found.append(module.layer.weight.tolist())
    return found[0] == found[1]


def case_empty_loader(L: Any, folder: Any) -> Any:
    return refusal(lambda: trainer(L, folder).fit(regression(L)(), DataLoader(TensorDataset(torch.zeros(0, 2)))))


def case_loaders_as_arguments_replace_those_of_the_module(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return loader(40)

    run = trainer(L, folder)
    run.fit(Module(), train_dataloaders=loader(8))
    return run.num_training_batches


def case_an_empty_list_of_validation_loaders(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return loader(8)

        def val_dataloader(self) -> Any:
            return []

    run = trainer(L, folder)
    run.fit(Module())
    return [run.global_step, run.num_val_batches]


def case_small_fraction_of_a_loader(L: Any, folder: Any) -> Any:
    return [
        refusal(lambda: trainer(L, folder, limit_val_batches=0.01).fit(regression(L)(), loader(8), loader(8))),
        refusal(lambda: trainer(L, folder, limit_train_batches=0.01).fit(regression(L)(), loader(8))),
    ]


def case_workers(L: Any, folder: Any) -> Any:
    indices = TensorDataset(torch.arange(6))
    return _seen(L, folder, DataLoader(indices, 2, num_workers=1), lambda batch: batch[0].tolist())


def case_use_distributed_sampler_on_one_process(L: Any, folder: Any) -> Any:
    seen = []
    run = trainer(L, folder, use_distributed_sampler=False)
    run.fit(regression(L)(), loader(8))
    seen.append(type(run.train_dataloader).__name__)
    return seen
