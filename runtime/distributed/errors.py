"""What goes wrong between ranks."""


class RankLost(Exception):
    """Another rank is gone, or has not answered in time: no collective will succeed any more."""
