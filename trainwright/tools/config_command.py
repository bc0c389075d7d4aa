"""`trainwright config`: asks for the settings of `trainwright launch`, writes them as YAML, and shows them."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence

import trainwright as tw
from trainwright.devices import hardware
from trainwright.devices.hardware import describe_devices
from trainwright.distributed.masking import shown
from trainwright.distributed.network import DEFAULT_PORT, LOOPBACK
from trainwright.errors import did_you_mean
from trainwright.launch.cli import Parser
from trainwright.launch.config import KEYS, Config, NameCheck, check_env, config_path, find_config, printable, resolve
from trainwright.loggers.files import write_file
from trainwright.strategies import CHOICES
from trainwright.tools.choices import best_precision, why_missing

INTERRUPTED = 130
DEFAULTS = {
    "devices": "auto", "cpu": "false", "strategy": "auto", "precision": "32-true", "gradient_accumulation_steps": "1",
    "num_nodes": "1",
}  # fmt: skip
"""The keys of the questions for every machine, and their values if neither a script nor a config sets them."""
Answers = dict[str, str | dict[str, str]]
"""The values by key. The value of `env` is a dict."""


def config_command(arguments: Sequence[str], check_names: NameCheck) -> int:
    """Run `trainwright config` and return its exit code."""
    parser = Parser(
        prog="trainwright config", description="Asks for the settings of `trainwright launch`, and writes them as YAML."
    )
    parser.add_argument("what", nargs="?", metavar="show", help="print the config that launch would read")
    parser.add_argument("--default", action="store_true", help="write the settings for this machine, without questions")
    parser.add_argument("--force", action="store_true", help="replace a config that exists")
    parser.add_argument(
        "--config-file", metavar="PATH", help="the file (or the variable TRAINWRIGHT_CONFIG; default: "
        "~/.config/trainwright/config.yaml)"
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.what not in (None, "show"):
        hint = did_you_mean(options.what, ["show"])
        parser.error(f"{options.what!r} is not accepted; the only word is show.{hint}")
    try:
        if options.what == "show":
            print(describe_config(options.config_file, check_names))
            return 0
        path, _ = config_path(options.config_file)
        if not _may_write(path, options.force, asks=not options.default):
            print("Nothing was written.")
            return 0
        text = as_yaml(suggested() if options.default else Questions(check_names).ask())
        write_file(os.path.realpath(path), text.encode())
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except EOFError:
        print()
        parser.error("the input ended before the last answer, and nothing was written. --default needs no answers.")
    except KeyboardInterrupt:
        print("\nNothing was written.")
        return INTERRUPTED
    print(f"Wrote {path}, which trainwright launch reads. Check the machine with: trainwright test")
    return 0


def describe_config(config_file: str | None, check_names: NameCheck) -> str:
    """Return the config in words, with hidden secrets; ValueError if it is wrong."""
    path, source = config_path(config_file)
    config = find_config(config_file)
    if config.path is None:
        return f"{path} does not exist, so launch uses its defaults; trainwright config writes it."
    resolve({}, config, check_names)
    lines = [f"{path} ({source})"]
    lines += [f"  {name}: {text}" for name, text in config.values.items()]
    lines += [f"  env {name}: {printable(shown(name, text))}" for name, text in config.variables.items()]
    return "\n".join(lines if len(lines) > 1 else [*lines, "  holds no values"])


def suggested() -> Answers:
    """Return the values that suit this machine. Scripts and the defaults of launch choose the others."""
    precision = best_precision()
    return {} if precision == DEFAULTS["precision"] else {"precision": precision}


class Questions:
    """The questions in a terminal. A wrong answer, by the checks of launch, is asked again."""

    def __init__(self, check_names: NameCheck) -> None:
        self.check_names = check_names
        self.answers: Answers = {}

    def ask(self) -> Answers:
        """Return the answers; EOFError if the input ends."""
        print(
            f"This machine has {describe_devices()}. An empty answer sets no value: the script chooses it, or the value in "
            "brackets holds."
        )
        remarks = {"strategy": f" ({', '.join(name for name in CHOICES if name == 'auto' or not why_missing(name))})"}
        remarks |= {name: f" ({value} suits this machine)" for name, value in suggested().items()}
        for name, default in DEFAULTS.items():
            if name == "cpu" and hardware.accelerator_type() is None:
                continue  # nothing to choose
            self._ask(name, default, remarks.get(name, ""), is_needed=False)
        if self.answers.get("num_nodes", "1") != "1":
            self._ask("node_rank", "0")
            self._ask("main_address", "")
            self._ask("main_port", str(DEFAULT_PORT), is_needed=False)
        self._ask_variables()
        return self.answers

    def _ask(self, name: str, default: str, remark: str = "", *, is_needed: bool = True) -> None:
        """Ask for a key until the answer is accepted. If launch needs the key, an empty answer means its default."""
        while name not in self.answers:
            answer = input(f"{KEYS[name].about}{remark}\n{name} [{default or 'none'}]: ").strip()
            if not answer and not is_needed:
                return
            try:
                self.answers[name] = self._checked(name, answer or default)
            except ValueError as error:
                _print_problem(error)

    def _ask_variables(self) -> None:
        while "env" not in self.answers:
            answer = input(f"{KEYS['env'].about}, as NAME=VALUE, separated by blanks\nenv [none]: ")
            try:
                pairs = [pair.partition("=") for pair in shlex.split(answer)]
                if not all(equals for _, equals, _ in pairs):
                    raise ValueError(f"{answer}: expected NAME=VALUE pairs.")
                check_env(name for name, _, _ in pairs)
                self.answers["env"] = {name: value for name, _, value in pairs}
            except ValueError as error:
                _print_problem(error)

    def _checked(self, name: str, text: str) -> str:
        """Return the text to write; ValueError if launch would reject it together with the earlier answers."""
        if not text:
            raise ValueError(f"{name} needs a value.")
        values = {key: str(value) for key, value in self.answers.items()} | {name: text}
        if values.get("num_nodes", "1") != "1":  # which later questions ask for
            values = {"node_rank": "0", "main_address": LOOPBACK, **values}
        settings, _ = resolve({}, Config(values=values), self.check_names, {})
        if name == "strategy" and (reason := why_missing(text)):
            raise ValueError(reason)
        return str(settings[name].value) if name == "precision" else text


def _print_problem(error: ValueError) -> None:
    print(f"  {str(error).removeprefix(': ')}")


def as_yaml(answers: Mapping[str, str | dict[str, str]]) -> str:
    """Return a config with a comment on every key. Keys without a value are commented out."""
    lines = [
        "# The settings of `trainwright launch` that neither a flag nor the environment sets.",
        f"# Written by trainwright {tw.__version__} on a machine with {describe_devices()}.",
    ]
    for name, entry in KEYS.items():
        value = answers.get(name)
        lines += ["", f"# {entry.about}"]
        if isinstance(value, dict):
            lines += ["env:", *(f"  {variable}: {_scalar(text)}" for variable, text in value.items())]
        else:
            lines.append(f"# {name}:" if value is None else f"{name}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(text: str) -> str:
    """Return a text as YAML, in double quotes if a plain scalar might mean something else."""
    is_plain = re.fullmatch(r"[A-Za-z0-9_./][\w./@+-]*|-1", text, re.ASCII) and text.lower() != "null"
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _may_write(path: str, force: bool, asks: bool) -> bool:
    """Return whether a file may be written or replaced; ValueError if it is not a file or needs --force."""
    if not os.path.lexists(path):
        return True
    if not os.path.isfile(path):
        raise ValueError(f"{path} is not a file; choose another path with --config-file.")
    if force:
        return True
    if not asks:
        raise ValueError(f"{path} exists; add --force to replace it.")
    return input(f"{path} exists. Replace it? (yes or no) [no] ").strip().lower() in ("y", "yes")
