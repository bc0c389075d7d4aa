"""The cases in which Trainwright differs from Lightning on purpose, with the reason.

A difference stays only if it makes a result exact, a run safe or a loss visible.
"""

EXACT, SAFE, VISIBLE = "a result exact", "a run safe", "a loss visible"

DIFFERENCES: dict[str, tuple[str, str]] = {
    "checkpoints.checkpoint_before_the_first_step": (SAFE,
        "an epoch that has made no counted step is saved too, so the run can be resumed after it"),
    "checkpoints.files_beside_last": (SAFE,
        "last.ckpt is a link to the newest checkpoint, so no complete checkpoint is ever overwritten in place"),
    "checkpoints.path_of_last": (SAFE,
        "the same: last_model_path is the newest checkpoint itself, which stays what it is"),
    "checkpoints.resume_after_max_steps_within_an_epoch": (EXACT,
        "a longer run that resumes there trains the rest of the epoch, as if it had never stopped"),
    "checkpoints.resume_within_an_epoch": (EXACT, "the data continues at the batch where the checkpoint was saved"),
    "data.empty_loader": (VISIBLE, "a loader without a batch is an error, as nothing would be trained"),
    "data.order_of_a_shuffle": (EXACT,
        "the order of the data is a function of the seed and the epoch, so that a resumed run sees the same"),
    "hooks.optimizer_step_encloses_the_rest": (SAFE,
        "the gradients are there when optimizer_step is called, so one that leaves the closure uncalled still trains"),
    "hooks.teardown_after_an_exception": (SAFE, "what setup has opened is closed after a failure too"),
    "hooks.training_step_may_return_none": (EXACT, "global_step counts the steps that were made, not skipped batches"),
    "logging.logger_true": (
        EXACT,
        "the default logger is the CSVLogger, so what a run writes depends on no other package; its folder has another name",
    ),
    "optimizers.lr_in_on_train_epoch_end": (EXACT,
        "on_train_batch_end sees the learning rate that the epoch's last batch was trained with"),
    "optimizers.schedule_with_a_frequency_that_does_not_divide_the_epoch": (EXACT,
        "a step-wise frequency counts the run's optimizer steps, whatever the epoch's length and the accumulation"),
    "optimizers.wrapped_and_plain_optimizers": (
        SAFE,
        "self.optimizers() returns no subclass of the optimizer's class, so its methods and attributes are the optimizer's own",
    ),
    "trainer.fit_twice": (EXACT, "each fit trains all of its epochs, with fresh optimizers from their first step on"),
    "trainer.inference_mode": (SAFE, "tensors that were made in an evaluation can be used in training afterwards"),
    "trainer.interrupt_by_a_user": (VISIBLE,
        "a KeyboardInterrupt that a hook raises leaves fit as what it is, with its traceback"),
    "trainer.short_last_window": (EXACT, "an epoch's last, shorter accumulation window is divided by its own length"),
    "trainer.should_stop_within_an_epoch_validates": (
        EXACT,
        "a stop within an epoch leaves the run as its latest batch did, so a resumed run goes on as if it had not stopped",
    ),
}  # fmt: skip
