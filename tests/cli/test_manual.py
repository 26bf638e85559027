"""completions/ and man/ are what the commands say, and real shells and groff take them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from fake_instance import FakeInstance, fresh_registry, request_info

from instances import hang_up
from llmserve.cli.commands import COMMANDS
from llmserve.cli.main import app
from llmserve.cli.manual import EXIT_STATUS, documents

ROOT = Path(__file__).parents[2]
SHOWN = [name for name, entry in COMMANDS.items() if not entry.hidden]
BIN = str(Path(sys.executable).parent)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_registry(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")


@pytest.fixture(scope="module")
def group() -> Any:
    found: Any = typer.main.get_command(app)
    for name in COMMANDS:
        found.load(name)
    return found


def test_regenerating_changes_nothing(group: Any) -> None:
    """When it fails: make generate."""
    there = {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in ("man", "completions")
        for path in (ROOT / folder).iterdir()
        if not path.is_symlink()
    }
    assert documents(group) == there


@pytest.mark.parametrize("name", SHOWN)
def test_every_option_is_in_its_page(group: Any, name: str) -> None:
    text = (ROOT / "man" / f"llmserve-{name}.1").read_text().replace("\\-", "-")
    context = group.context_class(group)
    for parameter in group.commands[name].get_params(context):
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("-"):
                assert f"\\fB{option}\\fR" in text
        if parameter.name != "help":
            assert parameter.help, f"{name} {parameter.opts[0]} has no help"
    for section in ("NAME", "SYNOPSIS", "OPTIONS", "EXIT STATUS", "ENVIRONMENT", "FILES", "EXAMPLES"):
        assert f".SH {section}\n" in text


def test_every_command_and_exit_status_is_in_the_main_page() -> None:
    text = (ROOT / "man" / "llmserve.1").read_text().replace("\\-", "-")
    assert all(f"llmserve-{name}\\fR(1)" in text for name in SHOWN)
    assert re.findall(r"^\.SS (.*)", text, re.MULTILINE) == ["Serve", "Look", "Act", "Use"]  # as in --help
    assert all(f"\\fB{int(code)}\\fR" in text for code in EXIT_STATUS)
    assert "generate-docs" not in text.partition("\n")[2]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "man").iterdir()))
def test_groff_is_silent(page: str) -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8", str(ROOT / "man" / page)], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""


def test_the_table_says_what_each_command_is(group: Any) -> None:
    """The line in the table and the command's own first sentence must not drift apart in what they name."""
    for name, entry in COMMANDS.items():
        assert group.commands[name].help
        assert entry.help.endswith(".")
        assert all(re.search(r"\bllmserve\b", example) for example in entry.examples)


# ---- shells --------------------------------------------------------------------------------------------------------


def bash(*words: str) -> list[str]:
    """What bash would offer for the last of `words`."""
    script = (
        f"source {ROOT / 'completions' / 'llmserve.bash'};"
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE};'
        'complete -p llmserve >&2; _llmserve llmserve; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", "llmserve", *words], capture_output=True, text=True, check=True
    )
    assert "-F _llmserve llmserve" in done.stderr
    return done.stdout.split()


def test_bash_completes_commands() -> None:
    assert bash("") == SHOWN
    assert bash("up") == ["update-weights"]
    assert "generate-docs" not in bash("gen")


def test_bash_completes_options_and_their_values() -> None:
    assert bash("launch", "--max-r") == ["--max-running-requests"]
    assert bash("launch", "--device", "") == ["auto", "cpu", "cuda"]


def test_bash_completes_instances_and_rids() -> None:
    with FakeInstance("prod") as fake, FakeInstance("test"):
        fake.running = [request_info("cmpl-1"), request_info("cmpl-1", index=1), request_info("$(touch /tmp/x)")]
        assert bash("ping", "--instance", "") == ["prod", "test"]
        assert bash("ping", "-i", "p") == ["prod"]
        assert bash("abort", "-i", "prod", "") == ["cmpl-1"]
        assert bash("abort", "-i", "prod", "cmpl-1", "") == []  # it has been named
        assert bash("abort", "-i", "test", "c") == []
        assert bash("abort", "-i", "absent", "c") == []


def test_bash_completes_at_the_tab_key() -> None:
    import pexpect

    shell = pexpect.spawn("bash", ["--norc", "--noprofile", "-i"], encoding="utf-8", timeout=60)
    try:
        shell.sendline(f"PS1='$ '; source {ROOT / 'completions' / 'llmserve.bash'}; echo re''ady")
        shell.expect("ready")
        shell.send("llmserve upd\t")
        shell.expect("llmserve update-weights ")
    finally:
        hang_up(shell)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes() -> None:
    def fish(line: str) -> list[str]:
        script = f"source {ROOT / 'completions' / 'llmserve.fish'}; complete -C '{line}'"
        done = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, check=True)
        return [offer.split("\t")[0] for offer in done.stdout.splitlines()]

    assert fish("llmserve upd") == ["update-weights"]
    assert fish("llmserve launch --max-r") == ["--max-running-requests"]
    with FakeInstance("prod"):
        assert fish("llmserve ping -i ") == ["prod"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_at_the_tab_key(tmp_path: Path) -> None:
    """With the file in $fpath, as the wheel installs it, under the name that compinit wants."""
    import pexpect

    shutil.copy(ROOT / "completions" / "_llmserve", tmp_path / "_llmserve")
    shell = pexpect.spawn("zsh", ["-f", "-i"], encoding="utf-8", timeout=60, env=os.environ | {"TERM": "dumb"})
    try:
        shell.sendline(f"PS1='$ '; fpath=({tmp_path} $fpath); autoload -U compinit; compinit -D -u; echo re''ady")
        shell.expect("ready\r")
        shell.send("llmserve upd\t")
        shell.expect("llmserve update-weights")
    finally:
        hang_up(shell)
