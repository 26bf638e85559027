"""The registry of instances: who may take a name, what is refused, and what is swept."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from llmserve.runtime.config import ConfigError
from llmserve.runtime.instance import (
    RECORD,
    InstanceError,
    InstanceRecord,
    acquire,
    deaths,
    find_instance,
    list_instances,
    runtime_root,
    sweep_stale,
)
from llmserve.runtime.proc import process_start_time


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $XDG_RUNTIME_DIR; returns the registry's root in it, which does not exist yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "llmserve"


HOLD = """
import sys
from llmserve.runtime.instance import acquire
acquire(sys.argv[1]).update(host="127.0.0.1", port=31001)
print("held", flush=True)
sys.stdin.read()
"""


def hold(name: str) -> "subprocess.Popen[bytes]":
    """Another process that has taken a name."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def leave_behind(root: Path, name: str, **fields: object) -> Path:
    """The directory of an instance that is gone."""
    directory = root / name
    runtime_root()
    directory.mkdir(mode=0o700)
    (directory / "rpc.sock").touch()
    record = InstanceRecord(name=name, **{"pid": 2**22 + 1, "start_time": 1, **fields})  # type: ignore[arg-type]
    (directory / RECORD).write_bytes(msgspec.json.encode(record))
    return directory


# ---- taking and finding --------------------------------------------------------------------------------------------


def test_a_taken_name_is_a_private_directory_with_a_record(root: Path) -> None:
    taken = acquire("one")
    assert taken.directory == root / "one"
    for path in (root, taken.directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    taken.update(host="127.0.0.1", port=31002, model="m", served_model_names=("m",), state="ready", children=(1, 2))
    record = find_instance("one")
    assert record == taken.record
    assert (record.pid, record.port, record.state, record.children) == (os.getpid(), 31002, "ready", (1, 2))
    assert record.start_time == process_start_time(os.getpid())
    assert abs(record.created - time.time()) < 60
    assert record.alive
    taken.release()
    assert not taken.directory.exists()
    taken.release()
    assert list_instances() == []


FULL_DISK = """
import resource, sys
from llmserve.runtime.instance import InstanceError, acquire
def fill_the_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # nothing can be written from now on
if "early" in sys.argv:
    fill_the_disk()
try:
    instance = acquire("one")
except InstanceError as error:
    sys.exit(f"{error.exit_code}: {error}")
fill_the_disk()
instance.update(state="ready")
print(instance.record.state)
instance.release()
"""


def on_a_full_disk(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", FULL_DISK, *arguments], capture_output=True, text=True, check=False)


def test_a_name_cannot_be_taken_on_a_full_disk_and_nothing_is_left(root: Path) -> None:
    assert on_a_full_disk("early").stderr == f"1: cannot write in {root / 'one'}: File too large\n"
    assert not (root / "one").exists()


def test_a_disk_that_fills_up_later_harms_nothing(root: Path) -> None:
    done = on_a_full_disk()
    assert (done.stdout, done.returncode) == ("ready\n", 0)
    assert "out of date" in done.stderr
    assert not (root / "one").exists()


def test_a_name_in_use_is_refused_naming_who_has_it_and_stays_unharmed() -> None:
    holder = hold("one")
    before = find_instance("one")
    with pytest.raises(InstanceError, match=rf"running \(pid {holder.pid}, 127\.0\.0\.1:31001\)") as caught:
        acquire("one")
    assert caught.value.exit_code == 1
    assert find_instance("one") == before
    kill(holder)


def test_a_forked_child_cannot_release() -> None:
    taken = acquire("one")
    child = os.fork()
    if child == 0:
        taken.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert taken.directory.exists()
    taken.release()


def test_find_instance_chooses_the_only_one_and_says_why_not() -> None:
    with pytest.raises(InstanceError, match="llmserve launch") as none:
        find_instance()
    one = acquire("one")
    assert find_instance().name == "one"
    with pytest.raises(InstanceError, match="running: one") as unknown:
        find_instance("two")
    two = acquire("two")
    with pytest.raises(InstanceError, match="one, two") as several:
        find_instance()
    assert (none.value.exit_code, unknown.value.exit_code, several.value.exit_code) == (3, 3, 2)
    one.release()
    two.release()


def test_a_dead_instance_is_listed_but_not_found(root: Path) -> None:
    holder = hold("one")
    kill(holder)
    [record] = list_instances()
    assert (record.name, record.alive) == ("one", False)
    with pytest.raises(InstanceError, match="dead") as caught:
        find_instance("one")
    assert caught.value.exit_code == 69
    with pytest.raises(InstanceError) as caught:
        find_instance()
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["", ".", "..", "../one", "a/b", ".hidden", "a b", "a\n", "x" * 33])
def test_a_name_that_could_leave_the_root_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        acquire(name)
    with pytest.raises(InstanceError):
        find_instance(name)


def test_a_record_that_cannot_be_read_or_names_another_is_skipped(root: Path) -> None:
    leave_behind(root, "one")
    (root / "one" / RECORD).write_text("{")
    leave_behind(root, "two")
    (root / "two").rename(root / "three")
    (root / "four").mkdir(mode=0o700)
    assert list_instances() == []


# ---- sweeping ------------------------------------------------------------------------------------------------------


def test_what_a_killed_instance_left_is_replaced() -> None:
    kill(hold("one"))
    taken = acquire("one")
    assert taken.record.pid == os.getpid()
    assert taken.record.port == 0
    taken.release()


def test_a_reused_pid_does_not_keep_a_dead_instance_alive(root: Path) -> None:
    start_time = process_start_time(os.getpid())
    assert start_time is not None
    directory = leave_behind(root, "one", pid=os.getpid(), start_time=start_time - 1)
    assert not list_instances()[0].alive
    taken = acquire("one")
    assert not (directory / "rpc.sock").exists()
    taken.release()


def test_a_live_process_keeps_its_directory_even_without_the_lock(root: Path) -> None:
    directory = leave_behind(root, "one", pid=os.getpid(), start_time=process_start_time(os.getpid()))
    with pytest.raises(InstanceError, match="is running"):
        acquire("one")
    assert sweep_stale() == []
    assert (directory / "rpc.sock").exists()


def test_a_held_lock_keeps_a_directory_whatever_its_record_says(root: Path) -> None:
    holder = hold("one")
    (root / "one" / RECORD).write_text("{")
    with pytest.raises(InstanceError, match="in use"):
        acquire("one")
    assert sweep_stale() == []
    kill(holder)
    assert sweep_stale() == ["one"]


def test_a_sweep_takes_the_dead_and_leaves_the_living(root: Path) -> None:
    holder = hold("alive")
    leave_behind(root, "dead")
    assert sweep_stale() == ["dead"]
    assert [record.name for record in list_instances()] == ["alive"]
    kill(holder)


def test_a_sweep_does_not_follow_a_link(root: Path, tmp_path: Path) -> None:
    runtime_root()
    treasure = tmp_path / "treasure"
    treasure.mkdir(mode=0o700)
    (treasure / "file").touch()
    (root / "one").symlink_to(treasure)
    with pytest.raises(InstanceError, match="symbolic link") as caught:
        acquire("one")
    assert caught.value.exit_code == 77
    assert sweep_stale() == []
    assert (treasure / "file").exists()


def test_a_process_that_waits_for_its_parent_is_dead() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    assert process_start_time(child) is not None
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while process_start_time(child) is not None:
        assert time.monotonic() < deadline
    os.waitpid(child, 0)


def test_many_launches_at_once_of_one_name_have_one_winner() -> None:
    kill(hold("one"))
    launch = [sys.executable, "-c", HOLD, "one"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen(launch, **pipes) for _ in range(6)]  # type: ignore[call-overload]
    said = [process.stdout.readline() for process in processes]
    for process in processes:
        process.communicate()
    assert sorted(said) == [b""] * 5 + [b"held\n"]


# ---- what is not ours alone ----------------------------------------------------------------------------------------


def test_a_root_that_others_may_enter_is_refused(root: Path) -> None:
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    with pytest.raises(InstanceError, match=r"755.*700") as caught:
        acquire("one")
    assert caught.value.exit_code == 77
    assert list(root.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_root_of_another_user_is_refused(root: Path) -> None:
    root.mkdir(mode=0o700)
    os.chown(root, 65534, 65534)
    with pytest.raises(InstanceError, match="65534") as caught:
        list_instances()
    assert caught.value.exit_code == 77


def test_a_root_that_is_a_link_or_a_file_is_refused(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    root.symlink_to(elsewhere)
    with pytest.raises(InstanceError, match="symbolic link") as caught:
        acquire("one")
    assert caught.value.exit_code == 77
    root.unlink()
    root.touch(mode=0o600)
    with pytest.raises(InstanceError, match="not a directory"):
        acquire("one")


def test_a_directory_that_others_may_enter_is_refused(root: Path) -> None:
    leave_behind(root, "one").chmod(0o755)
    with pytest.raises(InstanceError, match="755") as caught:
        acquire("one")
    assert caught.value.exit_code == 77
    assert (root / "one" / "rpc.sock").exists()


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(InstanceError, match="shorter") as caught:
        acquire("n" * 32)
    assert caught.value.exit_code == 78
    assert list_instances() == []


@pytest.mark.parametrize("value", ["", "relative", "/nonexistent/run"])
def test_without_a_runtime_directory_the_temporary_one_is_used(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert runtime_root() == tmp_path / f"llmserve-{os.geteuid()}"
    assert stat.S_IMODE(runtime_root().stat().st_mode) == 0o700


def test_the_commands_get_the_registry_without_zmq_and_torch() -> None:
    code = "import sys, llmserve.runtime.instance; print(*({'zmq', 'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"\n"


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80")])
def test_an_address_is_that_of_a_url(host: str, address: str) -> None:
    assert InstanceRecord(name="x", host=host, port=80).address == address


def test_deaths_are_told_with_the_log_if_one_was_kept() -> None:
    one = InstanceRecord(name="one", log_path="/run/one/llmserve.log")
    bare = InstanceRecord(name="bare")
    assert deaths([]) == ""
    assert deaths([one]) == '"one" has died, see `llmserve logs -i one`'
    assert deaths([bare]) == '"bare" has died'
    assert deaths([bare, one]) == '"bare", "one" have died, see `llmserve ps --all`'
