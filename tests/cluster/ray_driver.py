"""Runs a job of Ray Train on two nodes of this machine, and removes one of them.

Ray sends the functions of a program to its workers, so this is one. test_ray.py starts it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import ray.train
from deadlines import wait_until
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train as tests/cluster/test_ray.py does without Ray, until a worker and a node are lost."""
    from small import Classifier, make_loader

    import trainwright as tw

    folder = Path(config["folder"])
    snapshot = folder / "storage/run/checkpoint_manager_snapshot.json"  # Ray's record of reported checkpoints
    train_context = ray.train.get_context()

    class Lost(Classifier):
        """It records its samples and loses rank 1 at step 3, and at step 5 the second node."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            trainer = self.trainer
            samples = sorted(batch[0][:, 0].tolist())
            place = {"size": trainer.world_size, "epoch": trainer.current_epoch, "step": trainer.global_step}
            with (folder / f"samples-{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps({**place, "rank": trainer.global_rank, "samples": samples}) + "\n")
            if trainer.world_size == 4 and trainer.global_step == 3 and not (folder / "killed").exists():
                wait_until(lambda: "step=2.ckpt" in snapshot.read_text(), 60)
                if trainer.global_rank == 1:
                    (folder / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            if trainer.world_size == 4 and trainer.global_step == 5:
                wait_until(lambda: "step=4.ckpt" in snapshot.read_text(), 60)
                (folder / "node").touch()
                time.sleep(1000)
            return super().training_step(batch, batch_idx)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = tw.Trainer(
            max_epochs=2,
            enable_model_summary=False,
            callbacks=[tw.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)],
        )
        job = trainer.engine.environment
        reported = ray.train.get_checkpoint()
        start = {
            "ours": [job.rank, job.world_size, job.local_rank, job.local_world_size, job.node_rank],
            "rays": [
                train_context.get_world_rank(), train_context.get_world_size(), train_context.get_local_rank(),
                train_context.get_local_world_size(), train_context.get_node_rank(),
            ],
            "launched_by": job.launched_by,
            "devices": [str(trainer.engine.device), str(ray.train.torch.get_device())],
            "reported": "" if reported is None else reported.path,
        }  # fmt: skip
        (folder / f"start-{os.getpid()}.json").write_text(json.dumps(start))
        module = Lost(dropout=0.2)
        trainer.fit(module, make_loader(88, shuffle=True), make_loader(), ckpt_path="auto")
    assert trainer.checkpoint_callback is not None
    others = train_others(trainer.default_root_dir, config["folder"])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    return {"weights": weights, "metrics": metrics, "newest": trainer.checkpoint_callback.last_model_path, **others}


def train_others(storage: str, elsewhere: str) -> dict[str, Any]:
    """Train under every strategy, and with saves in the background, within an epoch and outside of Ray's storage."""
    from small import Classifier, make_loader

    import trainwright as tw

    background = tw.ModelCheckpoint(f"{storage}/background", save_top_k=-1, async_save=True)
    stopped = tw.ModelCheckpoint(f"{storage}/stopped", save_last=True)
    outside = tw.ModelCheckpoint(f"{elsewhere}/outside")
    for checkpoint, limit in ((background, {}), (stopped, {"max_steps": 2}), (outside, {})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = tw.Trainer(max_epochs=2, logger=False, callbacks=[checkpoint, tw.RayReport()], **limit)
            trainer.fit(Classifier(), make_loader())
    losses = {}
    for strategy in ("ddp", "ddp_sharded", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3"):
        trainer = tw.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, strategy=strategy)
        trainer.fit(Classifier(), make_loader(), make_loader())
        losses[strategy] = float(trainer.callback_metrics["val_loss"])
    return {
        "losses": losses,
        "background": [str(path) for path in Path(storage, "background").iterdir()],
        "stopped": [stopped.last_model_path],
        "warnings": [str(warning.message) for warning in caught if "Ray" in str(warning.message)],
    }


def main(folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        # Ray counts nodes by their address.
        second = cluster.add_node(**NODE, node_ip_address="127.0.0.2")
        ray.init(address=cluster.address)

        def remove() -> None:
            wait_until((folder / "node").exists, 240)
            cluster.remove_node(second)

        threading.Thread(target=remove, daemon=True).start()
        job = TorchTrainer(
            train,
            train_loop_config={"folder": str(folder)},
            scaling_config=ScalingConfig(num_workers=(1, 4)),
            run_config=RunConfig(
                name="run", storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=4)
            ),
        )
        result = job.fit()
        assert result.checkpoint is not None
        said = {"metrics": result.metrics, "checkpoint": result.checkpoint.path, "returned": result.return_value}
        said["reported"] = {checkpoint.path: metrics for checkpoint, metrics in result.best_checkpoints}
        (folder / "result.json").write_text(json.dumps(said))
        ray.shutdown()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
