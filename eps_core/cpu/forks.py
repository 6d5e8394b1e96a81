"""Detection of a fork's child: OpenMP's threads do not come along, and calling them there never ends."""

import os

_forked = _watched = False


def _note() -> None:
    global _forked
    _forked = True


def watch() -> None:
    """From here on forks are noticed. To be called before a library may have made threads; costs nothing."""
    global _watched
    if not _watched and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_note)
    _watched = True


def forked() -> bool:
    return _forked
