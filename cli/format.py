"""Numbers formatted for people: durations, sizes, counts and shares, whatever they measure."""


def duration(seconds: float | None) -> str:
    """A duration at the precision that one reads at a glance: 850us, 12ms, 3.4s, 2m05s, 3h20m, 4d02h; "-" for None."""
    if seconds is None:
        return "-"
    if seconds <= 0:
        return "0s"
    if seconds < 0.0009995:  # what would be rounded to 1000us
        return f"{seconds * 1e6:.0f}us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f}ms" if seconds >= 0.00995 else f"{seconds * 1e3:.1f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(max(60, int(seconds)), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h"


def size(count: float) -> str:
    """A number of bytes in binary units: 512 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.5:  # what would be rounded to 1024
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 99.95 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def number(count: float) -> str:
    """A count in at most five characters: 999, 12.3k, 4.5M."""
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M")):
        if abs(count) < limit * 0.9995:
            scaled = count / (limit / 1e3)
            return f"{scaled:.0f}{unit}" if not unit or abs(scaled) >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{count / 1e9:.1f}G"


def share(fraction: float | None) -> str:
    """A fraction in percent: 0.5 is 50%; "-" for None."""
    return "-" if fraction is None else f"{100 * fraction:.0f}%"


def percent(part: float, whole: float) -> str:
    """`part` of `whole` in percent; "-" where `whole` is 0."""
    return share(part / whole if whole else None)


def plural(count: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def seconds_of(text: str) -> float:
    """Parses `90`, `30s`, `5m`, `2h`, `1d` or `500ms` into seconds. Raises ValueError that says what was expected."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(digits) :] or "s"
    try:
        value = float(digits) * units[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not a duration; write it like 90, 30s, 5m, 2h or 1d") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text!r} is not a duration; it must not be negative")
    return value
