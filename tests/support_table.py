"""The tables of docs/support.md, made from the tables of the tests: `python tests/support_table.py` writes them into the page.

A mark says that a test trains or rejects a feature. A test without a table of strategies has none here.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGE = ROOT / "docs/support.md"
ABOUT_TEXTS = "The tests compare these parts of the messages. `...` replaces words that vary."
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
STRATEGIES = ("ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
ALONE = "single_device"


class Row(NamedTuple):
    """A feature, the test that shows it, and the strategies that it trains or rejects."""

    feature: str
    test: Callable[..., Any]
    trained: Iterable[str]
    rejected: Mapping[str, str] = {}
    """The texts of errors by strategy, as the test matches them."""
    on_gpu: Collection[str] = ()


def load(path: str) -> Any:
    """Return a file of tests as a module."""
    for folder in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]:
        if str(ROOT / folder) not in sys.path:
            sys.path.append(str(ROOT / folder))
    spec = importlib.util.spec_from_file_location(f"of_the_support_table.{Path(path).stem}", TESTS / path)
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as dataclasses need it
    spec.loader.exec_module(module)
    return module


def values(test: Any, name: str) -> list[Any]:
    """Return the values of an argument of a parametrized test."""
    for mark in test.pytestmark:
        names = re.findall(r"\w+", str(mark.args[0])) if mark.name == "parametrize" else []
        if name in names:
            rows = [getattr(row, "values", row) for row in mark.args[1]]
            return [row[names.index(name)] if isinstance(row, tuple) else row for row in rows]
    raise LookupError(f"{test.__name__} is not parametrized by {name}")


def kinds(names: Iterable[str]) -> list[str]:
    """Return strategies without the options in their names, such as "ddp, small buckets"."""
    return [name.partition(",")[0] for name in names]


def same(text: str, strategies: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(strategies, text)


def of_key(table: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the errors of a table whose keys end with a strategy."""
    found = {key.removeprefix(prefix): text for key, text in table.items() if key.startswith(prefix)}
    return {strategy: text for strategy, text in found.items() if text != "nothing"}


def stages(numbers: Iterable[int]) -> list[str]:
    return [f"deepspeed_stage_{number}" for number in numbers]


class Recorded(NamedTuple):
    """The latest session of the tests on a GPU."""

    gpu: str
    versions: str
    date: str
    passed: str
    skipped: str


def recorded() -> Recorded | None:
    """Return the session that benchmarks/RESULTS.md describes."""
    found = re.search(
        r"^One (NVIDIA \w+) .*?(torch [\d.]+, Python [\d.]+).*?; (\w+ \d{4})\.$"
        r".*?^`make test-gpu` on this GPU: (\d+) tests passed, (\d+) skipped",
        (ROOT / "benchmarks/RESULTS.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return Recorded(*found.groups()) if found is not None else None


def compared_on_gpu(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the strategies, and the precisions in which the session compared them with one process."""
    device = load("device/test_strategies_on_device.py")
    for name in names if recorded() is not None else ():
        for precision in device.PRECISIONS:
            if not device.incomparable(name, precision):
                yield name, precision


def precisions() -> Iterator[Row]:
    """Yield a row for every precision, whose strategies include one process."""
    contract, layers = load("strategies/test_contract.py"), load("strategies/test_layers.py")
    float8, averaged = load("precision/test_float8.py"), load("strategies/test_averaged.py")
    zero, device = load("strategies/test_deepspeed.py"), load("device/test_precision_on_device.py")
    single, agree = load("precision/test_single_dtype.py"), load("trainer/test_ranks_agree.py")
    own_loop = single.test_a_loop_of_ones_own_trains_in_it
    on_gpu: dict[str, list[str]] = {}
    for strategy, precision in compared_on_gpu(load("device/test_strategies_on_device.py").STRATEGIES):
        on_gpu.setdefault(precision, []).append(strategy)
    if recorded() is not None:
        alone = values(device.test_a_run_equals_the_loop_by_hand, "precision")
        alone += values(device.test_weights_of_a_low_dtype_are_trained_as_by_hand, "precision")
        for precision in [*alone, *(["64-true"] if device.test_float64_is_trained_or_refused else [])]:
            on_gpu.setdefault(precision, []).append(ALONE)
    yield Row(
        "32-true", contract.test_two_ranks_match_one_process_under_every_strategy,
        [ALONE, *contract.PARALLEL], on_gpu=on_gpu["32-true"],
    )  # fmt: skip
    for precision in layers.PRECISIONS:
        yield Row(
            precision, layers.test_layers_of_every_kind_are_trained_as_on_one_process,
            [ALONE, *layers.STRATEGIES], on_gpu=on_gpu[precision],
        )  # fmt: skip
    yield Row(
        averaged.averaged.__globals__["LOW"], averaged.test_averages_match_one_process_under_every_strategy,
        [ALONE, *averaged.PARALLEL], on_gpu=on_gpu["bf16-true"],
    )  # fmt: skip
    yield Row("16-true", own_loop, [ALONE] if "16-true" in single.DTYPES else [], on_gpu=on_gpu["16-true"])
    assert agree.SETTINGS["precision"] == "64-true"  # on two ranks, where "auto" is ddp
    yield Row(
        "64-true", own_loop, [ALONE, "ddp"] if "64-true" in single.DTYPES else [],
        same(zero.NO_FLOAT64, stages(values(zero.test_float64_is_rejected, "stage"))), on_gpu["64-true"],
    )  # fmt: skip
    yield Row("fp8-mixed", float8.test_ranks_train_as_one_process_does, [ALONE, *float8.STRATEGIES])


def features() -> Iterator[Row]:
    """Yield a row for every feature that a table of the tests has by strategy."""
    contract, matrix = load("strategies/test_contract.py"), load("strategies/test_matrix.py")
    job = contract.contract_job
    two_ranks = contract.test_two_ranks_match_one_process_under_every_strategy
    on_gpu = {name for name, _ in compared_on_gpu(load("device/test_strategies_on_device.py").STRATEGIES)}
    for feature in ("accumulation, clipping by norm and by value", "validation, test and prediction"):
        yield Row(feature, two_ranks, contract.PARALLEL, on_gpu=on_gpu)
    several = [name for name in contract.PARALLEL if job.manual_kind(name) is job.Players]
    yield Row("manual optimization", two_ranks, contract.PARALLEL)
    rest = [name for name in contract.PARALLEL if name not in several]
    yield Row("several optimizers", two_ranks, several, same(job.ONE_OPTIMIZER, rest))
    more_ranks = contract.test_more_ranks_match_one_process
    yield Row("three or four processes", more_ranks, values(more_ranks, "strategy"))
    fails = contract.test_a_failing_rank_ends_the_job_under_every_strategy
    yield Row("a failing process ends the job", fails, values(fails, "strategy"))

    calls = [
        load("strategies/test_ddp.py").test_everyday_calls_match_one_process_under_ddp,
        load("strategies/test_ddp_sharded.py").test_everyday_calls_match_one_process_under_ddp_sharded,
        load("strategies/test_fsdp.py").test_everyday_calls_match_one_process_under_fsdp,
    ]
    zero = load("strategies/test_deepspeed.py")
    yield Row(
        "limits, uneven data, early stopping, the best checkpoint, plateau schedules", calls[0],
        [*(call.__name__.partition("_under_")[2] for call in calls), *stages(zero.EVERYDAY_STAGES)],
    )  # fmt: skip
    yield Row(
        "a checkpoint loads under every strategy, on 1, 2 and 4 processes",
        matrix.test_every_checkpoint_loads_under_every_strategy, matrix.cells.__globals__["MAKERS"],
    )  # fmt: skip
    yield Row(
        "a resumed run has the same bits", matrix.test_every_checkpoint_loads_under_every_strategy,
        matrix.cells.__globals__["MAKERS"], on_gpu=on_gpu,
    )  # fmt: skip
    saves = load("strategies/test_background_save.py")
    yield Row("saves in the background", saves.test_a_background_save_writes_the_same_files, [*saves.FAST, *saves.SLOW])
    loops = load("raw_loop/test_strategies.py").test_loops_and_trainers_load_checkpoints_of_the_other
    yield Row("a loop of your own continues a Trainer's run, and back", loops, values(loops, "strategy"))
    signals = load("launch/test_graceful_shutdown.py").test_signals_at_random_moments_lose_nothing
    yield Row("a stop by a signal, and a resume", signals, values(signals, "strategy"))

    kills = load("test_soak.py").test_runs_of_other_strategies_survive_a_kill
    yield Row("a killed run, resumed, ends with the same bits", kills, values(kills, "strategy"))

    folders = load("programs/test_library_folders.py")
    exports = folders.test_transformers_loads_the_weights_of_two_ranks
    yield Row("weights for transformers, and adapters for peft", exports, values(exports, "strategy"))
    bases = load("checkpoint/test_frozen_base.py")
    yield Row(
        "checkpoints of only the trained parameters", bases.test_an_adapter_resumes_exactly_under_every_strategy,
        bases.STRATEGIES,
    )  # fmt: skip
    hybrid = load("strategies/test_hybrid_sharding.py").test_hybrid_shards_train_save_and_resume_as_whole_ones
    yield Row("hybrid sharding (`num_replicas=`)", hybrid, ["fsdp"])
    divided = load("strategies/test_tensor_parallel.py").test_divided_layers_train_save_and_resume_as_whole_ones
    yield Row("tensor parallelism (`mesh=`, `tensor_plan=`)", divided, ["fsdp"])

    averaged = load("strategies/test_averaged.py")
    of_all = averaged.test_averages_match_one_process_under_every_strategy
    yield Row("averaged weights (EMA, SWA)", of_all, averaged.PARALLEL)
    kit = load("memory/test_kit_on_ranks.py")
    yield Row(
        "activation checkpointing, and losses weighted by tokens",
        kit.test_every_strategy_trains_as_one_large_batch_on_one_process, kit.STRATEGIES,
    )  # fmt: skip
    compiled = contract.test_a_compiled_module_matches_one_process_under_every_strategy
    yield Row("`compile=`", compiled, values(compiled, "strategy"), {"deepspeed_stage_3": job.NOT_COMPILED})
    alike = load("strategies/test_alike.py")
    every = [*alike.STRATEGIES, *alike.ZERO]
    yield Row("buffers that a step reads and writes", alike.test_a_step_finds_rank_0s_buffers, every)
    yield Row(
        "freezing and unfreezing between epochs", of_all, filter(averaged.thaws_under, averaged.PARALLEL),
        {"deepspeed_stage_2": zero.deepspeed_job.FROZEN},
    )  # fmt: skip
    sharded = load("strategies/test_ddp_sharded.py")
    yield Row(
        "parameter groups that are added during a fit", alike.test_parameters_that_were_made_late_are_trained_alike,
        alike.LATE, {"ddp_sharded": sharded.sharded_job.NO_NEW_GROUPS},
    )  # fmt: skip

    closures = load("strategies/test_manual_closures.py")
    yield Row(
        "closures in manual steps", closures.test_a_closure_of_a_manual_step_is_called_under_every_strategy,
        closures.STRATEGIES,
    )  # fmt: skip
    divided = load("strategies/test_zero_optimizers.py")
    by_tensor = divided.test_steps_by_tensor_where_tensors_are_whole_or_add_up
    unknown = same(divided.zero_job.UNKNOWN.format("Layers"), stages(divided.STAGES))
    unknown["fsdp"] = divided.zero_job.UNKNOWN_TO_FSDP
    whole = [name for name in values(by_tensor, "strategy") if name != "fsdp"]
    yield Row("an optimizer that the strategy does not know", by_tensor, ["ddp", *whole], unknown)
    resumes = divided.test_any_optimizer_resumes_and_matches_one_process_under_zero
    yield Row("the same with `elementwise=True`", resumes, ["fsdp", *stages(values(resumes, "stage"))])
    adafactor = same(divided.zero_job.UNKNOWN.format("Adafactor"), stages(divided.STAGES))
    refused = alike.test_what_cannot_be_alike_is_refused_by_name
    yield Row("Adafactor", refused, [], {"fsdp": alike.REFUSED["Adafactor"], **adafactor})
    optim = load("test_optim.py")
    yield Row(
        "`tw.optim.split` (Muon and AdamW)", optim.test_ranks_train_the_weights_of_one_process, optim.DDP,
        {"fsdp": optim.WHOLE},
    )  # fmt: skip
    bits = load("strategies/test_quantized_state.py")
    yield Row(
        "torchao's 8-bit AdamW", bits.test_8_bit_state_of_ranks_is_resumed_bitwise, bits.DDP,
        {"fsdp": bits.NOT_SHARDED},
    )  # fmt: skip

    sparse = of_key(alike.REFUSED, "sparse ")
    yield Row("`nn.Embedding(sparse=True)`", refused, set(every) - sparse.keys(), sparse)
    yield Row("`nn.Embedding(max_norm=...)`", refused, [], of_key(alike.REFUSED, "row norms "))
    penalties = load("strategies/test_gradient_penalties.py")
    yield Row(
        "a penalty on gradients (`create_graph=True`)", penalties.test_gradients_of_inputs_are_computed_as_on_one_process,
        [name for name, cases in penalties.CASES.items() if penalties.Penalty in cases],
        {"deepspeed_stage_3": penalties.PART},
    )  # fmt: skip
    used, lost = load("strategies/test_used_parameters.py"), load("strategies/test_unreached_loss.py")
    branches = used.test_ranks_may_take_different_branches
    differ = same(used.DIFFERS, [*kinds(used.REFUSED), "deepspeed_stage_3"])
    yield Row(
        "processes that use different parameters in a step (`ddp`: with `find_unused_parameters=True`)", branches,
        ["ddp", *kinds(used.RIGHT)], differ,
    )  # fmt: skip
    yield Row(
        "a loss that uses no parameter on one process (`ddp`: the same)",
        lost.test_a_rank_whose_loss_reaches_no_parameter_is_handled,
        kinds(lost.RIGHT), same(lost.UNREACHED, {*lost.REFUSED} - {*kinds(lost.RIGHT)}),
    )  # fmt: skip
    yield Row(
        "training on after you caught an error of a backward", used.test_ddp_trains_on_after_a_backward_that_failed,
        ["ddp"], same(used.NO_MORE.format("..."), used.FAILED),
    )  # fmt: skip


def table(rows: list[Row], columns: tuple[str, ...], first: str) -> Iterator[str]:
    """Yield the lines of a table with the marks of every strategy."""
    heads = ["one process" if each == ALONE else f"`{each}`" for each in columns]
    yield f"| {' | '.join([first, *heads, 'test'])} |"
    yield "|---" * (len(columns) + 2) + "|"
    for row in rows:
        cells = [mark(row, strategy) for strategy in columns]
        path = Path(row.test.__code__.co_filename)
        yield f"| {' | '.join([quoted(row.feature), *cells])} | [{path.stem}](../{path.relative_to(ROOT)}) |"


def quoted(feature: str) -> str:
    """Return a precision as code, and a feature as it is."""
    return f"`{feature}`" if re.fullmatch(r"[\w-]+-(?:true|mixed)", feature) else feature


def mark(row: Row, strategy: str) -> str:
    """Return the mark of a strategy in a row."""
    is_trained, is_rejected = strategy in row.trained, strategy in row.rejected
    assert not (is_trained and is_rejected), (row.feature, strategy)
    if is_rejected:
        return "rejected"
    places = ["CPU"] * is_trained + ["GPU"] * (strategy in row.on_gpu)
    return ", ".join(places) or "not tested"


def reasons(rows: list[Row]) -> Iterator[str]:
    """Yield a line for every error text, with the strategies that raise it."""
    for row in rows:
        by_text: dict[str, list[str]] = {}
        for strategy in filter(row.rejected.__contains__, STRATEGIES):
            by_text.setdefault(plain(row.rejected[strategy], strategy), []).append(f"`{strategy}`")
        for text, strategies in by_text.items():
            yield f"- {quoted(row.feature)}: {', '.join(strategies)}: *{text}*"


def plain(pattern: str, strategy: str) -> str:
    """Return a regular expression of a message as a text."""
    text = re.sub(r"^\w+Error: ", "", pattern).replace(".*", "...").replace(f"'{strategy}'", "...")
    text = re.sub(r"\\(.)", r"\1", text).replace(" .DTensors. ", " (DTensors) ").replace("deepspeed_stage_", "...")
    return re.sub(r"([*_<|])", r"\\\1", text.rstrip(" .'"))


def tables() -> str:
    """Return everything between the two marks of the page."""
    rows, more = ([row._replace(trained=[*row.trained]) for row in found] for found in (precisions(), features()))
    lines = ["### Precisions", "", *table(rows, (ALONE, *STRATEGIES), "precision"), ""]
    lines += ["### Features", "", *table(more, STRATEGIES, "feature"), ""]
    lines += [
        "### The texts of errors",
        "",
        ABOUT_TEXTS,
        "",
        *reasons([*rows, *more]),
        "",
        "### Runs on a GPU",
        "",
        *on_a_gpu(),
        "",
    ]
    return "\n".join([*lines, "### Versions", "", *versions()])


def versions() -> Iterator[str]:
    """Yield a table of the versions of Python, torch and engines that are accepted, and that CI runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().lower().splitlines() if "==" in line
    )
    extras = project["optional-dependencies"]
    yield from ("| | accepted | in CI |", "|---|---|---|")
    listed = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)]
    yield f"| Python | {', '.join(listed)} | {listed[0]} |"
    for requirement in (*project["dependencies"], *extras["deepspeed"], *extras["fairscale"], *extras["torchao"]):
        name, accepted = re.findall(r"^([\w-]+)(.*)", requirement)[0]
        yield f"| {name} | {accepted.replace('<', '&lt;').replace('>', '&gt;')} | {pins[name.lower()]} |"


def on_a_gpu() -> Iterator[str]:
    """Yield the paragraph and the list of the latest session on a GPU."""
    session, device = recorded(), load("device/test_strategies_on_device.py")
    if session is None:
        yield "There is no record of a session on a GPU."
        return
    others = ", ".join(f"`{name}`" for name in device.STRATEGIES if name not in STRATEGIES)
    two = ", ".join(f"`{name}`" for name in device.OVER_GLOO)
    yield f"The latest recorded session: one {session.gpu}, {session.versions} ({session.date});"
    yield f"{session.passed} tests passed, and {session.skipped} were skipped. No later session is recorded."
    yield "One process under every strategy, also"
    yield f"{others}, was compared with a run without a strategy, in"
    yield (
        ", ".join(f"`{each}`" for each in device.PRECISIONS)
        + f". Two processes that shared the GPU over gloo ran {two}."
    )
    told = {device.incomparable(name, each) for name in device.STRATEGIES for each in device.PRECISIONS} - {""}
    yield f"Not compared is `16-mixed` under DeepSpeed: {'; '.join(sorted(told))}. The tests of the session:"
    yield ""
    for path in sorted(map(Path, load("gpu_session.py").files())):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        yield f"- [{path.stem}](../{path.relative_to(ROOT)}): {docstring.splitlines()[0]}"


def page() -> str:
    """Return the page with its tables as the tests have them."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
