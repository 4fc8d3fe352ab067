"""Errors of files as they are told and kept: with what to do, and without what would keep memory in use."""

import errno
from pathlib import Path

_ADVICE = {
    errno.EFBIG: "an extent is larger than a file may be here (ulimit -f, or the file system): set extent_size lower",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
}


def advised(error: OSError, path: Path) -> OSError:
    """*error* about *path*, with what to do where that is known."""
    text = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0)
    return OSError(error.errno, text if advice is None else f"{text}: {advice}", str(path))


def bare(error: OSError) -> OSError:
    """*error* to be kept: without the frames it came through, which would keep the rows' memory in use."""
    error.__traceback__ = error.__context__ = None
    return error
