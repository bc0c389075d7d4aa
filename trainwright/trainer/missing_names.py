"""Missing names: attributes of Lightning's Trainer that this one does not have, and what to use instead."""

from __future__ import annotations

MISSING = {
    "validate_loop": "trainer.limit_val_batches can be set between two runs",
    "test_loop": "trainer.limit_test_batches can be set between two runs",
    "predict_loop": "trainer.limit_predict_batches can be set between two runs",
    "tuner": "pass a LearningRateFinder or a BatchSizeFinder in callbacks=",
    "tune": "pass a LearningRateFinder or a BatchSizeFinder in callbacks=",
    "scaler": "trainer.precision_plugin has the loss scaler in '16-mixed'",
    "root_gpu": "trainer.strategy.root_device is this process's device",
    "num_gpus": "use trainer.num_devices",
    "gpus": "use trainer.num_devices",
    "use_amp": "use trainer.precision",
    "training_type_plugin": "use trainer.strategy",
    "call_hook": "call the method of the module or the callback itself",
    "val_check_batch": "trainer.val_check_interval is the setting",
    "distributed_sampler_kwargs": "any sampler's order is divided over the processes, unless use_distributed_sampler=False",
    "reset_train_dataloader": "the loaders are made when fit needs them",
    "reset_val_dataloader": "the loaders are made when fit needs them",
}


def missing(name: str) -> AttributeError:
    """Return the error for an attribute that the Trainer does not have."""
    if name not in MISSING:
        return AttributeError(f"'Trainer' object has no attribute {name!r}", name=name)
    return AttributeError(f"trainer.{name} does not exist here: {MISSING[name]}. See docs/migrating.md.", name=name)
