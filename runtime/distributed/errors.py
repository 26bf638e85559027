"""RankLost: the failure of communication between ranks."""


class RankLost(Exception):
    """Another rank is gone, or has not answered in time: no further collective can succeed."""
