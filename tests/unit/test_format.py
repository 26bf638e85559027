import pytest

from llmserve.cli import format
from llmserve.cli.console import printable


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0s"),
        (0.00085, "850us"),
        (0.0042, "4.2ms"),
        (0.012, "12ms"),
        (3.44, "3.4s"),
        *((0.0009996, "1.0ms"), (0.00999, "10ms"), (0.9997, "1.0s"), (59.97, "1m00s"), (119.9, "1m59s")),
        (125, "2m05s"),
        (12000, "3h20m"),
        (86400 * 4 + 7300, "4d02h"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert format.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (300 * 2**20, "300 MiB"),
        (2**20 - 9, "1.0 MiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_size(count: int, text: str) -> None:
    assert format.size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0k"), (12345, "12.3k"), (99_960, "100k"), (999_999, "1.0M"), (4.5e6, "4.5M")],
)
def test_number(count: float, text: str) -> None:
    assert format.number(count) == text


@pytest.mark.parametrize(("fraction", "text"), [(None, "-"), (0.0, "0%"), (0.377, "38%"), (1.0, "100%")])
def test_share(fraction: float | None, text: str) -> None:
    assert format.share(fraction) == text


@pytest.mark.parametrize(("part", "whole", "text"), [(3, 4, "75%"), (1, 0, "-")])
def test_percent(part: int, whole: int, text: str) -> None:
    assert format.percent(part, whole) == text


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("30s", 30), ("5m", 300), ("2h", 7200), ("1d", 86400), ("500ms", 0.5)]
)
def test_seconds_of(text: str, seconds: float) -> None:
    assert format.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5x", "-5m", "1e999", "nan"])
def test_seconds_of_says_what_a_duration_looks_like(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        format.seconds_of(text)


def test_control_characters_are_shown() -> None:
    assert printable("a\x1b[2Jb\x7f\x9b\n") == "a␛[2Jb␡\ufffd␊"
