"""Where launch's options come from: flag, variable, file, default, in this order."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_instance import fresh_registry, run

from llmserve.cli import launch
from llmserve.runtime.config import ServerArgs


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


def test_the_default_file_is_found(home: Path) -> None:
    file = write(home / "llmserve" / "config.toml", "port = 8000")
    assert rows()["port"] == (8000, f"file {file}")


def test_without_a_file_it_says_where_one_would_be(home: Path) -> None:
    assert str(home / "llmserve" / "config.toml") in run("config").err


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
