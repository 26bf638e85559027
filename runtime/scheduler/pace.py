"""How much prompt a step may take on, so that it does not hold up those who are reading along.

It learns from the steps that have run what they cost. Whose prompt it is, is policy.py's to say.
"""

TARGET_S = 0.1
"""A step should be over by then while requests decode: ten tokens a second are faster than people read."""
RATE = 0.5
"""How far a step's surprise moves the estimate."""
BASE, DECODE = 16, 4
"""A step, and a decode in it, cost about as much as so many tokens of a prompt: only where to look first for the cause
of a surprise."""


class Pace:
    """An estimate of a step's time, linear in its decodes and its other tokens, by normalised least mean squares.

    Attention makes tokens late in a long prompt dearer; as chunks follow each other, the estimate follows them.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        """A budget is between these, in tokens; the smallest is granted at any cost, so that prompts get on."""
        self._smallest = smallest
        self._largest = largest
        self._base = self._decode = self._token = 0.0
        """Seconds, in units of the features."""

    def budget(self, decodes: int) -> int:
        """How many tokens of prompts the step of so many decodes should take on.

        Where the decodes alone take more than half of the target the prompts may take as long again as they do.
        """
        if self._token <= 0:
            return self._largest
        decoding_s = self._seconds(decodes, 0)
        prefill_s = max(TARGET_S - decoding_s, decoding_s)
        return max(self._smallest, min(int(prefill_s / self._token), self._largest))

    def observe(self, decodes: int, tokens: int, seconds: float) -> None:
        """A step of so many decodes and other tokens has taken `seconds`."""
        expected = self._seconds(decodes, tokens)
        # Something else may have held the step up: it counts for no more than twice what was expected.
        surprise = min(seconds - expected, expected or seconds)
        step = RATE * surprise / (BASE**2 + (DECODE * decodes) ** 2 + tokens**2)
        self._base = max(0.0, self._base + step * BASE)
        self._decode = max(0.0, self._decode + step * DECODE * decodes)
        self._token = max(0.0, self._token + step * tokens)

    def _seconds(self, decodes: int, tokens: int) -> float:
        return BASE * self._base + DECODE * decodes * self._decode + tokens * self._token
