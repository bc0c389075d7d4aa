"""Passing: a pass over the training data that trains nothing, for what is computed of the final weights."""

from __future__ import annotations

from itertools import islice

import torch

from trainwright.data.seeding import isolate_rng
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.stage import limited
from trainwright.trainer.training_run import TrainingRun
from trainwright.trainer.uneven_round import discarded


def pass_over(run: TrainingRun) -> bool:
    """Run training_step on each batch of an epoch, in training mode, without gradients, hooks or logging. Collective.

    The ranks together have the batches of one process. The run's random numbers, its position in the data and its metrics
    stay as they are. It returns False, with a warning, if the loop cannot give the batches again.
    """
    engine, module = run.engine, run.module
    collector = run.logbook.collector or run.logbook.start(module)
    with isolate_rng(), torch.no_grad(), discarded(module, collector):
        loader = run.data.again()
        # Where loaders end at different batches, a rank would wait in the forward for one that has ended.
        if run.plan.arguments.pulls or not loader.ends_together:
            rank_zero_warn(
                "no pass over the training data is made at the end, because training_step takes its batches from "
                "dataloader_iter, or loaders of unknown length are each rank's own: batch-norm statistics stay as training has "
                "left them."
            )
            return False
        try:
            for index, batch in enumerate(islice(loader, limited(loader.length, run.settings.limit_train_batches))):
                is_dummy = loader.real_length is not None and index >= loader.real_length
                # A dummy batch runs for the other ranks' collectives, and must not count in batch-norm statistics.
                buffers = [(each, each.clone()) for each in module.buffers()] if is_dummy else []
                collector.begin_batch(batch, index=index)
                if run.plan.transfer is not None:
                    batch = run.plan.transfer(batch)
                engine.run(module, "training_step", *run.plan.arguments.of(batch, index, 0))
                for buffer, kept in buffers:
                    buffer.copy_(kept)
            collector.end_batches()
        finally:
            loader.close()
    return True
