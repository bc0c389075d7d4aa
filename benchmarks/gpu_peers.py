"""The loops of other frameworks in benchmarks/gpu.py; each trains until the pacer ends the process."""

from __future__ import annotations

from typing import Any

import torch
from gpu_loops import accelerator_name, make_net, make_step
from gpu_pacer import Pacer
from gpu_work import Batch, Work
from torch import Tensor


def make_lightning(work: Work, pacer: Pacer) -> tuple[Any, Any]:
    """Return Lightning's bare trainer, and the work as its module, which logs its loss in each step."""
    import lightning.pytorch as pl

    module = make_net(pl.LightningModule, work, pacer)
    if work.compile_options:
        module.net.compile(**work.compile_options)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator=accelerator_name(work.device),
        devices=1,
        precision=work.precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=work.folder,
    )
    return trainer, module


def lightning(work: Work, pacer: Pacer) -> None:
    trainer, module = make_lightning(work, pacer)
    trainer.fit(module, work.loader())


def make_accelerate(work: Work) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    settings: dict[str, Any] = {}
    if work.compile_options:
        settings["dynamo_plugin"] = TorchDynamoPlugin(**work.compile_options)
    accelerator = Accelerator(cpu=work.device.type == "cpu", mixed_precision=work.mixed_precision, **settings)
    _check_device("Accelerate", accelerator.device, work.device)
    return accelerator


def accelerate(work: Work, pacer: Pacer) -> None:
    accelerator = make_accelerate(work)
    plain = work.model().to(work.device)
    model, optimizer, loader = accelerator.prepare(plain, work.optimizer(plain.parameters()), work.loader())
    for batch in loader:
        pacer.step()
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            loss = work.loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
        pacer.saw(loss)


def hf_trainer(work: Work, pacer: Pacer) -> None:
    """Transformers' Trainer with the same loss, loader and optimizer as the others; nothing is logged."""
    from transformers import Trainer, TrainingArguments

    class Paced(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(work.loader())

        def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> Tensor:
            pacer.step()
            loss = work.loss_of(model, inputs)
            pacer.saw(loss)
            return loss

    settings = TrainingArguments(
        output_dir=work.folder,
        per_device_train_batch_size=1 if work.case.model == "mlp" else work.case.batch,
        max_grad_norm=0.0,
        num_train_epochs=1,
        use_cpu=work.device.type == "cpu",
        fp16=work.amp_dtype is torch.float16,
        bf16=work.amp_dtype is torch.bfloat16,
        torch_compile=bool(work.compile_options),
        torch_compile_backend=work.compile_options.get("backend"),
        torch_compile_mode=work.compile_options.get("mode"),
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    _check_device("the Transformers Trainer", settings.device, work.device)
    model = work.model().to(work.device)
    optimizer = work.optimizer(model.parameters())
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loader = work.loader()
    Paced(model=model, args=settings, train_dataset=loader.dataset, optimizers=(optimizer, constant)).train()


def ignite(work: Work, pacer: Pacer) -> None:
    from ignite.engine import Engine

    step = make_step(work, pacer)
    Engine(lambda _, batch: step(batch)).run(work.loader(), max_epochs=1)


def _check_device(name: str, found: torch.device, wanted: torch.device) -> None:
    if found.type != wanted.type:
        raise RuntimeError(f"{name} computes on {found.type} here, not on {wanted.type}")
