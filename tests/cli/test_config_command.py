"""Where launch's options come from: flag, variable, file, default, in this order."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_instance import fresh_registry, run

from llmserve.cli import launch
from llmserve.runtime.config import ServerArgs
from llmserve.runtime.launch import LaunchError


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    fresh_registry(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return path


def rows(*arguments: str) -> dict[str, Any]:
    data = json.loads(run("config", "--json", *arguments).out)
    return {row["option"]: (row["value"], row["source"]) for row in data["options"]}


def test_each_value_says_where_it_comes_from(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(home / "f.toml", 'port = 8000\nmodel = "org/m"\nserved-model-name = ["a", "b"]\nprefix-cache = false')
    monkeypatch.setenv("LLMSERVE_PORT", "9000")
    monkeypatch.setenv("LLMSERVE_API_KEY", "s3cret")
    options = rows("--config", str(file))
    assert options["port"] == (9000, "variable LLMSERVE_PORT")
    assert options["model"] == ("org/m", f"file {file}")
    assert options["served-model-name"] == (["a", "b"], f"file {file}")
    assert options["prefix-cache"] == (False, f"file {file}")
    assert options["host"] == ("127.0.0.1", "default")
    assert options["api-key"] == ("(set)", "variable LLMSERVE_API_KEY")


def test_what_is_not_set_says_what_it_will_be() -> None:
    table = {line.split()[0]: line for line in run("config").out.splitlines()}
    assert "(the default model)" in table["model"]
    assert "(the model's own)" in table["max-model-len"]
    assert "(MODEL's last part)" in table["served-model-name"]
    assert table["dist-init-addr"].split() == ["dist-init-addr", "-", "default"]
    assert rows()["max-model-len"] == (None, "default")


def test_the_default_file_is_found(home: Path) -> None:
    file = write(home / "llmserve" / "config.toml", "port = 8000")
    assert rows()["port"] == (8000, f"file {file}")


def test_without_a_file_it_says_where_one_would_be(home: Path) -> None:
    assert str(home / "llmserve" / "config.toml") in run("config").err


def test_a_home_that_cannot_be_looked_into_holds_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of another user, whose variables `sudo` keeps; here the system refuses for its length."""
    monkeypatch.setenv("XDG_CONFIG_HOME", f"/{'x' * 300}")
    assert "there is no configuration file at" in run("config").err
    assert run("config", "--config", "~no-such-user/f.toml").code == 78


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "no option 'prot'"),
        ('port = "x"', "port = 'x'"),
        ("port = ", "not TOML"),
        ("detach = true", "no option 'detach'"),
        (None, "cannot read"),
    ],
)
def test_a_bad_file_is_exit_78_and_named(home: Path, text: str | None, says: str) -> None:
    file = home / "f.toml" if text is None else write(home / "f.toml", text)
    for command in ("config", "launch"):
        result = run(command, "--config", str(file))
        assert result.code == 78
        assert str(file) in result.err
        assert says in result.err


def test_launch_runs_with_flag_over_variable_over_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmserve.cli import starting

    launched: list[ServerArgs] = []
    monkeypatch.setattr(starting, "run_attached", lambda console, args, secrets: launched.append(args) or 0)
    monkeypatch.setattr(launch, "default_model", lambda: "default.gguf")
    file = write(home / "f.toml", 'port = 1111\nname = "filed"\nqueue-timeout = 5\nmax-queued-requests = 9')
    monkeypatch.setenv("LLMSERVE_CONFIG", str(file))
    monkeypatch.setenv("LLMSERVE_NAME", "varied")
    monkeypatch.setenv("LLMSERVE_MAX_QUEUED_REQUESTS", "8")
    assert run("launch", "--max-queued-requests", "7").code == 0
    (args,) = launched
    assert (args.port, args.name, args.queue_timeout, args.max_queued_requests) == (1111, "varied", 5.0, 7)


# ---- errors name the place where the value is to be mended ---------------------------------------------------------


def test_an_error_names_the_variable_or_the_key_that_set_the_option(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(home / "f.toml", "queue-timeout = -1")
    typed = run("launch", "m", "--max-model-len", "0")
    assert typed.err == "llmserve: --max-model-len 0: must be at least 1\n"
    filed = run("launch", "m", "--config", str(file))
    assert (filed.code, "--queue-timeout is set by queue-timeout in " + str(file) in filed.err) == (78, True)
    monkeypatch.setenv("LLMSERVE_MAX_MODEL_LEN", "0")
    varied = run("launch", "m")
    assert varied.code == 78
    assert varied.err.endswith("(--max-model-len is set by the variable LLMSERVE_MAX_MODEL_LEN)\n")


def test_an_error_of_the_start_names_the_place_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmserve.cli import starting

    def fail(*_: object) -> int:
        raise LaunchError("--page-size 7: no; --port 1 is taken, says org/m", exit_code=1)

    monkeypatch.setattr(starting, "run_attached", fail)
    monkeypatch.setenv("LLMSERVE_PAGE_SIZE", "7")
    monkeypatch.setenv("LLMSERVE_MODEL", "org/m")
    done = run("launch")
    assert done.code == 1
    assert done.err.endswith("org/m (--page-size is set by the variable LLMSERVE_PAGE_SIZE)\n")


@pytest.mark.parametrize("command", ["launch", "config"])
def test_a_variable_that_cannot_be_read_is_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSERVE_PORT", "many")
    done = run(command)
    assert (done.code, done.out) == (78, "")
    assert done.err.startswith("llmserve: the variable LLMSERVE_PORT is 'many': ")


@pytest.mark.parametrize("command", ["launch --max-model-len 0", "config"])
def test_a_variable_that_nothing_reads_is_warned_of(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSERVE_PROT", "1")
    monkeypatch.setenv("LLMSERVE_QQ", "1")
    monkeypatch.setenv("LLMSERVE_INSTANCE", "x")
    lines = run(*command.split()).err.splitlines()
    assert lines[:2] == [
        "warning: there is no variable LLMSERVE_PROT, it is ignored; did you mean LLMSERVE_PORT?",
        "warning: there is no variable LLMSERVE_QQ, it is ignored",
    ]
    assert not [line for line in lines[2:] if line.startswith("warning")]
