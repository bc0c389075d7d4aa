"""Each optimizer and scheduler of torch (and schedulefree, where it is installed) through save and resume under a strategy.

    python benchmarks/fuzz/state.py     the three phases; STRATEGIES=fsdp PRECISIONS=32-true ONLY=Adam,SGD leave out the rest

"alone" (one process): each case trains two epochs, and one. "ranks" (two ranks): under each strategy the same; what is
resumed from the first epoch has to be the whole bit for bit, and the whole that of one process within a tolerance; one
process's first epoch, resumed here, has to end alike. "back" (one process): the strategy's first epoch, resumed here, too.
A rank that raises alone lets the others wait: run it under a limit of time.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

FOLDER = Path(os.environ.get("FUZZ_FOLDER", f"{tempfile.gettempdir()}/fuzz-state"))
STRATEGIES = os.environ.get("STRATEGIES", "deepspeed_stage_1,deepspeed_stage_2,deepspeed_stage_3").split(",")
PRECISIONS = os.environ.get("PRECISIONS", "32-true,bf16-mixed").split(",")
ONLY = [x for x in os.environ.get("ONLY", "").split(",") if x]


def main_phase(phase):
    sys.path.insert(0, os.environ["TESTS"])
    sys.path.insert(0, os.environ["TESTS"] + "/strategies")

    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import trainwright as tw
    from trainwright.checkpoint.exchange import read_weights

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    O, S = torch.optim, torch.optim.lr_scheduler  # noqa: E741
    QUIET = {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }

    OPT = {
        "SGD": lambda p: O.SGD(p, 0.05),
        "SGDm": lambda p: O.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
        "SGDdamp": lambda p: O.SGD(p, 0.05, momentum=0.9, dampening=0.5),
        "Adam": lambda p: O.Adam(p, 0.02, eps=1e-3),
        "Adamams": lambda p: O.Adam(p, 0.02, eps=1e-3, amsgrad=True),
        "AdamW": lambda p: O.AdamW(p, 0.02, eps=1e-3, weight_decay=0.3),
        "AdamWfe": lambda p: O.AdamW(p, 0.02, eps=1e-3, foreach=True),
        "AdamWcap": lambda p: O.AdamW(p, 0.02, eps=1e-3, fused=False, foreach=False),
        "Adamtensorlr": lambda p: O.Adam(p, torch.tensor(0.02), eps=1e-3),
        "NAdam": lambda p: O.NAdam(p, 0.02, eps=1e-3),
        "RAdam": lambda p: O.RAdam(p, 0.02, eps=1e-3),
        "Adamax": lambda p: O.Adamax(p, 0.02, eps=1e-3),
        "ASGD": lambda p: O.ASGD(p, 0.05, t0=3),
        "Rprop": lambda p: O.Rprop(p, 0.01),
        "RMSprop": lambda p: O.RMSprop(p, 0.01, eps=1e-3, momentum=0.5, centered=True),
        "Adadelta": lambda p: O.Adadelta(p, 0.5, eps=1e-3),
        "Adagrad": lambda p: O.Adagrad(p, 0.05, lr_decay=0.01, initial_accumulator_value=0.1, eps=1e-3),
        "Adagradnf": lambda p: O.Adagrad(p, 0.05, fused=False, weight_decay=0.1, eps=1e-3),
        "Plain": lambda p: PlainState(p, 0.05),
        "Adafactor": lambda p: O.Adafactor(p, 0.05),
        "Muon": lambda p: O.Muon(p, 0.05),
        "LBFGS": lambda p: O.LBFGS(p),
        "SparseAdam": lambda p: O.SparseAdam(p, 0.05),
    }
    if importlib.util.find_spec("schedulefree"):
        import schedulefree

        OPT |= {
            "FreeAdamW": lambda p: schedulefree.AdamWScheduleFree(p, 0.02, eps=1e-3, warmup_steps=3, weight_decay=0.1),
            "FreeSGD": lambda p: schedulefree.SGDScheduleFree(p, 0.05, warmup_steps=3),
            "FreeRAdam": lambda p: schedulefree.RAdamScheduleFree(p, 0.02, eps=1e-3),
        }
    SCHED = {
        "Lambda": lambda o: S.LambdaLR(o, lambda n: 0.9**n),
        "Mult": lambda o: S.MultiplicativeLR(o, lambda n: 0.95),
        "Step": lambda o: S.StepLR(o, 3, 0.5),
        "Multi": lambda o: S.MultiStepLR(o, [2, 7], 0.5),
        "Const": lambda o: S.ConstantLR(o, 0.5, 5),
        "Linear": lambda o: S.LinearLR(o, 0.2, 1.0, 6),
        "Exp": lambda o: S.ExponentialLR(o, 0.9),
        "Cos": lambda o: S.CosineAnnealingLR(o, 8),
        "Poly": lambda o: S.PolynomialLR(o, 12, 2.0),
        "Warm": lambda o: S.CosineAnnealingWarmRestarts(o, 3, 2),
        "One": lambda o: S.OneCycleLR(o, 0.1, 12),
        "Cyc": lambda o: S.CyclicLR(o, 0.01, 0.1, 3),
        "Seq": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.2, 1.0, 4), S.ExponentialLR(o, 0.9)], [4]),
        "Chain": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 4), S.ExponentialLR(o, 0.9)]),
        "Plateau": lambda o: S.ReduceLROnPlateau(o, patience=0, factor=0.5),
        "Swa": lambda o: __import__("torch.optim.swa_utils", fromlist=["SWALR"]).SWALR(o, 0.01, 3),
        "Inverse": lambda o: S.LambdaLR(o, [lambda n: 1 / (n + 1), lambda n: 1.0, lambda n: 0.5]),
    }

    class PlainState(O.Optimizer):
        """State in plain numbers, a shared count, and a group's own count."""

        def __init__(self, p, lr):
            super().__init__(p, {"lr": lr, "k": 0})

        @torch.no_grad()
        def step(self, closure=None):
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is None:
                        continue
                    s = self.state[p]
                    s["n"] = s.get("n", 0) + 1
                    s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    p.sub_(s["m"] * g["lr"] / (s["n"] ** 0.5 + 0.1 * g["k"]))
                g["k"] += 1

    class Net(tw.Module):
        def __init__(self, make, sched=None):
            super().__init__()
            torch.manual_seed(5)
            self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
            self.head = nn.Linear(3, 1)
            self.gain = nn.Parameter(torch.tensor(1.3))
            self.unused = nn.Parameter(torch.ones(3, 2))
            self.cold = nn.Linear(4, 4).requires_grad_(False)
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
            self.make, self.sched = make, sched

        def forward(self, x):
            return self.head(self.body(x).tanh()) * self.gain + self.frozen.sum() * 0.01

        def training_step(self, b, i):
            loss = F.mse_loss(self(b[0]), b[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            rest = [p for n, p in self.named_parameters() if not n.startswith(("cold", "body"))]
            groups = [
                {"params": list(self.cold.parameters())},
                {"params": list(self.body.parameters())},
                {"params": rest},
            ]
            try:
                o = self.make(groups)
            except ValueError:
                o = self.make([p for p in self.parameters() if p.dim() == 2])
            if hasattr(o, "train") and callable(o.train):
                o.train()
            if self.sched is None:
                return o
            s = self.sched(o)
            return {
                "optimizer": o,
                "lr_scheduler": {
                    "scheduler": s,
                    "interval": "step" if not isinstance(s, S.ReduceLROnPlateau) else "epoch",
                    "monitor": "loss",
                },
            }

    class SFree(Net):
        def on_train_start(self):
            self.trainer.optimizers[0].train()

    g = torch.Generator().manual_seed(6)
    x = torch.randn(24, 5, generator=g)
    data = TensorDataset(x, x[:, :1] - x[:, 1:2].square())

    def run(strategy, precision, make, sched, path, epochs=2, resume=None, ranks=1):
        t = tw.Trainer(
            strategy=strategy,
            precision=precision,
            max_epochs=epochs,
            devices=1 if phase != "ranks" else "auto",
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            **QUIET,
        )
        m = (SFree if "Free" in path.name else Net)(make, sched)
        m.train()
        t.fit(m, DataLoader(data, batch_size=2 * ranks, shuffle=True), ckpt_path=resume and str(resume))
        lr = [float(x_["lr"]) for x_ in t.optimizers[0].param_groups]
        t.save_checkpoint(str(path), overwrite=True)
        return lr

    def weights(path):
        return read_weights(str(path)).state_dict

    def state(path):

        return None

    def far(a, b):
        a, b = weights(a), weights(b)
        return max(float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel())

    cases = (
        {n: (m, None) for n, m in OPT.items()}
        | {"s" + n: (OPT["AdamW"], s) for n, s in SCHED.items()}
        | {"sgd" + n: (OPT["SGDm"], SCHED[n]) for n in ("Lambda", "One", "Cyc", "Plateau")}
    )
    if ONLY:
        cases = {n: c for n, c in cases.items() if n in ONLY}
    rank = int(os.environ.get("RANK", 0))
    bad = 0

    def tell(*a):
        if rank == 0:
            print(*a, flush=True)

    for precision in PRECISIONS:
        for n, (make, sched) in cases.items():
            base = FOLDER / f"one-{precision}-{n}"
            try:
                if phase == "alone":
                    run("single_device", precision, make, sched, base.with_suffix(".whole"), ranks=2)
                    run("single_device", precision, make, sched, base.with_suffix(".half"), 1, ranks=2)
                    run(
                        "single_device",
                        precision,
                        make,
                        sched,
                        base.with_suffix(".resumed"),
                        ranks=2,
                        resume=base.with_suffix(".half"),
                    )
                    if d := far(base.with_suffix(".whole"), base.with_suffix(".resumed")):
                        tell("BAD alone", n, precision, d)
                        bad += 1
                    continue
            except Exception as e:
                tell("REFUSED alone", n, precision, type(e).__name__, str(e)[:160].replace("\n", " "))
                continue
            for st in STRATEGIES:
                here = FOLDER / f"{st}-{precision}-{n}"
                tol = 2e-5 if precision == "32-true" else 0.02
                try:
                    if phase == "ranks":
                        a = run(st, precision, make, sched, here.with_suffix(".whole"))
                        run(st, precision, make, sched, here.with_suffix(".half"), 1)
                        b = run(
                            st, precision, make, sched, here.with_suffix(".resumed"), resume=here.with_suffix(".half")
                        )
                        if rank == 0:
                            if (d := far(here.with_suffix(".whole"), here.with_suffix(".resumed"))) or a != b:
                                tell("BAD resume", n, st, precision, d, a, b)
                                bad += 1
                            if (
                                base.with_suffix(".whole").exists()
                                and (d := far(here.with_suffix(".whole"), base.with_suffix(".whole"))) > tol
                            ):
                                tell("BAD unlike one process", n, st, precision, d)
                                bad += 1
                        import torch.distributed as dist

                        dist.barrier()
                        if base.with_suffix(".half").exists():
                            run(
                                st, precision, make, sched, here.with_suffix(".from1"), resume=base.with_suffix(".half")
                            )
                            if rank == 0 and (d := far(here.with_suffix(".from1"), base.with_suffix(".whole"))) > tol:
                                tell("BAD from one process", n, st, precision, d)
                                bad += 1
                            dist.barrier()
                    elif here.with_suffix(".half").exists():
                        run(
                            "single_device",
                            precision,
                            make,
                            sched,
                            here.with_suffix(".back"),
                            ranks=2,
                            resume=here.with_suffix(".half"),
                        )
                        if (d := far(here.with_suffix(".back"), base.with_suffix(".whole"))) > tol:
                            tell("BAD back", n, st, precision, d)
                            bad += 1
                except Exception as e:
                    by_name = isinstance(e, ValueError) and "strategy='ddp'" in str(
                        e
                    )  # a refusal that says what to use
                    known = by_name or not base.with_suffix(".whole").exists()
                    tell(
                        "refused" if known else "RAISED",
                        phase,
                        n,
                        st,
                        precision,
                        type(e).__name__,
                        str(e)[:250].replace("\n", " "),
                    )
                    if os.environ.get("TRACE"):
                        traceback.print_exc()
                    bad += not known
    tell(phase, "done, bad:", bad)
    sys.exit(bool(bad))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main_phase(sys.argv[1])
    else:
        import shutil

        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TESTS": str(Path(__file__).parents[2] / "tests")}
        py = sys.executable
        failed = 0
        for phase in ("alone", "ranks", "back"):
            command = [py, "-W", "ignore", __file__, phase]
            if phase == "ranks":
                command = [
                    py,
                    "-m",
                    "trainwright.launch.processes",
                    "--num-processes",
                    os.environ.get("RANKS", "2"),
                    "--",
                    *command,
                ]
            failed |= subprocess.run(command, env=env, check=False).returncode
        sys.exit(bool(failed))
