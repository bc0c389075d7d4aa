"""Names of Lightning and Accelerate that do not exist here: the errors and the page name the replacement."""

from __future__ import annotations

import pytest
from forked import run_python
from package import ROOT

import trainwright as tw
from trainwright.arguments import replaced_names


def test_a_missing_name_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"'Fabric': for your own loop use tw\.Accelerator"):
        from trainwright import Fabric  # noqa: F401
    with pytest.raises(AttributeError, match="'CheckpointIO': checkpoints have one format"):
        tw.CheckpointIO  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"'EarlyStoping'\. Did you mean 'EarlyStopping'\?"):
        from trainwright import EarlyStoping  # noqa: F401
    assert not hasattr(tw, "Fabric")


@pytest.mark.parametrize("name", ["core", "utilities", "utils"])
def test_an_error_for_module_paths_names_the_command(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}'\. `trainwright migrate SCRIPT` rewrites the imports"):
        getattr(tw, name)


def test_lightnings_package_is_the_package_itself() -> None:
    assert tw.pytorch.callbacks.EarlyStopping is tw.EarlyStopping  # type: ignore[attr-defined]


def test_every_missing_name_is_listed_in_the_pages() -> None:
    pages = "".join((ROOT.parent / "docs" / f"{page}.md").read_text() for page in ("missing_names", "from_accelerate"))
    assert [name for name in replaced_names() if f"`{name.rpartition('.')[2]}`" not in pages] == []


def test_comm_hooks_are_chosen_by_their_enum() -> None:
    options = tw.DistributedDataParallelKwargs(comm_hook=tw.DDPCommunicationHookType.BF16)
    assert options.strategy("ddp").comm_hook == "bf16"  # type: ignore[union-attr]


def test_importing_fails_on_a_system_without_posix_locks() -> None:
    code = "import sys; [sys.modules.pop(each) for each in list(sys.modules) if each.split('.')[0] == 'trainwright']; "
    done = run_python("-c", code + "sys.modules['fcntl'] = None; import trainwright")
    assert done.returncode == 1
    assert "ImportError: trainwright needs Linux or macOS; Windows is not supported. Use WSL there." in done.stderr
