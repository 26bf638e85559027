"""The prefill budget of a step, chosen so that decoding requests are not held up.

It learns the cost of a step from those that have run. policy.py divides the budget among requests.
"""

TARGET_S = 0.1
"""The target duration of a step while requests decode: ten tokens a second are faster than people read."""
RATE = 0.5
"""Learning rate: how far an error in a step's estimate moves the estimate."""
BASE, DECODE = 16, 4
"""The fixed cost of a step, and the cost of a decode in it, in prompt tokens: scales for the features of the
estimate.
"""


class Pace:
    """An estimate of a step's duration, linear in its decodes and its prefill tokens, by normalised least mean squares.

    Attention makes tokens late in a long prompt more expensive; the estimate adapts from chunk to chunk.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        """Limits of the budget, in tokens. `smallest` is granted whatever it costs, so that every prompt makes
        progress.
        """
        self._smallest = smallest
        self._largest = largest
        self._base = self._decode = self._token = 0.0
        """Seconds per unit of the features."""

    def budget(self, decodes: int) -> int:
        """The prefill tokens that a step with `decodes` decodes should take on.

        Where the decodes alone take more than half of the target, prefill may take as long as they do.
        """
        if self._token <= 0:
            return self._largest
        decoding_s = self._seconds(decodes, 0)
        prefill_s = max(TARGET_S - decoding_s, decoding_s)
        return max(self._smallest, min(int(prefill_s / self._token), self._largest))

    def observe(self, decodes: int, tokens: int, seconds: float) -> None:
        """Learns from a step with `decodes` decodes and `tokens` prefill tokens that has taken `seconds`."""
        expected = self._seconds(decodes, tokens)
        # Something else may have delayed the step: it counts as twice the expected time at most.
        surprise = min(seconds - expected, expected or seconds)
        step = RATE * surprise / (BASE**2 + (DECODE * decodes) ** 2 + tokens**2)
        self._base = max(0.0, self._base + step * BASE)
        self._decode = max(0.0, self._decode + step * DECODE * decodes)
        self._token = max(0.0, self._token + step * tokens)

    def _seconds(self, decodes: int, tokens: int) -> float:
        return BASE * self._base + DECODE * decodes * self._decode + tokens * self._token
